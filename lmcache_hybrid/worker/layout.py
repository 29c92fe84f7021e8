# SPDX-License-Identifier: Apache-2.0
"""Finds where the bytes of a layer's block lie in memory, and the order to store them in.

vLLM shows each layer's KV cache as a view with the same dimensions for every order in memory:
heads before tokens or behind them, layers or heads between blocks, a block in one piece or in
kernel blocks. A block is stored in memory order, so contiguous bytes are copied in one piece.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lmcache_hybrid.core.errors import ConfigError


@dataclass(frozen=True)
class Run:
    """Bytes that lie back to back in every block.

    Attributes:
        storage: the memory that contains them.
        start: byte offset of those of block 0.
        size: bytes per block.
        stride: bytes from one block to the next.
    """

    storage: torch.UntypedStorage
    start: int
    size: int
    stride: int

    def rows(self, num_blocks: int) -> torch.Tensor:
        """Make a uint8 view [num_blocks, size] of ``storage``, never an inference tensor.

        Other threads write to it outside of inference mode, which is an error for tensors made
        inside.
        """
        with torch.inference_mode(False):
            memory = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
            memory.set_(self.storage)
            rows = memory.as_strided((num_blocks, self.size), (self.stride, 1), self.start)
        assert not rows.is_inference()
        return rows

    def joins(self, other: "Run") -> bool:
        """Whether ``other`` begins where this one ends, in every block."""
        return (
            self.storage.data_ptr() == other.storage.data_ptr()
            and self.stride == other.stride
            and self.start + self.size == other.start
            and self.size + other.size <= self.stride
        )


def runs_of(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[list[Run], str]:
    """Find the bytes of a layer's blocks.

    Args:
        name: of the layer, for errors.
        tensor: the layer's KV cache. Its first dimension counts blocks, or kernel
            blocks: then each block is an equal number of adjacent ones.
        num_blocks: how many blocks vLLM has.

    Returns:
        The runs of a block in memory order, and a text that says where each value of a block
        lies in them. The text leaves out what does not change these bytes: padding, the number
        of blocks, what lies between blocks.

    Raises:
        ConfigError: the tensor's blocks are not a multiple of ``num_blocks``, or several of its
            values share bytes.
    """
    kernel_blocks, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not kernel_blocks:
        raise ConfigError(
            f"KV cache of layer {name} has {tensor.shape[0]} blocks, which is not a multiple of "
            f"vLLM's {num_blocks}; choose another --attention-backend."
        )
    width = tensor.element_size()
    strides = [stride * width for stride in tensor.stride()]
    block_stride = kernel_blocks * strides[0]
    shape = (kernel_blocks, *tensor.shape[1:])
    # (stride in bytes, count, dimension), the widest first; kernel blocks are dimension 0. The
    # stride of a dimension of size one means nothing.
    inner = sorted(((strides[d], n, d) for d, n in enumerate(shape) if n > 1), reverse=True)
    _refuse_overlaps(name, tensor, [*inner, (block_stride, num_blocks, -1)])
    size = width
    while inner and inner[-1][0] == size:
        size *= inner.pop()[1]
    outer = [range(0, stride * n, stride) for stride, n, _ in inner]
    start, storage = tensor.storage_offset() * width, tensor.untyped_storage()
    runs = [
        Run(storage, start + sum(offsets), size, block_stride)
        for offsets in itertools.product(*outer)
    ]
    return runs, _layout(shape, strides, tensor.dtype)


def _layout(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> str:
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
    return f"{shape[0]} x {tuple(shape[1:])} in order {tuple(order)} of {dtype}"


def _refuse_overlaps(
    name: str, tensor: torch.Tensor, dimensions: Sequence[tuple[int, int, int]]
) -> None:
    """Raise ConfigError if two values may share bytes, within a block or of two blocks."""
    extent = tensor.element_size()
    for stride, count, _ in sorted(dimensions):
        if count == 1:
            continue
        if stride < extent:
            raise ConfigError(
                f"KV cache of layer {name} with shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()} has values that share bytes, so its blocks cannot be stored "
                "one by one; set VLLM_KV_CACHE_LAYOUT=LBNHC or choose another "
                "--attention-backend."
            )
        extent += stride * (count - 1)


def merge(runs: Sequence[Run]) -> list[Run]:
    """Join runs that lie back to back; the order of the bytes stays the same.

    In block-outermost layouts all layers of a block become one run.
    """
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].joins(run):
            merged[-1] = replace(merged[-1], size=merged[-1].size + run.size)
        else:
            merged.append(run)
    return merged
