# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.eight_bits: restored states in eight bits beside exact ones.

Real engines with LMCache's RAM; see :mod:`.rounding` for how states are rounded. Needs the
checkout: the engine is that of ``tests/e2e``.
"""

import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.eight_bits.rounding import KINDS, SIZES, install
from benchmarks.figures import header, markdown, page_of, read, replace, write
from benchmarks.progress import shown
from lmcache_hybrid.tools.tiny_families import VOCAB_SIZE

if TYPE_CHECKING:
    from tests.e2e.engine import Engine

SHOWN = ("qwen3_next", "granite4", "falcon_h1", "lfm2")
EXACT = "exact"
# Tokens past the boundary where a prompt hits.
SUFFIX = (16, 96)
HEAD = (
    "family",
    "states",
    "bytes of a state",
    "largest difference",
    "mean",
    "changed greedy tokens",
)


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/eight_bits.json"),
    families: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(SHOWN),
    prompts: Annotated[int, typer.Option(min=1, help="Of each family.")] = 1000,
    render_only: Annotated[bool, typer.Option(help="Only write the page's table.")] = False,
) -> None:
    """Restore each prompt's state exactly and in eight bits, and compare its next token.

    Every prompt is new, hits at its first block's end and is asked once with each kind of state,
    in random order. The exact state is asked for twice: that shows the noise.
    """
    if not render_only:
        with shown() as progress:
            found = {name: measure(name, prompts, progress) for name in families.split(",")}
        write(out, {**header("benchmarks.eight_bits"), "prompts": prompts, "families": found})
    figures = read(out)
    page = page_of(out, "design.md")
    if page.exists():
        replace(page, "eight_bits", table(figures))
    print(table(figures))


def measure(family: str, prompts: int, progress: Progress) -> dict[str, Any]:
    """For each kind of state and prompt: largest and mean difference, and 1 for another token."""
    import benchmarks.quiet  # noqa: F401  # for the engines only: a test imports this file
    from lmcache_hybrid.tools.tiny_models import make_model
    from tests.e2e.engine import Engine

    task = progress.add_task(family, total=prompts)
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder, "states")
        model = make_model(family, Path(folder, "model"))
        lmcache = {"local_cpu": True, "max_local_cpu_size": 0.5}
        options = {"max_logprobs": VOCAB_SIZE, "max_model_len": 4096}
        prepare = partial(install, str(switch))
        differences: dict[str, list[list[float]]] = {kind: [] for kind in (EXACT, *KINDS)}
        with Engine(model, lmcache, prepare=prepare, **options) as engine:
            for number in range(prompts):
                rng = random.Random(f"{family} {number}")
                size = engine.info["block_size"] + rng.randint(*SUFFIX)
                ids = [rng.randrange(32, 127) for _ in range(size)]
                engine.ask(ids, 1)
                known = _hit(engine, switch, EXACT, ids)
                for kind in rng.sample(list(differences), len(differences)):
                    answer = _hit(engine, switch, kind, ids)
                    differences[kind].append(_difference(known, answer))
                progress.advance(task)
            block = engine.info["block_size"]
        sizes = read(switch.with_name(SIZES))
    found = {kind: _summary(values) for kind, values in differences.items()}
    return {"block_size": block, "bytes": sizes, "differences": found}


def _hit(engine: "Engine", switch: Path, kind: str, ids: list[int]) -> dict[str, float]:
    """Log-probabilities of the next token, all of them, behind a state of this kind."""
    switch.write_text(kind)
    engine.forget()
    answer = engine.ask(ids, 1, logprobs=VOCAB_SIZE)
    assert answer.external == engine.info["block_size"], answer.external
    return answer.logprobs[0]


def _difference(known: dict[str, float], answer: dict[str, float]) -> list[float]:
    apart = [abs(value - answer[token]) for token, value in known.items()]
    changed = max(known, key=known.__getitem__) != max(answer, key=answer.__getitem__)
    return [max(apart), fmean(apart), float(changed)]


def _summary(values: Sequence[Sequence[float]]) -> dict[str, float]:
    largest, mean, changed = zip(*values, strict=True)
    return {"largest": max(largest), "mean": fmean(mean), "changed": int(sum(changed))}


def table(figures: dict[str, Any]) -> str:
    """A row for each family and kind of state."""
    rows = []
    for family, found in figures["families"].items():
        for kind, values in found["differences"].items():
            size = found["bytes"]["exact" if kind == EXACT else "eight bits"]
            rows.append(
                [
                    family,
                    kind,
                    f"{size:,}",
                    f"{values['largest']:.3g}",
                    f"{values['mean']:.3g}",
                    f"{values['changed']} of {figures['prompts']:,}",
                ]
            )
    return markdown(HEAD, rows, left=2)


if __name__ == "__main__":
    typer.run(main)
