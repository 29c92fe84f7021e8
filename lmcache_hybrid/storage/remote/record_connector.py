# SPDX-License-Identifier: Apache-2.0
"""The interface of this package's own connectors, beyond LMCache's."""

import abc
import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from vllm.logger import init_logger

from lmcache_hybrid.core.backoff import LessOften
from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.folder.record_io import Fate
from lmcache_hybrid.storage.key_names import printable

logger = init_logger("vllm.lmcache_hybrid.storage.remote.record_connector")

# LMCache's health check writes uninitialized memory: one byte reveals nothing of a prompt.
CHECKED_BYTES = 1

T = TypeVar("T")


class WritesInFlight:
    """Counts the writes of each key that are queued or in flight. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: Counter[CacheEngineKey] = Counter()

    def begin(self, key: CacheEngineKey) -> None:
        with self._lock:
            self._writes[key] += 1

    def end(self, key: CacheEngineKey) -> None:
        with self._lock:
            self._writes[key] -= 1
            if not self._writes[key]:
                del self._writes[key]

    def any_of(self, keys: Sequence[CacheEngineKey]) -> bool:
        with self._lock:
            return any(key in self._writes for key in keys)


class RecordConnector(RemoteConnector):
    """A connector to a store of records; :mod:`.make_connector` chooses the class by URL.

    Attributes:
        failed: called, from any thread, with the number of records that were not written.
        written: called, from any thread, with the key of each record that was.
        rewritten: called, from any thread, with the bytes of each record that the store already
            held; never where finding that out would cost a request of its own (S3).
        in_flight: the records that are being written.
    """

    failed: Callable[[int], None]
    written: Callable[[CacheEngineKey], None]
    rewritten: Callable[[int], None]

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        # LMCache's health monitor writes and reads a value of this shape and type before it
        # switches a store on again.
        self.meta_shapes, self.meta_dtypes = [record_shape(CHECKED_BYTES)], [torch.uint8]
        self.failed = lambda records: None
        self.written = lambda key: None
        self.rewritten = lambda size: None
        self.in_flight = WritesInFlight()
        self._seconds = float(context.config.blocking_timeout_secs)
        self._writes: set[Future[None]] = set()

    @property
    def writing(self) -> int:
        """The number of writes queued or in flight."""
        return len(self._writes)

    @property
    def uses_memory(self) -> bool:
        """Whether something may still read or write the pool's memory, even after a close."""
        return self.writing > 0

    def follow(self, job: Future[None], key: CacheEngineKey, memory: MemoryObj) -> None:
        """Count a queued write, and hold its memory, until it has ended.

        A cancelled caller drops its own reference while the write may go on.
        """

        def ended(job: Future[None]) -> None:
            self._writes.discard(job)
            self.in_flight.end(key)
            memory.ref_count_down()
            if job.cancelled() or job.exception() is not None:
                self.failed(1)
            else:
                self.written(key)

        memory.ref_count_up()
        self.in_flight.begin(key)
        self._writes.add(job)
        job.add_done_callback(ended)

    async def flush(self, seconds: float) -> None:
        """Wait until the writes that :meth:`follow` counts have ended."""
        if writes := list(map(awaited, set(self._writes))):
            await asyncio.wait(writes, timeout=seconds)

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.existing([key], self._seconds)[0]

    def cause(self, error: Exception) -> str:
        """Find the words for why a server cannot be used as configured. May ask it, and so block.

        Returns:
            The words and what to write, as a part of a sentence; "" where nothing is found.
        """
        return ""

    @abc.abstractmethod
    def existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> Sequence[bool]:
        """Whether the store holds each value, in as few round trips as it can. Blocks.

        Raises:
            Exception: no answer within ``seconds``, or a failure.
        """

    def fate(self, key: CacheEngineKey, largest: int, seconds: float) -> Fate:
        """Find out why a promised value could not be read. Blocks.

        Args:
            largest: bytes of the largest record.

        Raises:
            Exception: no answer within ``seconds``, or a failure.
        """
        return "unreadable" if self.existing([key], seconds)[0] else "gone"

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        """Note hits, without waiting. Most stores note reads by themselves."""

    @abc.abstractmethod
    def delete(self, key: CacheEngineKey, seconds: float) -> None:
        """Delete a value; a missing one is not an error. Blocks.

        Raises:
            Exception: the store did not delete it within ``seconds``.
        """

    def delete_all(self, keys: Sequence[CacheEngineKey], seconds: float) -> int:
        """Delete values, and return how many there were. Blocks.

        Raises:
            Exception: the store did not delete all within ``seconds``.
        """
        ends = time.monotonic() + seconds
        held = self.existing(keys, seconds)
        found = [key for key, is_held in zip(keys, held, strict=True) if is_held]
        for key in found:
            self.delete(key, max(0.0, ends - time.monotonic()))
        return len(found)


class BatchConnector(RecordConnector):
    """A connector that writes several records at once.

    Attributes:
        shown: the store, for the log, without a password.
    """

    shown: str

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._untold: defaultdict[str, LessOften] = defaultdict(LessOften)  # by kind of failure

    def support_batched_put(self) -> bool:
        return True

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Write a value, as LMCache's health check does; see :meth:`write`."""
        await self.write([key], [memory_obj])

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]
    ) -> None:
        """Write values. Never raises: LMCache would log a failure of each batch."""
        try:
            await self.write(keys, memory_objs)
        except Exception as error:
            kind = type(error).__name__
            if not self.has_told(error) and self._untold[kind].is_news():
                logger.warning(
                    "Records cannot be written to %s and count as failed (%s). Check the store and "
                    "the network to it.",
                    self.shown,
                    printable(f"{kind}: {error}"),
                )

    @abc.abstractmethod
    def has_told(self, error: Exception) -> bool:
        """Whether the class itself has logged this error of a write, now or before."""

    @abc.abstractmethod
    async def write(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Write values; each that fails is counted.

        Raises:
            Exception: of one that failed; the others were written.
        """


def awaited(job: Future[T]) -> asyncio.Future[T]:
    """Wrap the job of a thread for a coroutine.

    If the coroutine has gone when the job fails, asyncio logs no error with a traceback.
    """
    end = asyncio.wrap_future(job)
    end.add_done_callback(lambda end: end.cancelled() or end.exception())
    return end


def bytes_of(memory: MemoryObj) -> memoryview:
    """Return the memory of a record, in bytes."""
    return memoryview(memory.byte_array).cast("B")


def release_unread(job: Future[MemoryObj | None]) -> None:
    """Release the memory of a value that nobody waited for."""
    if not job.cancelled() and job.exception() is None and (memory := job.result()) is not None:
        memory.ref_count_down()


def unwrapped(connector: Any) -> Any:
    """Return the connector without LMCache's instruments around it."""
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    return connector
