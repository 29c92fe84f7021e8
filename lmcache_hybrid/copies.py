# SPDX-License-Identifier: Apache-2.0
"""Copies between pages and record buffers; all that depends on the device.

On CPU a few threads copy record after record. Elsewhere the copies are queued on
streams and ordered against the forward by streams and events, and the host goes on.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch

from lmcache_hybrid.errors import DamagedError, RecordError
from lmcache_hybrid.pages import GroupPages
from lmcache_hybrid.record import RecordKey, digests_of
from lmcache_hybrid.store import Buffer
from lmcache_hybrid.transfers import Transfer, copy_one_by_one, transfer_for

T = TypeVar("T")

# More threads than this do not copy faster than memory.
COPIERS = 4
# Less is done before another thread has started.
WORTH_A_THREAD = 1 << 20


class Item(NamedTuple):
    """One block of a group and the memory of its record."""

    key: RecordKey
    pages: GroupPages
    block: int
    buffer: Buffer

    def gather(self) -> None:
        self.buffer.digests = self.pages.gather(self.block, self.buffer.payload)

    def scatter(self) -> None:
        with self._damage_named():
            self.pages.scatter(self.block, self.buffer.payload, self.buffer.digests)

    def check(self) -> None:
        """Raises DamagedError when the buffer does not hold what was stored."""
        with self._damage_named():
            self.pages.check_payload(self.buffer.payload, self.buffer.digests)

    def pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of the KV cache, bytes of the buffer), see :meth:`GroupPages.pieces`."""
        return self.pages.pieces(self.block, self.buffer.payload)

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except RecordError as error:
            raise DamagedError(self.key, error) from error


class Mark(NamedTuple):
    """A point on the compute stream; None where the device has no streams."""

    event: "torch.Event | None"


class Copies(Protocol):
    def mark(self) -> Mark:
        """Now, on the compute stream."""

    def gather(self, items: Sequence[Item]) -> Callable[[], None] | None:
        """Pages and digests to buffers, after what was queued on the compute stream.

        Mutates the buffers. What is queued on the compute stream from now on may overwrite
        the pages. Returns None when all is done, else what waits for the rest and must be
        called before the buffers are read or released; any thread may.
        """

    def scatter(self, items: Sequence[Item], after: Mark) -> None:
        """Buffers to pages, once the device has passed ``after``. Mutates the KV cache.

        Called on several threads. The pages may be read and the buffers overwritten
        once it returns. Raises DamagedError before damaged bytes reach a page.
        """


def copies_for(device: torch.device, threads: "Threads") -> Copies:
    """The copies of a KV cache on ``device``; saves use ``threads``."""
    if device.type == "cpu":
        return HostCopies(threads)
    return StreamCopies(device, transfer_for(device))


class Threads:
    """Work on bytes, spread over cores; everything of it must release the GIL."""

    def __init__(self, name: str) -> None:
        cores = _cores()
        self._pool = ThreadPoolExecutor(
            min(COPIERS, len(cores)), name, os.sched_setaffinity, (0, cores)
        )

    def each(self, function: Callable[[T], None], items: Sequence[T], size: int) -> None:
        """Call ``function`` on all items, ``size`` bytes together.

        Raises the first exception, once no call is under way any more.
        """
        if size < WORTH_A_THREAD or len(items) == 1:
            for item in items:
                function(item)
            return
        calls = [self._pool.submit(function, item) for item in items]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            for call in calls:
                call.cancel()
            wait(calls)
        for call in calls:
            if not call.cancelled():
                call.result()

    def close(self) -> None:
        self._pool.shutdown()


def _cores() -> set[int]:
    """Those of all threads: vLLM binds each to one, and a new thread to its parent's."""
    cores: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(task))
        except ProcessLookupError:
            continue
    return cores


class HostCopies:
    """The KV cache lies in CPU memory."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def mark(self) -> Mark:
        return Mark(None)

    def gather(self, items: Sequence[Item]) -> None:
        self._threads.each(
            Item.gather,
            items,
            sum(item.pages.block_bytes for item in items),
        )

    def scatter(self, items: Sequence[Item], after: Mark) -> None:
        for item in items:
            item.scatter()


class StreamCopies:
    """The KV cache lies on a device with streams; buffers lie in pinned memory.

    A block handed to a load may still be read by forwards that were queued before, so
    loads run on a stream of their own behind a mark on the compute stream. Saves are
    queued on the compute stream itself: the next forward may overwrite a state, and it
    comes after them. That costs the device the time of the transfer and the host nothing,
    nor any memory of the device, which vLLM has given away. A page is a few megabytes on
    models of the usual sizes, so one transfer per page is as fast as a large one.
    """

    def __init__(self, device: torch.device, transfer: Transfer = copy_one_by_one) -> None:
        self._device = device
        self._transfer = transfer
        self._stream = torch.Stream(device=device)

    def mark(self) -> Mark:
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream())
        return Mark(event)

    def gather(self, items: Sequence[Item]) -> Callable[[], None]:
        try:
            self._transfer([(part, page) for item in items for page, part in item.pieces()])
        except BaseException:
            # The buffers are about to be released and must not be written to later.
            torch.accelerator.synchronize(self._device)
            raise
        copied = self.mark()

        def finish() -> None:
            torch.accelerator.set_device_index(self._device.index or 0)
            assert copied.event is not None
            copied.event.synchronize()
            for item in items:
                item.buffer.digests = digests_of(memoryview(item.buffer.payload.numpy()))

        return finish

    def scatter(self, items: Sequence[Item], after: Mark) -> None:
        for item in items:
            item.check()
        # Each thread has a current device of its own.
        torch.accelerator.set_device_index(self._device.index or 0)
        self._stream.wait_event(after.event)
        with self._stream:
            try:
                self._transfer([pair for item in items for pair in item.pieces()])
            finally:
                # Also after an error: what was queued before it reads the buffers.
                self._stream.synchronize()
