# SPDX-License-Identifier: Apache-2.0
"""One block of one group as bytes.

Pages are copied whole and as bytes, so every layout that keeps a block's
bytes of a layer together is right without knowing what they mean; the layout
is part of the fingerprint.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lmcache_hybrid.errors import ConfigError


class GroupPages:
    """The pages of one group: for each layer a row of bytes per block.

    Attributes:
        layers: names of the layers, in the order their pages are stored.
        block_bytes: bytes of one block over all layers, without padding.
        rows: per layer uint8 [blocks, page bytes], the KV cache itself.
        layout: one string per layer that names shape, strides and dtype of a block.
    """

    def __init__(self, layers: Sequence[str], kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map the layers' tensors, whose first dimension is the block.

        Raises:
            ConfigError: a layer without a tensor, or one whose blocks are not
                contiguous runs of bytes.
        """
        self.layers = tuple(layers)
        self.rows: list[torch.Tensor] = []
        self._copy = _host_copy
        layout: list[str] = []
        for name in self.layers:
            tensor = kv_caches.get(name)
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"layer {name} has no single KV cache tensor ({type(tensor).__name__}), so "
                    "its pages cannot be stored; start this model without LMCacheConnectorV1."
                )
            self.rows.append(_byte_rows(name, tensor))
            layout.append(f"{tuple(tensor.shape[1:])} {tensor.stride()[1:]} {tensor.dtype}")
        if any(row.device.type != "cpu" for row in self.rows):
            self._copy = torch.Tensor.copy_
        self.layout = tuple(layout)
        self.block_bytes = sum(row.shape[1] for row in self.rows)

    @property
    def num_blocks(self) -> int:
        return min(row.shape[0] for row in self.rows)

    def gather(self, block: int, out: torch.Tensor) -> None:
        """Copy one block of every layer into ``out``. Mutates ``out``.

        Args:
            block: block id, never 0 (the null block).
            out: uint8 of ``block_bytes`` elements, on any device.
        """
        self._check(block, out)
        start = 0
        for rows in self.rows:
            end = start + rows.shape[1]
            self._copy(out[start:end], rows[block])
            start = end

    def scatter(self, block: int, data: torch.Tensor) -> None:
        """Copy ``data`` into one block of every layer. Mutates the KV cache.

        Args:
            block: block id, never 0 (the null block).
            data: uint8 of ``block_bytes`` elements, on any device.
        """
        self._check(block, data)
        start = 0
        for rows in self.rows:
            end = start + rows.shape[1]
            self._copy(rows[block], data[start:end])
            start = end

    def _check(self, block: int, data: torch.Tensor) -> None:
        assert 0 < block < self.num_blocks, f"block {block} of {self.num_blocks}"
        assert data.dtype == torch.uint8 and data.numel() == self.block_bytes


def _host_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # Not Tensor.copy_, which starts OpenMP threads beside those of the forward.
    np.copyto(target.numpy(), source.numpy())


def _byte_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as uint8 [num_blocks, page_bytes], sharing its memory."""
    if tensor.dim() < 2 or not tensor[0].is_contiguous():
        raise ConfigError(
            f"KV cache of layer {name} with shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} does not keep a block together; choose another attention backend "
            "or KV cache layout."
        )
    size = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return storage.as_strided(
        (tensor.shape[0], tensor[0].numel() * size),
        (tensor.stride(0) * size, 1),
        tensor.storage_offset() * size,
    )
