# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.reuse --out docs/generated/reuse.json: replay traces, write and plot."""

import logging
import os
from pathlib import Path
from typing import Annotated

# Before vLLM and LMCache are imported: a line for each request would bury the progress.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import typer  # noqa: E402

from benchmarks.figures import header, page_of, read, replace, write
from benchmarks.progress import shown  # noqa: E402
from benchmarks.reuse import plot, report, traces  # noqa: E402


def main(
    out: Annotated[Path, typer.Option(help="JSON file; the plot lies beside it, the page above.")],
    trace: Annotated[
        list[str] | None, typer.Option(help=f"Only this trace: {', '.join(traces.TRACES)}.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the traces.")] = 0,
    block_size: Annotated[int, typer.Option(help="N, tokens per block.")] = 784,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Page and plot anew from the JSON file.")
    ] = False,
) -> None:
    """Measure how much of what could be reused is reused."""
    if not render_only:
        unknown = set(trace or ()) - traces.TRACES.keys()
        if unknown:
            raise typer.BadParameter(f"there is no trace {', '.join(sorted(unknown))}")
        made = [make(seed) for name, make in traces.TRACES.items() if name in (trace or [name])]
        write(out, _measure(made, arm, block_size))
    figures = read(out)
    plot.draw(figures, out.with_suffix(".svg"))
    page = page_of(out)
    if page.exists():
        replace(page, "reuse", report.tables(figures))


def _measure(made: list[traces.Trace], arms: list[str] | None, block_size: int) -> dict:
    from benchmarks.reuse import replay

    logging.disable(logging.WARNING)
    todo = [job for job in replay.jobs(made, block_size) if job.name in (arms or [job.name])]
    if not todo:
        raise typer.BadParameter(f"no such arm: {', '.join(arms or ())}")
    runs = []
    with shown() as progress:
        task = progress.add_task("", total=sum(len(job.trace.requests) for job in todo))
        for job in todo:
            progress.update(task, description=f"{job.trace.name}, {job.store}: {job.title}")
            runs.append(replay.run(job, lambda: progress.advance(task)))
    return {
        **header("benchmarks.reuse"),
        "block_size": block_size,
        "batch_tokens": replay.BATCH,
        "page_bytes": block_size * replay.ATTENTION_BYTES,
        "state_pages": replay.STATE_PAGES,
        "traces": {trace.name: replay.describe(trace, block_size) for trace in made},
        "runs": runs,
    }


if __name__ == "__main__":
    typer.run(main)
