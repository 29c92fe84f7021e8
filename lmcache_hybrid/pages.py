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
from lmcache_hybrid.record import CHUNK_BYTES, DIGEST_BYTES, check, digest


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
        self.layout = tuple(layout)
        self.block_bytes = sum(row.shape[1] for row in self.rows)
        self._chunks = _chunks([row.shape[1] for row in self.rows])
        # Not Tensor.copy_ on CPU, which starts OpenMP threads beside those of the forward.
        host = all(row.device.type == "cpu" for row in self.rows)
        self._host = [row.numpy() for row in self.rows] if host else None

    @property
    def num_blocks(self) -> int:
        return min(row.shape[0] for row in self.rows)

    def gather(self, block: int, out: torch.Tensor) -> bytes:
        """Copy one block of every layer into ``out``. Mutates ``out``.

        Args:
            block: block id, never 0 (the null block).
            out: uint8 of ``block_bytes`` elements, in CPU memory.

        Returns:
            The digests of the chunks of ``out``, see :mod:`lmcache_hybrid.record`.
        """
        self._check(block, out)
        assert self._host is not None, "a device's pages are gathered by StreamCopies"
        target, digests = out.numpy(), []
        for number, pieces in enumerate(self._chunks):
            for row, at, to, size in pieces:
                np.copyto(target[to : to + size], self._host[row][block, at : at + size])
            digests.append(digest(target[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]))
        return b"".join(digests)

    def scatter(self, block: int, data: torch.Tensor, digests: bytes) -> None:
        """Copy ``data`` into one block of every layer, chunk by chunk. Mutates the KV cache.

        Args:
            block: block id, never 0 (the null block).
            data: uint8 of ``block_bytes`` elements, in CPU memory.
            digests: of the chunks of ``data``.

        Raises:
            RecordError: a chunk is damaged; neither it nor a later one was copied.
        """
        self._check(block, data)
        assert self._host is not None, "a device's pages are scattered by StreamCopies"
        source = data.numpy()
        for number, pieces in enumerate(self._chunks):
            self._check_chunk(number, source, digests)
            for row, at, to, size in pieces:
                np.copyto(self._host[row][block, at : at + size], source[to : to + size])

    def check_payload(self, data: torch.Tensor, digests: bytes) -> None:
        """Raises RecordError when ``data`` is not what was digested."""
        source = data.numpy()
        for number in range(len(self._chunks)):
            self._check_chunk(number, source, digests)

    def _check_chunk(self, number: int, source: np.ndarray, digests: bytes) -> None:
        assert len(digests) == len(self._chunks) * DIGEST_BYTES
        expected = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        check(source[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], expected)

    def pieces(self, block: int, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the bytes of one block with their place in ``data``, for copies on a device.

        Args:
            block: block id, never 0 (the null block).
            data: uint8 of ``block_bytes`` elements, in CPU memory.

        Returns:
            (bytes of the KV cache, as many bytes of ``data``), both dense uint8 views.
        """
        self._check(block, data)
        parts = data.split([row.shape[1] for row in self.rows])
        return [(row[block], part) for row, part in zip(self.rows, parts)]

    def _check(self, block: int, data: torch.Tensor) -> None:
        assert 0 < block < self.num_blocks, f"block {block} of {self.num_blocks}"
        assert data.dtype == torch.uint8 and data.numel() == self.block_bytes


def _chunks(rows: Sequence[int]) -> list[list[tuple[int, int, int, int]]]:
    """Per chunk of a payload the pieces of rows in it: (row, from, to in the payload, size)."""
    chunks: list[list[tuple[int, int, int, int]]] = [
        [] for _ in range(-(-sum(rows) // CHUNK_BYTES))
    ]
    start = 0
    for row, size in enumerate(rows):
        at = 0
        while at < size:
            chunk, used = divmod(start + at, CHUNK_BYTES)
            piece = min(size - at, CHUNK_BYTES - used)
            chunks[chunk].append((row, at, start + at, piece))
            at += piece
        start += size
    return chunks


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
