# SPDX-License-Identifier: Apache-2.0
"""Copies a record's blocks of one group as bytes: one block, or several smaller than N.

Pages are copied whole and as bytes, so any layout works; the layout is part of the fingerprint.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lmcache_hybrid.core.digests import DIGEST_BYTES, PLAIN, Digester
from lmcache_hybrid.core.errors import ConfigError, LoadError
from lmcache_hybrid.core.groups import Block
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage.record_format import CHUNK_BYTES, check
from lmcache_hybrid.worker.layout import merge, runs_of

# (bytes of the KV cache, as many bytes of host memory), both dense uint8 views.
Pair = tuple[torch.Tensor, torch.Tensor]


class Spans(NamedTuple):
    """Addresses of pieces of memory: int64 [pieces] each, so that thousands cost no more than one.

    A tensor for each piece would cost the host some 25 us, and the GIL each time.

    Attributes:
        pages: addresses in the KV cache.
        host: addresses in host memory.
        sizes: bytes.
        memory: address of the KV cache allocation of each piece; copies never span two.
    """

    pages: np.ndarray
    host: np.ndarray
    sizes: np.ndarray
    memory: np.ndarray


class GroupPages:
    """The pages of one group: one or more rows of bytes per block.

    Attributes:
        layers: names of the layers, in the order their pages are stored, without those
            that share another one's pages.
        num_blocks: how many blocks vLLM has, the null block included.
        block_bytes: bytes of one record: its blocks over all layers, without padding.
        rows: uint8 [num_blocks, bytes] each, the KV cache itself. A record is block after block,
            and each block is its bytes in all rows, in order. Never inference tensors. Empty
            while the memory is freed, and on a pipeline stage that has no layer of the group: its
            records are empty.
        count: blocks in a record.
        layout: one string per layer that says where each value of a block lies in the rows.
    """

    def __init__(
        self,
        layers: Sequence[str],
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int | None = None,
        count: int = 1,
    ) -> None:
        """Map the layers' tensors.

        Args:
            layers: names of the group's layers.
            kv_caches: per layer a tensor whose first dimension is the block, or the
                kernel block where the attention backend splits blocks.
            num_blocks: how many blocks vLLM has; None takes the first dimension.
            count: blocks in a record.

        Raises:
            ConfigError: a layer has no single tensor, or :func:`.layout.runs_of` refuses it.
        """
        tensors = _own({name: _single_tensor(name, kv_caches.get(name)) for name in layers})
        if num_blocks is None:
            num_blocks = min(tensor.shape[0] for tensor in tensors.values())
        self.num_blocks, self.count = num_blocks, count
        self.layers = tuple(tensors)
        self._mapped = True
        self._map(tensors)

    def _map(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = [runs_of(name, tensor, self.num_blocks) for name, tensor in tensors.items()]
        self.layout = tuple(layout for _, layout in found)
        runs = merge([run for runs, _ in found for run in runs])
        self.rows = [run.rows(self.num_blocks) for run in runs]
        self._sizes = [run.size for run in runs] * self.count
        self.block_bytes = sum(self._sizes)
        self._chunks = _chunks(self._sizes)
        # Not Tensor.copy_ on CPU, which starts OpenMP threads beside those of the forward.
        host = all(row.device.type == "cpu" for row in self.rows)
        self._host = [row.numpy() for row in self.rows] if host else None
        self._address = np.array([row.data_ptr() for row in self.rows], np.int64)
        self._stride = np.array([row.stride(0) for row in self.rows], np.int64)
        self._memory = np.array([row.untyped_storage().data_ptr() for row in self.rows], np.int64)
        self._lengths = np.array(self._sizes, np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths

    def unmap(self) -> None:
        """Release the KV cache, whose memory is about to be freed; all copies fail from now on.

        Must not be called while one is in flight. Sizes and layout stay known. Idempotent.
        """
        self.rows = []
        self._host = None
        self._mapped = False

    def map(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map the layers' tensors again, wherever their memory is now. Idempotent.

        Raises:
            ConfigError: the layout of a block has changed.
        """
        before = self.layout, self.block_bytes
        self._map({name: _single_tensor(name, kv_caches.get(name)) for name in self.layers})
        self._mapped = True
        if (self.layout, self.block_bytes) != before:
            now = self.layout
            self.layout, self.block_bytes = before
            self.unmap()
            raise ConfigError(
                f"the KV cache has the layout {now} after a sleep instead of {self.layout}; "
                "restart the engine."
            )

    def gather(self, block: Block, out: torch.Tensor, digester: Digester = PLAIN) -> bytes:
        """Copy a record's blocks of every layer into ``out``. Mutates ``out``.

        Args:
            block: its block id, or all if it has several, never 0 (the null block).
            out: uint8 of ``block_bytes`` elements, in CPU memory.

        Returns:
            The digests of the chunks of ``out``, see :mod:`lmcache_hybrid.storage.record_format`.
        """
        blocks = self._check(block, out)
        assert self._host is not None, "a device's pages are gathered by StreamCopies"
        target, digests, rows = out.numpy(), [], len(self._host)
        for number, pieces in enumerate(self._chunks):
            for run, at, to, size in pieces:
                page = self._host[run % rows][blocks[run // rows]]
                np.copyto(target[to : to + size], page[at : at + size])
            digests.append(
                digester.chunk(target[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
            )
        return b"".join(digests)

    def scatter(
        self, block: Block, data: torch.Tensor, digests: bytes, digester: Digester = PLAIN
    ) -> None:
        """Copy ``data`` into a record's blocks of every layer, by chunks. Mutates the KV cache.

        Args:
            block: see :meth:`gather`.
            data: uint8 of ``block_bytes`` elements, in CPU memory.
            digests: of the chunks of ``data``, by ``digester``.

        Raises:
            RecordError: a chunk is damaged; neither it nor a later one was copied.
        """
        blocks = self._check(block, data)
        assert self._host is not None, "a device's pages are scattered by StreamCopies"
        source, rows = data.numpy(), len(self._host)
        for number, pieces in enumerate(self._chunks):
            self._check_chunk(number, source, digests, digester)
            for run, at, to, size in pieces:
                page = self._host[run % rows][blocks[run // rows]]
                np.copyto(page[at : at + size], source[to : to + size])

    def check_payload(self, data: torch.Tensor, digests: bytes, digester: Digester = PLAIN) -> None:
        """Raise RecordError unless ``data`` has these digests."""
        source = data.numpy()
        for number in range(len(self._chunks)):
            self._check_chunk(number, source, digests, digester)

    def _check_chunk(
        self, number: int, source: np.ndarray, digests: bytes, digester: Digester
    ) -> None:
        assert len(digests) == len(self._chunks) * DIGEST_BYTES
        expected = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        check(source[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], expected, digester)

    def pieces(self, block: Block, data: torch.Tensor) -> list[Pair]:
        """Pair the bytes of a record's blocks with their place in ``data``, for a device's copies.

        Args:
            block: see :meth:`gather`.
            data: uint8 of ``block_bytes`` elements, in CPU memory.

        Returns:
            (bytes of the KV cache, as many bytes of ``data``), both dense uint8 views.
        """
        blocks = self._check(block, data)
        pages = (row[each] for each in blocks for row in self.rows)
        return list(zip(pages, data.split(self._sizes), strict=True))

    def spans(self, block: Block, data: torch.Tensor) -> Spans:
        """Return :meth:`pieces` as addresses."""
        blocks = self._check(block, data)
        pages = self._address + np.array(blocks, np.int64)[:, None] * self._stride
        host = data.data_ptr() + self._offsets
        return Spans(pages.reshape(-1), host, self._lengths, np.tile(self._memory, self.count))

    def takes(self, block: Block) -> bool:
        """Whether these are valid block ids, as many as a record has."""
        ids = _ids(block)
        return len(ids) == self.count and all(0 < each < self.num_blocks for each in ids)

    def _check(self, block: Block, data: torch.Tensor) -> tuple[int, ...]:
        """Return the ids in ``block``; raises where they and ``data`` cannot be copied."""
        if not self._mapped:
            raise LoadError("vLLM has freed the KV cache to sleep", "asleep")
        # Not asserts: with python -O wrong bytes would be stored.
        if not self.takes(block):
            raise ValueError(f"block {block} of {self.num_blocks} cannot be copied")
        if data.dtype != torch.uint8 or data.numel() != self.block_bytes:
            raise ValueError(
                f"{data.numel()} elements of {data.dtype} are not a block "
                f"of {self.block_bytes} bytes"
            )
        return _ids(block)


def _ids(block: Block) -> tuple[int, ...]:
    return block if isinstance(block, tuple) else (block,)


def _chunks(rows: Sequence[int]) -> list[list[tuple[int, int, int, int]]]:
    """List the pieces of rows in each chunk: (row, offset in it, offset in the payload, size)."""
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


def _single_tensor(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"layer {name} has no single KV cache tensor ({type(tensor).__name__}), so "
            "its pages cannot be stored; start this model without LMCacheConnectorV1."
        )
    if tensor.dim() < 2 or not tensor.numel():
        raise ConfigError(
            f"KV cache of layer {name} with shape {tuple(tensor.shape)} has no blocks, so its "
            "pages cannot be stored; choose another --attention-backend or start this model "
            "without LMCacheConnectorV1."
        )
    return tensor


def _own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out layers that share another one's KV cache: its pages are stored once."""
    own: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        own.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
    return {name: tensors[name] for name in own.values()}


def in_parts(
    targets: Sequence[tuple[RecordKey, Block]], pages: Mapping[int, GroupPages], most: int
) -> Iterator[list[tuple[RecordKey, Block]]]:
    """Split (record, block id) pairs into parts of at most ``most`` bytes, one pair at least.

    Args:
        pages: of every group, by group index.
    """
    part: list[tuple[RecordKey, Block]] = []
    held = 0
    for key, block in targets:
        size = pages[key.group].block_bytes
        if part and held + size > most:
            yield part
            part, held = [], 0
        part.append((key, block))
        held += size
    yield part
