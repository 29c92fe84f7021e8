# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.weights: what the identity of the weights costs at start-up."""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import typer  # noqa: E402

from benchmarks.figures import header, read, write
from benchmarks.weights import report  # noqa: E402

TENSOR_BYTES = 64 << 20


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/weights.json"),
    page: Annotated[Path, typer.Option(help="Page with the table.")] = Path("docs/reliability.md"),
    tensors: Annotated[int, typer.Option(help="Of 64 MiB each, in one file.")] = 32,
    rounds: Annotated[int, typer.Option(help="In which all arms take turns.")] = 5,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Table anew from the JSON file.")
    ] = False,
) -> None:
    """Load a safetensors file as vLLM does, with and without its digest, beside a plain read."""
    if not render_only:
        logging.disable(logging.ERROR)
        figures = {
            **header("benchmarks.weights"),
            "bytes": tensors * TENSOR_BYTES,
            "seconds": _measure(tensors, rounds),
        }
        write(out, figures)
    report.fill(page, read(out))


def _measure(tensors: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median, lowest and highest seconds of each arm; the file is in the page cache."""
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        arms = _arms(Path(folder, "model.safetensors"), tensors)
        for arm in arms.values():
            arm()
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, arm in arms.items():
                started = time.perf_counter()
                arm()
                taken[name].append(time.perf_counter() - started)
    return {
        name: {"median": median(times), "lowest": min(times), "highest": max(times)}
        for name, times in taken.items()
    }


def _arms(file: Path, count: int) -> dict[str, Callable[[], object]]:
    import torch
    from safetensors.torch import save_file
    from torch import nn
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    from lmcache_hybrid.identity.weights import WeightsStream, tensors_identity

    shape = (TENSOR_BYTES // 2 // 8192, 8192)
    names = [f"layers.{number}.weight" for number in range(count)]
    model = nn.Module()
    for name in names:
        tensor = torch.randn(shape, dtype=torch.bfloat16)
        model.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, False))
    content = dict(zip(names, model.parameters(), strict=True))
    save_file({name: tensor.data for name, tensor in content.items()}, file)

    def read() -> None:
        room = bytearray(TENSOR_BYTES)
        with file.open("rb", buffering=0) as data:
            while data.readinto(room):
                pass

    def load(stream: WeightsStream | None) -> None:
        weights = safetensors_weights_iterator([str(file)], False, "lazy")
        for name, tensor in stream.read(weights) if stream else weights:
            content[name].data.copy_(tensor)

    def load_and_digest() -> None:
        stream = WeightsStream()
        load(stream)
        assert stream.identity(model)

    return {
        "plain read": read,
        "load": lambda: load(None),
        "load and digest": load_and_digest,
        "digest of loaded tensors": lambda: tensors_identity(model),
    }


if __name__ == "__main__":
    typer.run(main)
