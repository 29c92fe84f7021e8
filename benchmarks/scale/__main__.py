# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.scale: what one Valkey serves; figures and tables."""

import dataclasses
import logging
from pathlib import Path
from typing import Annotated

# Before LMCache is imported.
import typer

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.figures import header, page_of, read, write
from benchmarks.scale import report
from benchmarks.scale.model import Sizes, Stream

BLOCKS = 14  # of 784 tokens: 10,976
LOCAL = 2  # a system prompt of 1,568 tokens
CLUSTERS = (3, 6, 12, 24)
PROMPTS = 3000


def main(
    out: Annotated[Path, typer.Option(help="JSON file; the page lies above it.")] = Path(
        "docs/generated/scale.json"
    ),
    shape: Annotated[str, typer.Option(help="Page sizes: qwen3.6-27b or small.")] = "qwen3.6-27b",
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Page anew from the JSON file.")
    ] = False,
) -> None:
    """Measure what one engine asks of a real Valkey, and compute what many would."""
    if not render_only:
        logging.disable(logging.ERROR)
        figures = {
            **header("benchmarks.scale"),
            **_measure(shape),
        }
        write(out, figures)
    page = page_of(out)
    if page.exists():
        report.fill(page, read(out))


def _measure(name: str) -> dict:
    from benchmarks.performance.shapes import SHAPES
    from benchmarks.scale import measure

    shape = SHAPES[name]
    sizes = Sizes(
        attention=shape.layers * shape.attention_bytes,
        state=shape.layers * shape.states * shape.state_bytes,
        groups=shape.states,
    )
    figures = measure.events(shape, BLOCKS, LOCAL)
    figures["events"] |= measure.kept_in_ram(shape, BLOCKS)
    _check(figures["events"], sizes)
    hit, save = figures["events"]["hit"], figures["events"]["save"]
    return figures | {
        "shape": shape.name,
        "block_size": shape.block_size,
        "blocks": BLOCKS,
        "sizes": dataclasses.asdict(sizes),
        "cpu_per_byte": {
            "out": hit["cpu_seconds"] / hit["bytes_out"],
            "in": save["cpu_seconds"] / save["bytes_in"],
        },
        "streams": [
            dataclasses.asdict(stream)
            for stream in (
                Stream("half new prompts", 1, BLOCKS, 0.5, BLOCKS, BLOCKS / 2, 0.5),
                Stream("chat", 1, BLOCKS + 1, 1, BLOCKS, 1, 1),
                Stream("chat, in vLLM's cache", 1, BLOCKS + 1, 0.1, BLOCKS, 1, 1),
            )
        ],
        "spread": measure.spread(shape, BLOCKS, CLUSTERS, PROMPTS),
    }


def _check(events: dict, sizes: Sizes) -> None:
    """The formulae of model.py count what was measured. Raises AssertionError."""
    records = sizes.records_of(BLOCKS)
    for prompt in ("new", "stored"):
        assert events[f"lookup of a {prompt} prompt"]["commands"] == {"exists": records}
    longer = records + 1 + BLOCKS * sizes.groups
    assert events["lookup of one a block longer"]["commands"] == {"exists": longer}
    assert events["hit"]["commands"] == {"exists": records, "get": records}
    assert events["save"]["commands"] == {"exists": records, "set": records}
    assert events["first hit, local_cpu"]["commands"].get("get") == records
    assert not events["second hit, local_cpu"]["commands"]
    for event, direction in (("hit", "bytes_out"), ("save", "bytes_in")):
        assert 1 <= events[event][direction] / sizes.bytes_of(BLOCKS) < 1.001, event


if __name__ == "__main__":
    typer.run(main)
