# SPDX-License-Identifier: Apache-2.0
"""Orders the copies between pages and record buffers, by kind of device.

The bytes are copied in :mod:`.pages` on a CPU and in :mod:`.device_copies` on other devices.

On CPU a few threads copy record after record. Elsewhere the host queues the copies and goes on;
streams and events order them against the forward.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from vllm.logger import init_logger

from lmcache_hybrid.core.errors import DamagedError, RecordError
from lmcache_hybrid.core.groups import Block
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.core.threads import anywhere, started
from lmcache_hybrid.core.threads import cores as _cores
from lmcache_hybrid.storage.record_format import digests_of
from lmcache_hybrid.storage.store import Buffer, Store
from lmcache_hybrid.worker.device_copies import Transfer, copy_one_by_one, transfer_for
from lmcache_hybrid.worker.pages import GroupPages, Pair, Spans

logger = init_logger("vllm.lmcache_hybrid.worker.copies")

T = TypeVar("T")

# Four threads saturate memory bandwidth.
COPIERS = 4
# Below this many bytes a second thread does not pay off.
WORTH_A_THREAD = 1 << 20


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


def copies_for(device: torch.device, threads: "CopyThreads") -> Copies:
    """Make the copies for a KV cache on ``device``; saves use ``threads``."""
    if device.type == "cpu":
        return HostCopies(threads)
    return StreamCopies(device, transfer_for(device))


class CopyThreads:
    """Thread pool for copies. Jobs must release the GIL."""

    def __init__(self, name: str) -> None:
        """Start no thread yet: the first large call starts all."""
        self._name = name
        self._cores = _cores()
        self._starting = threading.Lock()
        self._pool: Executor | None = None

    def each(self, function: Callable[[T], None], items: Sequence[T], size: int) -> None:
        """Call ``function`` on all items, ``size`` bytes together.

        Raises the first exception, once all calls have ended.
        """
        little = size < WORTH_A_THREAD or len(items) == 1
        pool = None if little else self._started()
        if pool is None:
            for item in items:
                function(item)
            return
        calls = [pool.submit(function, item) for item in items]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            for call in calls:
                call.cancel()
            wait(calls)
        for call in calls:
            if not call.cancelled():
                call.result()

    def _started(self) -> Executor | None:
        """Return the threads; None if they cannot be started now."""
        with self._starting:
            if self._pool is None:
                count = min(COPIERS, len(self._cores))
                try:
                    self._pool = started(count, self._name, anywhere(self._cores))
                except RuntimeError as error:
                    logger.warning_once(
                        "%d threads to copy the KV cache with could not be started (%s): copies "
                        "are slower. Raise the limit of processes (ulimit -u, pids.max).",
                        count,
                        error,
                    )
            return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


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


class StreamCopies:
    """Copies for a KV cache on a device with streams; buffers lie in pinned memory.

    Rules, each held by a test in ``tests/sim/test_streams.py``:

    - Saves are queued on the compute stream itself: the next forward, which may overwrite a
      state, runs behind them. The device spends the time of the transfer; the host spends none,
      and no device memory is needed, which vLLM has given away.
    - Loads run on streams of their own, behind a mark on the compute stream: forwards and
      saves that were queued before may still use a block that vLLM handed to the load.
    - A load returns once the device has copied, even after an error: vLLM then zeroes,
      reads or overwrites the blocks, and the buffers go back to the pool.
    - Buffers of a save are read and released once the device has copied, even after an error.
    - Each restoring thread has a stream of its own, so that no load waits for another's copies.

    This relies on vLLM (V1 and V2 model runner): the current stream of the thread that calls the
    connector is the one that zeroes blocks, moves states and runs the forward. Both runners
    switch to another stream only to copy sampled tokens and drafts to the host, and switch back
    before they call the connector. Microbatches on two streams (DBO) end on the compute stream,
    and V2 refuses them for hybrid models. ``bind_connector_metadata``, where loads start, runs on
    that thread after zeroing, copies on write and state moves were queued; a step without a
    forward also zeroes before it. The step's forward uses no block of a load. ``wait_for_save``
    and, with a drafter, the finalizing one run after the forward was queued.
    """

    def __init__(self, device: torch.device, transfer: Transfer = copy_one_by_one) -> None:
        self._device = device
        self._transfer = transfer
        # torch.cuda or the like: ``torch.Event`` ignores ``blocking``, so waiting for one keeps a
        # core busy, and ``torch.Stream`` as a context stores the stream that was current before
        # on itself, for all threads.
        self._module = torch.get_device_module(device)
        self._restoring = threading.local()

    def mark(self) -> StreamEvent:
        # This device's stream, not that of the thread's current device.
        return self._record(self._module.current_stream(self._device))

    def gather(self, items: Sequence[CopyJob]) -> Callable[[], None]:
        try:
            self._transfer(items, to_host=True)
        except BaseException:
            # The buffers are released next and must not be written later.
            self._wait(self.mark())
            raise
        copied = self.mark()

        def finish() -> None:
            self._wait(copied)
            for item in items:
                payload = memoryview(item.buffer.payload.numpy())
                item.buffer.digests = digests_of(payload, item.buffer.digester)

        return finish

    def scatter(self, items: Sequence[CopyJob], after: StreamEvent) -> None:
        for item in items:
            item.check()
        self._module.set_device(self._device.index or 0)
        stream = self._stream()
        stream.wait_event(after.event)
        try:
            with self._module.stream(stream):
                self._transfer(items, to_host=False)
        finally:
            # Even after an error: copies queued before it read the buffers.
            self._wait(self._record(stream))

    def _stream(self) -> Any:
        """The calling thread's own stream."""
        if not hasattr(self._restoring, "stream"):
            self._restoring.stream = self._module.Stream(device=self._device)
        return self._restoring.stream

    def _record(self, stream: Any) -> StreamEvent:
        """Record a new event on ``stream``; a thread that waits for it sleeps."""
        blocking = {"blocking": True} if self._device.type == "cuda" else {}
        event = self._module.Event(**blocking)
        event.record(stream)
        return StreamEvent(event)

    def _wait(self, mark: StreamEvent) -> None:
        """Block the calling thread until the device has passed ``mark``."""
        # A new thread's current device is the first one, where it would create a context.
        self._module.set_device(self._device.index or 0)
        assert mark.event is not None
        mark.event.synchronize()
