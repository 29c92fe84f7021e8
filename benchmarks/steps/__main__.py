# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.steps: the scheduler side's time in each step of a long prompt."""

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import header, write

# Prompts with a hint, in blocks, and how many of each.
HINTED, REQUESTS = (64, 340, 3000), 1000
# A step of ten times the blocks may take so many times as long: no more than noise.
GROWTH = 3.0


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/steps.json"),
    blocks: Annotated[str, typer.Option(help="Of a prompt; two sizes.")] = "3000,30000",
) -> None:
    """Measure one thread; ends with 1 where a step grows with the prompt."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    # vLLM and torch take ten seconds, which --help need not wait for.
    from benchmarks.steps import hints
    from benchmarks.steps.measure import PER_STEP, begin, measure

    logging.disable(logging.ERROR)
    begin()
    small, large = (int(each) for each in blocks.split(","))
    measure(small, True)  # warm
    arms = {
        f"{size} blocks, events {'on' if events else 'off'}": measure(size, events)
        for size in (small, large)
        for events in (False, True)
    }
    growth = {
        each: round(
            arms[f"{large} blocks, events {each}"]["step"]
            / arms[f"{small} blocks, events {each}"]["step"],
            2,
        )
        for each in ("off", "on")
    }
    hinted = {f"{each} blocks": hints.measure(each, REQUESTS) for each in HINTED}
    figures = {
        **header("benchmarks.steps"),
        "blocks_per_step": PER_STEP,
        "milliseconds": arms,
        "growth of a step": growth,
        "most growth": GROWTH,
        "microseconds of requests with a hint": hinted,
        "requests of each": REQUESTS,
    }
    write(out, figures)
    print(json.dumps({"milliseconds": arms, "growth": growth, "hints": hinted}, indent=1))
    if max(growth.values()) > GROWTH:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
