# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.gpu: the table of docs/gpu.md, from reports of `lmcache-hybrid accept`."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import read

TABLE = re.compile(r"(?<=<!-- gpu:begin -->\n).*?(?=<!-- gpu:end -->)", re.S)
HEAD = (
    "| Model | Runner, mode | Attention, one block of a layer | N | Answers equal "
    "| Largest difference | A lost block changes |\n|---|---|---|---|---|---|---|\n"
)


def main(
    folder: Annotated[Path, typer.Option(help="Reports, as --out of accept wrote them.")] = Path(
        "docs/generated/gpu"
    ),
    page: Annotated[Path, typer.Option(help="Page with the table.")] = Path("docs/gpu.md"),
) -> None:
    """Fill the page's table anew; measures nothing."""
    reports = [read(path) for path in sorted(folder.glob("*.json"))]
    page.write_text(TABLE.sub(lambda _: table(reports), page.read_text()))


def table(reports: list[dict[str, Any]]) -> str:
    """One row a report, by model.

    Args:
        reports: of :func:`lmcache_hybrid.tools.accept.report.as_json`.
    """
    return HEAD + "".join(sorted(map(_row, reports)))


def _row(report: dict[str, Any]) -> str:
    facts, noise, checks = report["facts"], report["noise"], report["checks"]
    outcomes = Counter(check["outcome"] for check in checks)
    largest = max(check["difference"] or 0.0 for check in checks)
    cells = (
        facts["architecture"].removesuffix("ForCausalLM"),
        f"{facts['runner']}, {'eager' if facts['enforce_eager'] else 'compiled, CUDA graphs'}",
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
