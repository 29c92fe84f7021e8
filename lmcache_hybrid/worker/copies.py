# SPDX-License-Identifier: Apache-2.0
"""Copies between pages and record buffers: the interface, and a KV cache in CPU memory.

There a few threads copy record after record, in :mod:`.pages`. For devices see :mod:`.streams`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from lmcache_hybrid.core.errors import DamagedError, RecordError
from lmcache_hybrid.core.groups import Block
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage.store import Buffer, Store
from lmcache_hybrid.worker.copy_threads import CopyThreads
from lmcache_hybrid.worker.pages import GroupPages, Pair, Spans


class CopyJob(NamedTuple):
    """One record to copy: its blocks in a group, and its buffer."""

    key: RecordKey
    pages: GroupPages
    block: Block
    buffer: Buffer

    def gather(self) -> None:
        buffer = self.buffer
        buffer.digests = self.pages.gather(self.block, buffer.payload, buffer.digester)

    def scatter(self) -> None:
        with self._damage_named():
            buffer = self.buffer
            self.pages.scatter(self.block, buffer.payload, buffer.digests, buffer.digester)

    def check(self) -> None:
        """Raise DamagedError if the buffer does not hold what was stored."""
        with self._damage_named():
            buffer = self.buffer
            self.pages.check_payload(buffer.payload, buffer.digests, buffer.digester)

    @property
    def payload(self) -> torch.Tensor:
        return self.buffer.payload

    def pieces(self) -> list[Pair]:
        """(bytes of the KV cache, bytes of the buffer), see :meth:`GroupPages.pieces`."""
        return self.pages.pieces(self.block, self.buffer.payload)

    def spans(self) -> Spans:
        """See :meth:`GroupPages.spans`."""
        return self.pages.spans(self.block, self.buffer.payload)

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except RecordError as error:
            raise DamagedError(self.key, error) from error


class StreamEvent(NamedTuple):
    """A point on the compute stream; None where the device has no streams."""

    event: Any  # of the device's module


class Copies(Protocol):
    def mark(self) -> StreamEvent:
        """Record an event on the compute stream."""

    def gather(self, items: Sequence[CopyJob]) -> Callable[[], None] | None:
        """Copy pages and their digests to buffers, behind the work on the compute stream.

        Mutates the buffers. Work queued on the compute stream from now on may overwrite the pages.
        Returns None when all is done, else a function that waits for the rest. Call it, on any
        thread, before the buffers are read or released.
        """

    def scatter(self, items: Sequence[CopyJob], after: StreamEvent) -> None:
        """Copy buffers to pages, once the device has passed ``after``. Mutates the KV cache.

        Called on several threads. The pages may be read and the buffers overwritten
        once it returns. Raises DamagedError before damaged bytes reach a page.
        """


Records = list[tuple[RecordKey, Buffer]]
# Completes a device copy that is still in flight, see Copies.gather.
Rest = Callable[[], None] | None


def gather_records(
    copies: Copies,
    store: Store,
    groups: Mapping[int, GroupPages],
    pages: Sequence[tuple[RecordKey, Block]],
) -> tuple[Records, Rest]:
    """Copy pages, (record, block id), into new buffers, all or none; the caller owns them."""
    records: Records = []
    items = []
    with ExitStack() as on_error:
        for key, block in pages:
            group = groups[key.group]
            buffer = store.reserve(group.block_bytes)
            if buffer is None:
                raise MemoryError("LMCache's CPU pool is full (max_local_cpu_size)")
            on_error.callback(buffer.release)
            records.append((key, buffer))
            items.append(CopyJob(key, group, block, buffer))
        rest = copies.gather(items)
        on_error.pop_all()
    return records, rest


class HostCopies:
    """Copies for a KV cache in CPU memory."""

    def __init__(self, threads: CopyThreads) -> None:
        self._threads = threads

    def mark(self) -> StreamEvent:
        return StreamEvent(None)

    def gather(self, items: Sequence[CopyJob]) -> None:
        self._threads.each(
            CopyJob.gather,
            items,
            sum(item.pages.block_bytes for item in items),
        )

    def scatter(self, items: Sequence[CopyJob], after: StreamEvent) -> None:
        for item in items:
            item.scatter()
