# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.gpu: the tables of docs/gpu.md, from reports of `lmcache-hybrid accept`."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import read

TABLE = re.compile(r"(?<=<!-- gpu:begin -->\n).*?(?=<!-- gpu:end -->)", re.S)
TIMES = re.compile(r"(?<=<!-- gpu-times:begin -->\n).*?(?=<!-- gpu-times:end -->)", re.S)
HEAD = (
    "| Model | Runner, mode | Attention, one block of a layer | N | Answers equal "
    "| Largest difference | A lost block changes |\n|---|---|---|---|---|---|---|\n"
)
# First tokens of a report, and what the page calls them.
SHOWN = {
    "cold": "computed",
    "cold, saving": "computed and stored",
    "own": "hit in vLLM's own cache",
    "RAM": "hit in RAM",
    "local disk after a restart": "hit on disk, after a restart",
}
TIMES_HEAD = (
    "| Model | Runner, mode | tokens | "
    + " | ".join(SHOWN.values())
    + " |\n|---|---|---:|"
    + "---:|" * len(SHOWN)
    + "\n"
)


def main(
    folder: Annotated[Path, typer.Option(help="Reports, as --out of accept wrote them.")] = Path(
        "docs/generated/gpu"
    ),
    page: Annotated[Path, typer.Option(help="Page with the table.")] = Path("docs/gpu.md"),
) -> None:
    """Fill the page's tables anew; measures nothing."""
    reports = [read(path) for path in sorted(folder.glob("*.json"))]
    text = TABLE.sub(lambda _: table(reports), page.read_text())
    page.write_text(TIMES.sub(lambda _: times(reports), text))


def table(reports: list[dict[str, Any]]) -> str:
    """One row a report, by model.

    Args:
        reports: of :func:`lmcache_hybrid.tools.accept.report.as_json`.
    """
    return HEAD + "".join(sorted(map(_row, reports)))


def times(reports: list[dict[str, Any]]) -> str:
    """First tokens of the longest prompts; a row for each report that has some, by model."""
    return TIMES_HEAD + "".join(
        sorted(_times(report) for report in reports if "longest" in report["first_token_seconds"])
    )


def _times(report: dict[str, Any]) -> str:
    found = report["first_token_seconds"]["longest"]
    (tokens,) = {
        length
        for prompt in report["prompts"]
        if prompt["case"] == "longest"
        for length in prompt["tokens"]
    }
    cells = (*_named(report["facts"]), f"{tokens:,}")
    return (
        "| "
        + " | ".join((*cells, *(f"{min(found[name]) * 1e3:.0f} ms" for name in SHOWN)))
        + " |\n"
    )


def _named(facts: dict[str, Any]) -> tuple[str, str]:
    mode = "eager" if facts["enforce_eager"] else "compiled, CUDA graphs"
    return facts["architecture"].removesuffix("ForCausalLM"), f"{facts['runner']}, {mode}"


def _row(report: dict[str, Any]) -> str:
    facts, noise, checks = report["facts"], report["noise"], report["checks"]
    outcomes = Counter(check["outcome"] for check in checks)
    largest = max(check["difference"] or 0.0 for check in checks)
    cells = (
        *_named(facts),
        f"{facts['attention_backends'][0].removesuffix('Backend')}, "
        + facts["layout"]["attention"][0].removesuffix(" of torch.bfloat16"),
        facts["block_size"],
        f"{outcomes['equal']} of {len(checks)}",
        f"{largest:.3g}" if largest else "0",
        f"{min(noise['lost'].values()):.2g} or more",
    )
    return "| " + " | ".join(map(str, cells)) + " |\n"


if __name__ == "__main__":
    typer.run(main)
