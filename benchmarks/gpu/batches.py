# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.gpu.batches: does the driver's batched copy copy the right bytes?

Each case runs in a process of its own, because a failed one breaks its CUDA context. The bytes
are compared after every round; some cases end in other bytes without an error.
"""

import random
import subprocess
import sys
from itertools import product
from typing import Annotated

import torch
import typer

PIECES = 4096
ROUNDS = 10
CHECKED = 400
SECONDS = 120
# Bytes of the first four pieces of each batch of 8,192, pieces of a batch, way.
FIRST = (256, 512, 1024, 2048, 4096, 8192, 65_536)
BATCHES = (256, 512, 1024)
WAYS = ("to device", "to host")


def main(
    case: Annotated[
        str, typer.Option(help="Only this one, in this process: 'FIRST,BATCH,WAY'.")
    ] = "",
) -> None:
    """Copy pieces between pinned memory and the device with vLLM's batched copy, and compare."""
    if case:
        first, batch, way = case.split(",")
        if wrong := copy(int(first), int(batch), way == "to host"):
            raise SystemExit(f"{wrong} pieces hold other bytes")
        return
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, so there is no driver to try.")
    broken = 0
    for first, batch, way in product(FIRST, BATCHES, WAYS):
        command = [sys.executable, "-m", "benchmarks.gpu.batches", "--case"]
        try:
            ended = subprocess.run(
                [*command, f"{first},{batch},{way}"],
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            said = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
            outcome = "right" if ended.returncode == 0 else said
        except subprocess.TimeoutExpired:
            outcome = f"hangs for {SECONDS} s"
        broken += outcome != "right"
        print(f"4 x {first:>6} B, then 8,192 B, {batch:>4} a call, {way}: {outcome}", flush=True)
    raise SystemExit(min(broken, 1))


def copy(first: int, batch: int, to_host: bool) -> int:
    """Copy pieces to places in random order, ROUNDS times.

    Args:
        first: bytes of the first four pieces; all others have 8,192.
        batch: pieces in a call.

    Returns:
        How many of the pieces that were compared hold other bytes.
    """
    from vllm import _custom_ops

    dice = random.Random(7)
    sizes = torch.full((PIECES,), 8192)
    sizes[:4] = first
    starts = sizes.cumsum(0) - sizes
    slots = torch.tensor(dice.sample(range(PIECES), PIECES)) * max(first, 8192)
    data = torch.randint(0, 256, (int(sizes.sum()),), dtype=torch.uint8)
    host = torch.zeros_like(data).pin_memory()
    device = torch.zeros(PIECES * max(first, 8192), dtype=torch.uint8, device="cuda")
    here, there = host.data_ptr() + starts, device.data_ptr() + slots
    wrong = 0
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(ROUNDS):
            host.copy_(torch.zeros_like(data) if to_host else data)
            device.zero_()
            if to_host:
                for start, slot, size in torch.stack((starts, slots, sizes), 1).tolist():
                    device[slot : slot + size].copy_(data[start : start + size])
            torch.cuda.synchronize()
            for at in range(0, PIECES, batch):
                part = slice(at, at + batch)
                source, target = (there, here) if to_host else (here, there)
                _custom_ops.swap_blocks_batch(source[part], target[part], sizes[part], not to_host)
            torch.cuda.synchronize()
            copied = device.cpu()
            for piece in (0, 1, 2, 3, *dice.sample(range(PIECES), CHECKED)):
                start, slot, size = (int(each[piece]) for each in (starts, slots, sizes))
                got = host[start : start + size] if to_host else copied[slot : slot + size]
                wrong += not torch.equal(got, data[start : start + size])
    return wrong


if __name__ == "__main__":
    typer.run(main)
