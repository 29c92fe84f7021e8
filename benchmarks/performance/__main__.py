# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.performance: ask all questions, write figures, page and plot."""

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.figures import header, page_of, read, write
from benchmarks.progress import shown

STORE_QUESTIONS = ("restore", "save", "memory", "profile", "lookup")
ENGINE_QUESTIONS = ("repeats", "whole_blocks", "colds", "decodes", "beside_restores", "mixed")
QUESTIONS = {
    "restore": "bandwidth of restores beside plain reads of the same bytes",
    "save": "how long a save holds up a step, beside a plain copy",
    "memory": "memory that a restore takes beside LMCache's pool",
    "profile": "where the time of one save and one restore goes",
    "lookup": "lookups of long prompts, over one and four ranks",
    "repeats": "first token of a prompt asked before: cold, vLLM's cache, each store",
    "whole_blocks": "the same where the prompt's last block is computed",
    "colds": "first token of a new prompt that is stored",
    "decodes": "time between tokens with a connector that has nothing to do",
    "beside_restores": "decoding while other requests hit",
    "mixed": "a stream of which half hits",
    "short_prompts": "first token of a prompt shorter than a block, asked before",
    "slow_lookups": "steps while a Redis answers lookups after 50 ms",
    "throttled": "repeats from a Redis behind a slow link: loaded or computed",
    "bytes": "bytes stored and loaded for one prompt",
}
# Engines of their own, with no more than two others' worth of memory beside them.
ALONE = ("short_prompts", "slow_lookups", "throttled")
BLOCKS = 14  # of 784 tokens: 10,976


def main(
    out: Annotated[
        Path, typer.Option(help="JSON file; the plot lies beside it, the page above.")
    ] = Path("docs/generated/performance.json"),
    question: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this one, again for more: {', '.join(QUESTIONS)}."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each arm, taken in turns.")] = 5,
    shape: Annotated[str, typer.Option(help="Page sizes: qwen3.6-27b or small.")] = "qwen3.6-27b",
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Page and plot anew from the JSON file.")
    ] = False,
) -> None:
    """Measure restores, saves, lookups and steps beside what bounds them."""
    from benchmarks.performance import plot, report, shapes

    if shape not in shapes.SHAPES:
        raise typer.BadParameter(f"{shape} is none of {', '.join(shapes.SHAPES)}")
    if unknown := set(question or ()) - QUESTIONS.keys():
        raise typer.BadParameter(f"there is no question {', '.join(sorted(unknown))}")
    if not render_only:
        asked = [name for name in QUESTIONS if name in (question or [name])]
        figures = read(out) if question and out.exists() else {"answers": {}}
        made = {"rounds": rounds, **header("benchmarks.performance")}
        figures["versions"] = made.pop("versions")
        logging.disable(logging.ERROR)
        for name, answer in _measure(asked, rounds, shapes.SHAPES[shape]):
            report.keep(figures["answers"], name, {**made, **answer})
            write(out, figures)
    figures = read(out)
    plot.draw(figures, out.with_suffix(".svg"))
    page = page_of(out)
    if page.exists():
        report.fill(page, figures)
        report.fill_goals(page.parents[1] / "CONTRIBUTING.md", figures)


def _measure(asked, rounds: int, shape):
    from benchmarks.performance import engines, throttled
    from benchmarks.performance.model import make_model
    from benchmarks.performance.report import NEED_MODEL

    with (
        shown() as progress,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        ExitStack() as stack,
    ):
        model = arms = None
        for name in asked:
            task = progress.add_task(QUESTIONS[name], total=rounds + 1)

            def tick(task=task) -> None:
                progress.advance(task)

            if name in NEED_MODEL and model is None:
                model = make_model(Path(folder))
            if name in (*ENGINE_QUESTIONS, "bytes") and arms is None:
                arms = engines.Arms(stack, model, Path(folder))
            if name in STORE_QUESTIONS:
                answer = _ask_stores(name, rounds, shape)
            elif name == "bytes":
                answer = engines.stored(arms)
            elif name in ALONE:
                if arms is not None:
                    stack.close()
                    arms = None
                measure = throttled.throttled if name == "throttled" else getattr(engines, name)
                answer = {"seconds": measure(model, Path(folder), rounds, tick)}
                if name == "short_prompts":
                    answer |= engines.short_prompt(model.block_size)
            else:
                answer = {"seconds": getattr(engines, name)(arms, rounds, tick)}
            if name in NEED_MODEL:
                answer["model"] = model.record
            progress.update(task, completed=rounds + 1)
            yield name, answer


def _ask_stores(name: str, rounds: int, shape) -> dict:
    """Answer a question that needs no engine."""
    from benchmarks.performance import lookups, path, profile

    size = {"shape": shape.name, "bytes": shape.bytes_at(BLOCKS)}
    if name in ("restore", "save"):
        measure = getattr(path, name)
        seconds = {b: measure(b, shape, BLOCKS, rounds) for b in path.BACKENDS}
        if name == "restore":
            cold = path.restore("disk", shape, BLOCKS, rounds, uncached=True)
            seconds["disk, not cached"] = cold
        else:
            seconds = {"disk, full" if b == "disk" else b: each for b, each in seconds.items()}
        return {**size, "tokens": BLOCKS * shape.block_size, "seconds": seconds}
    if name == "memory":
        return {**size, "grown": {b: path.memory(b, shape, BLOCKS, rounds) for b in path.BACKENDS}}
    if name == "profile":
        seconds = {b: profile.profile(b, shape, BLOCKS) for b in path.BACKENDS}
        return {"shape": shape.name, "seconds": seconds}
    lengths = (32_000, 64_000, 128_000)
    return {"transport": lookups.lookups(lengths, (1, 4), rounds)}


if __name__ == "__main__":
    typer.run(main)
