# SPDX-License-Identifier: Apache-2.0
"""Reads records from a remote store; after one timeout, loads promised before it fail at once."""

import contextvars
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from lmcache_hybrid.core.errors import LoadError
from lmcache_hybrid.core.late_loads import reading
from lmcache_hybrid.core.threads import started

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

# Max reads in flight from a store, of one load and of all.
READERS = 4
# A read that failed after this share of blocking_timeout_secs has timed out: the store's client
# has its own timeout, which may end a moment earlier.
MOST_OF_IT = 0.9


class RemoteReader:
    """Reads from one store for all loads of a rank, several at a time. Any thread may call it.

    A read that timed out shows that the store is silent. Every load promised before that then
    fails, so no load waits behind the timeouts of others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._silent = -math.inf  # time.monotonic of the last read that timed out

    def read(
        self, backend: "RemoteBackend", keys: Sequence[CacheEngineKey], promised: float
    ) -> list[MemoryObj | None]:
        """Read values, up to the first that fails.

        The next read starts as soon as any one ends. ``batched_get_blocking`` would leak the
        buffers beside a failed read.

        Args:
            promised: ``time.monotonic`` at which these were located in the store.

        Returns:
            Each key's value, which the caller owns, or None; fewer than keys after a None.

        Raises:
            SlowError: the load will end too late.
            LoadError: the store did not answer a read in time since ``promised``.
            Exception: of the backend; the buffers of the other reads are released.
        """

        def read(key: CacheEngineKey) -> MemoryObj | None:
            if self._silent >= promised or pace.late:
                return None
            asked = time.monotonic()
            memory: MemoryObj | None = backend.get_blocking(key)
            now = time.monotonic()
            if memory is None and now - asked >= MOST_OF_IT * patience:
                self._silent = now
            return memory

        errors: list[Exception] = []

        def tried(key: CacheEngineKey) -> MemoryObj | None:
            try:
                return here.copy().run(read, key)
            except Exception as error:  # raised once the other reads have ended
                errors.append(error)
                return None

        jobs: list[Future[MemoryObj | None]] = []
        running: set[Future[MemoryObj | None]] = set()
        pool, patience = self._pool(), backend.config.blocking_timeout_secs
        pace, here = reading().pace, contextvars.copy_context()
        for key in keys:
            if len(running) == READERS:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                if pace.late or any(job.result() is None for job in done):
                    break
            jobs.append(pool.submit(tried, key))
            running.add(jobs[-1])
        memories = [job.result() for job in jobs]
        late, silent = pace.late, None in memories and self._silent >= promised
        if errors or late or silent:
            for memory in memories:
                if memory is not None:
                    memory.ref_count_down()
            if errors:
                raise errors[0]
            pace.check()
            raise LoadError(
                f"the remote store did not answer within {patience} s (blocking_timeout_secs)",
                "unreachable",
            )
        return memories

    def close(self) -> None:
        """End the threads once their reads have ended; a later read starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = started(READERS, "hybrid-read")
            return self._threads
