# SPDX-License-Identifier: Apache-2.0
"""Copies between an accelerator's KV cache and pinned memory: right, and how fast.

    python -m benchmarks.performance.gpu --out docs/gpu.json

Pages of real sizes, no model. Every byte is compared with a naive copy; bandwidth is
given as a share of what one large copy of the same bytes reaches on the same device.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated

import torch
import typer

from benchmarks.performance.path import prefix_of
from benchmarks.performance.shapes import SHAPES, Shape, block_ids
from lmcache_hybrid.copies import Item, Threads, copies_for
from lmcache_hybrid.record import HEADER_BYTES, RecordKey, payload_bytes, record_bytes


def _items(shape: Shape, pages: dict, blocks: int, first: int, memory: torch.Tensor) -> list[Item]:
    """The records of one prompt in one pinned buffer, as LMCache's pool would hold them."""
    items, at = [], 0
    for group, block in block_ids(shape.load("gpu", prefix_of(blocks), first)):
        size = record_bytes(pages[group].block_bytes)
        record = memory[at : at + size]
        payload = record[HEADER_BYTES : HEADER_BYTES + payload_bytes(size)]
        buffer = SimpleNamespace(payload=payload, digests=b"")
        items.append(Item(RecordKey(0, group, b"", block), pages[group], block, buffer))
        at += size
    return items


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    torch.accelerator.synchronize(device)
    started = time.perf_counter()
    work()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def _host_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Until the host may go on, which is all that a step waits for."""
    torch.accelerator.synchronize(device)
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    torch.accelerator.synchronize(device)
    return seconds


def measure(shape: Shape, blocks: int, rounds: int) -> dict:
    """Seconds of gathers, scatters and plain copies of one prompt, taken in turns.

    Raises:
        AssertionError: a byte that was restored is not the byte that was saved.
    """
    device = torch.accelerator.current_accelerator()
    device = torch.device(device.type, torch.accelerator.current_device_index())
    # As vLLM computes; drivers take no batches of copies on the default stream.
    torch.accelerator.set_stream(torch.Stream(device=device))
    used = blocks + shape.states + 1
    pages = shape.pages(2 * used, str(device))
    size = shape.bytes_at(blocks)
    room = sum(
        record_bytes(pages[group].block_bytes)
        for group, _ in block_ids(shape.load("gpu", prefix_of(blocks), 1))
    )
    memory = torch.empty(room, dtype=torch.uint8, pin_memory=True)
    plain_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    plain_device = torch.empty(size, dtype=torch.uint8, device=device)
    threads = Threads("gpu")
    copies = copies_for(device, threads)
    saved = _items(shape, pages, blocks, 1, memory)
    loaded = [
        old._replace(block=new.block)
        for old, new in zip(saved, _items(shape, pages, blocks, used, memory), strict=True)
    ]
    times: dict[str, list[float]] = defaultdict(list)
    for round_ in range(rounds + 1):
        one = {
            "to host": _seconds(device, lambda: plain_host.copy_(plain_device, non_blocking=True)),
            "to device": _seconds(
                device, lambda: plain_device.copy_(plain_host, non_blocking=True)
            ),
            "gather": _seconds(device, lambda: copies.gather(saved)),
            "host held up by a gather": _host_seconds(device, lambda: copies.gather(saved)),
        }
        copies.gather(saved)()  # the digests, which a thread of the worker computes
        one |= {
            "scatter": _seconds(device, lambda: copies.scatter(loaded, copies.mark())),
        }
        if round_:
            for name, seconds in one.items():
                times[name].append(seconds)
    for old, new in zip(saved, loaded, strict=True):
        naive = torch.cat([rows[old.block].cpu() for rows in old.pages.rows])
        assert torch.equal(old.buffer.payload, naive), "gathered bytes are wrong"
        restored = torch.cat([rows[new.block].cpu() for rows in new.pages.rows])
        assert torch.equal(restored, naive), "scattered bytes are wrong"
    threads.close()
    return {"shape": shape.name, "blocks": blocks, "bytes": size, "seconds": times}


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/gpu.json"),
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3.6-27b",
    tokens: Annotated[list[int], typer.Option(help="Prompt lengths.")] = [10_976, 100_000],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Measurements; the median counts.")] = 7,
) -> None:
    """Check and time the copies of this machine's accelerator."""
    if not torch.accelerator.is_available():
        typer.echo("This machine has no accelerator; on CPU see python -m benchmarks.performance.")
        raise typer.Exit(1)
    figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": []}
    for length in tokens:
        run = measure(SHAPES[shape], length // SHAPES[shape].block_size, rounds)
        figures["runs"].append(run)
        for ours, plain in (("gather", "to host"), ("scatter", "to device")):
            share = median(run["seconds"][plain]) / median(run["seconds"][ours])
            typer.echo(f"{length} tokens, {ours}: {100 * share:.0f} % of one large copy")
        held = median(run["seconds"]["host held up by a gather"]) * 1e3
        typer.echo(f"{length} tokens, a save holds up the host for {held:.2f} ms")
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
