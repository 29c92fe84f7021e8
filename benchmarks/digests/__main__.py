# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.digests: what a key costs; figures and a table."""

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.figures import header, write
from benchmarks.performance.shapes import SHAPES
from lmcache_hybrid.core.digests import PLAIN, Digester, KeyedDigester
from lmcache_hybrid.storage.record_format import CHUNK_BYTES, digests_of
from lmcache_hybrid.worker.pages import GroupPages

KINDS: dict[str, Digester] = {"plain": PLAIN, "keyed": KeyedDigester(bytes(range(32)))}
STEPS = {
    "digest": "Digest alone",
    "save": "Save: copy out of the cache and digest",
    "load": "Load: check and copy into the cache",
}
ROUNDS = 30
TABLE = re.compile(r"(?<=<!-- digests -->\n).*?(?=<!-- /digests -->)", re.S)


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/digests.json"),
    page: Annotated[Path, typer.Option(help="Page with the table.")] = Path("docs/security.md"),
    shape: Annotated[str, typer.Option(help="One state of this model.")] = "qwen3.6-27b",
) -> None:
    """Measure one thread on this machine's CPU and memory."""
    torch.set_num_threads(1)
    size = SHAPES[shape].layers * SHAPES[shape].state_bytes
    figures = {
        **header("benchmarks.digests"),
        "bytes": size,
        "chunk_bytes": CHUNK_BYTES,
        "gb_per_s": {kind: measure(size, digester) for kind, digester in KINDS.items()},
    }
    write(out, figures)
    page.write_text(TABLE.sub(lambda _: table(figures), page.read_text()))


def measure(size: int, digester: Digester) -> dict[str, float]:
    """GB/s of each step, the median of ROUNDS on one thread.

    Args:
        size: bytes of the payload.
    """
    memory = {"state": torch.randint(0, 256, (3, size), dtype=torch.uint8)}
    pages, out = GroupPages(["state"], memory), torch.empty(size, dtype=torch.uint8)
    digests = pages.gather(1, out, digester)
    steps: dict[str, Callable[[], object]] = {
        "digest": lambda: digests_of(memoryview(out.numpy()), digester),
        "save": lambda: pages.gather(1, out, digester),
        "load": lambda: pages.scatter(2, out, digests, digester),
    }
    return {name: round(size / _seconds(step) / 1e9, 2) for name, step in steps.items()}


def _seconds(step: Callable[[], object]) -> float:
    step()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(figures: dict) -> str:
    """The figures as they stand in docs/security.md."""
    rates, size = figures["gb_per_s"], figures["bytes"]
    lines = [
        f"| One thread, a state of {size / 1e6:.1f} MB | without a key | with a key |",
        "|---|---|---|",
    ]
    for name, title in STEPS.items():
        cells = (
            f"{rates[kind][name]} GB/s, {size / rates[kind][name] / 1e6:.0f} ms" for kind in KINDS
        )
        lines.append(f"| {title} | {' | '.join(cells)} |")
    said = f"`{figures['command']}`, {figures['machine']}, {figures['date']}."
    return "\n".join(["", *lines, "", said, "", ""])


if __name__ == "__main__":
    typer.run(main)
