# SPDX-License-Identifier: Apache-2.0
"""Records in Mooncake's store, through its own client.

LMCache's connector makes the client from its options and registers LMCache's pool with it. Nothing
else of it is used: it reads values into buffers of one chunk's size, several at a time only, and
asks for each key on its event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.connector.mooncakestore_connector import MooncakestoreConnector
from vllm.logger import init_logger

from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.remote.record_connector import RecordConnector

logger = init_logger("vllm.lmcache_hybrid.storage.remote.mooncake")

READERS = 4
WRITERS = 2
# Threads for what has short answers: lookups, and removals of damaged records.
ASKERS = 2
# At shutdown, wait so long for queued writes.
FLUSH_SECONDS = 8.0
# Mooncake's code for a key that it does not have.
NOT_FOUND = -704

T = TypeVar("T")


class MooncakeError(Exception):
    """Mooncake did not do what it was asked."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"Mooncake answered {code} to {what}")


class HybridMooncakeConnector(RecordConnector):
    """Reads, writes and looks up records. Made on any thread; its coroutines run on LMCache's loop.

    Mooncake's client blocks, and nothing ends a call: one that nobody waits for any more keeps its
    thread, and its memory, until the client gives up.

    Attributes:
        calls: of the client, that have not ended.
    """

    def __init__(self, theirs: MooncakestoreConnector, context: ConnectorContext) -> None:
        """Take over a connector's client.

        Args:
            theirs: LMCache's connector; closed with this one.

        Raises:
            ValueError: the client knows no pool, because it reached no master or has no memory.
        """
        super().__init__(context)
        if theirs.registered_buffer_ptr is None:
            raise ValueError("Mooncake's client could not be set up; its own log says why")
        self._theirs, self._store = theirs, theirs.store
        self._pool = context.local_cpu_backend
        self._seconds = float(context.config.blocking_timeout_secs)
        self._readers = ThreadPoolExecutor(READERS, "hybrid-mooncake-read")
        self._writers = ThreadPoolExecutor(WRITERS, "hybrid-mooncake-write")
        self._askers = ThreadPoolExecutor(ASKERS, "hybrid-mooncake-ask")
        self._writes: set[Future[None]] = set()
        self.calls: set[Future] = set()

    def _submit(self, threads: ThreadPoolExecutor, function: Callable[[], T]) -> Future[T]:
        job = threads.submit(function)
        self.calls.add(job)
        job.add_done_callback(self.calls.discard)
        return job

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        job = self._submit(self._readers, lambda: self._read(key.to_string()))
        try:
            return await _shielded(job)
        except asyncio.CancelledError:
            if not job.cancel():
                job.add_done_callback(_release)
            raise

    def _read(self, name: str) -> MemoryObj | None:
        size = self._store.get_size(name)
        if size == NOT_FOUND:
            return None
        if size < 0:
            raise MooncakeError("get_size", size)
        memory = self._pool.allocate(record_shape(size), torch.uint8, MemoryFormat.KV_2LTD)
        if memory is None:
            raise MemoryError(f"no memory for a value of {size} bytes")
        try:
            read = self._store.get_into(name, memory.data_ptr, size)
            if read not in (size, NOT_FOUND):
                raise MooncakeError("get_into", read)
        except BaseException:
            memory.ref_count_down()
            raise
        if read == size:
            return memory
        memory.ref_count_down()
        return None

    @property
    def writing(self) -> int:
        return len(self._writes)

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Write a value; the caller keeps its reference.

        Raises:
            Exception: it was not written.
        """
        memory_obj.ref_count_up()  # who stops waiting gives its own back while the write goes on

        def written(job: Future[None]) -> None:
            self._writes.discard(job)
            memory_obj.ref_count_down()
            if job.cancelled() or job.exception() is not None:
                self.failed(1)

        job = self._submit(self._writers, lambda: self._write(key.to_string(), memory_obj))
        self._writes.add(job)
        job.add_done_callback(written)
        await _shielded(job)

    def _write(self, name: str, memory: MemoryObj) -> None:
        code = self._store.put_from(
            name, memory.data_ptr, memory.get_size(), self._theirs.replica_config
        )
        if code != 0:
            raise MooncakeError("put_from", code)

    async def exists(self, key: CacheEngineKey) -> bool:
        return (await _shielded(self._submit(self._askers, lambda: self._existing([key]))))[0]

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.existing([key], self._seconds)[0]

    def existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> list[bool]:
        return self._ask(lambda: self._existing(keys), seconds)

    def _existing(self, keys: Sequence[CacheEngineKey]) -> list[bool]:
        answers = self._store.batch_is_exist([key.to_string() for key in keys])
        if wrong := next((answer for answer in answers if answer not in (0, 1)), 0):
            raise MooncakeError("batch_is_exist", wrong)
        return [answer == 1 for answer in answers]

    def delete(self, key: CacheEngineKey, seconds: float) -> None:
        self._ask(lambda: self._delete(key.to_string()), seconds)

    def _delete(self, name: str) -> None:
        # By force: one that was just read is leased for some seconds.
        code = self._store.remove(name, True)
        if code not in (0, NOT_FOUND):
            raise MooncakeError("remove", code)

    def _ask(self, function: Callable[[], T], seconds: float) -> T:
        job = self._submit(self._askers, function)
        try:
            return job.result(seconds)
        finally:
            job.cancel()

    async def list(self) -> list[str]:
        raise NotImplementedError

    async def close(self) -> None:
        """Wait for queued writes and calls under way, FLUSH_SECONDS at most; drop the rest."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._writes and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for threads in (self._readers, self._writers, self._askers):
            threads.shutdown(wait=False, cancel_futures=True)
        while self.calls and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self.calls:
            logger.warning(
                "Mooncake's client is still busy with %d calls, so it is not closed.",
                len(self.calls),
            )
        else:  # closed under a call it takes the process with it
            await self._theirs.close()


async def _shielded(job: Future[T]) -> T:
    """Wait; who is cancelled leaves the job alone."""
    ended = asyncio.wrap_future(job)
    # Else asyncio logs an error for each that fails after nobody waits.
    ended.add_done_callback(lambda one: one.cancelled() or one.exception())
    return await asyncio.shield(ended)


def _release(job: Future[MemoryObj | None]) -> None:
    """Give back the memory of a value that nobody waited for."""
    if not job.cancelled() and job.exception() is None and (memory := job.result()) is not None:
        memory.ref_count_down()
