# SPDX-License-Identifier: Apache-2.0
"""Copies between pages and record buffers; all that depends on the device.

On CPU a few threads copy record after record. Elsewhere the copies are queued on
streams and ordered against the forward by streams and events, and the host goes on.
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
from lmcache_hybrid.storage.record import digests_of
from lmcache_hybrid.storage.store import Buffer, Store
from lmcache_hybrid.worker.batched_copies import Transfer, copy_one_by_one, transfer_for
from lmcache_hybrid.worker.pages import GroupPages, Pair, Spans

logger = init_logger("vllm.lmcache_hybrid.worker.copies")

T = TypeVar("T")

# More threads than this do not copy faster than memory.
COPIERS = 4
# Less is done before another thread has started.
WORTH_A_THREAD = 1 << 20


class CopyJob(NamedTuple):
    """The blocks of a group that are in one record, and its memory."""

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
        """Raises DamagedError when the buffer does not hold what was stored."""
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
        """Now, on the compute stream."""

    def gather(self, items: Sequence[CopyJob]) -> Callable[[], None] | None:
        """Pages and digests to buffers, after what was queued on the compute stream.

        Mutates the buffers. What is queued on the compute stream from now on may overwrite
        the pages. Returns None when all is done, else what waits for the rest and must be
        called before the buffers are read or released; any thread may.
        """

    def scatter(self, items: Sequence[CopyJob], after: StreamEvent) -> None:
        """Buffers to pages, once the device has passed ``after``. Mutates the KV cache.

        Called on several threads. The pages may be read and the buffers overwritten
        once it returns. Raises DamagedError before damaged bytes reach a page.
        """


Records = list[tuple[RecordKey, Buffer]]
# Of copies that go on after the step, see Copies.gather.
Rest = Callable[[], None] | None


def gather_records(
    copies: Copies,
    store: Store,
    groups: Mapping[int, GroupPages],
    pages: Sequence[tuple[RecordKey, Block]],
) -> tuple[Records, Rest]:
    """Copy pages, (record, block id), into new buffers, all or none; the caller owns these."""
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
    """The copies of a KV cache on ``device``; saves use ``threads``."""
    if device.type == "cpu":
        return HostCopies(threads)
    return StreamCopies(device, transfer_for(device))


class CopyThreads:
    """Work on bytes, spread over cores; everything of it must release the GIL."""

    def __init__(self, name: str) -> None:
        """Start no thread yet: the first that has much to do starts all."""
        self._name = name
        self._cores = _cores()
        self._starting = threading.Lock()
        self._pool: Executor | None = None

    def each(self, function: Callable[[T], None], items: Sequence[T], size: int) -> None:
        """Call ``function`` on all items, ``size`` bytes together.

        Raises the first exception, once no call is under way any more.
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
        """The threads; None where the process may not have them now."""
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
    """The KV cache lies in CPU memory."""

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
    """The KV cache lies on a device with streams; buffers lie in pinned memory.

    Rules, each held by a test in ``tests/sim/test_streams.py``:

    - Saves are queued on the compute stream itself: the next forward may overwrite a state,
      and it comes after them. That costs the device the time of the transfer and the host
      nothing, nor any memory of the device, which vLLM has given away.
    - Loads run on streams of their own, behind a mark on the compute stream: forwards and
      saves that were queued before may still use a block that vLLM handed to the load.
    - A load returns once the device has copied, also after an error: vLLM then zeroes,
      reads or overwrites the blocks, and the buffers go back to the pool.
    - Buffers of a save are read and released once the device has copied, also after an error.
    - Each restoring thread has a stream of its own, so that no load waits for another's copies.

    What of vLLM this rests on (V1 and V2 model runner): the current stream of the thread that
    calls the connector is the one that zeroes blocks, moves states and runs the forward. Both
    runners switch to another stream only to copy sampled tokens and drafts to the host, and
    switch back before the connector is called. Microbatches on two streams (DBO) end on the
    compute stream, and V2 refuses them for hybrid models. ``bind_connector_metadata``, where
    loads start, comes on that thread after zeroing, copies on write and state moves were queued;
    a step without a forward has zeroed before, too. The step's forward uses no block of a load.
    ``wait_for_save`` and, with a drafter, the finalizing one come after the forward was queued.
    """

    def __init__(self, device: torch.device, transfer: Transfer = copy_one_by_one) -> None:
        self._device = device
        self._transfer = transfer
        # torch.cuda and its like: ``torch.Event`` takes ``blocking`` and ignores it, so waiting
        # for one keeps a core busy, and ``torch.Stream`` as a context keeps on itself
        # what was current before, whichever thread enters it.
        self._module = torch.get_device_module(device)
        self._restoring = threading.local()

    def mark(self) -> StreamEvent:
        # Of this device, not of the thread's current one.
        return self._record(self._module.current_stream(self._device))

    def gather(self, items: Sequence[CopyJob]) -> Callable[[], None]:
        try:
            self._transfer(items, to_host=True)
        except BaseException:
            # The buffers are about to be released and must not be written to later.
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
            # Also after an error: what was queued before it reads the buffers.
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
        """Block the calling thread, of which this may be the first call to the device."""
        # A new thread's current device is the first one, where it would make a context.
        self._module.set_device(self._device.index or 0)
        assert mark.event is not None
        mark.event.synchronize()
