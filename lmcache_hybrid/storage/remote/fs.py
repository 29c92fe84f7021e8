# SPDX-License-Identifier: Apache-2.0
"""A connector to folders that engines share, ``fs://``.

Files have the names and the header of LMCache's ``FSConnector``. A record goes between its file
and LMCache's pool without a copy, on a fixed number of threads: a file server that hangs blocks
these, and the memory they read or write, but nothing else.
"""

import asyncio
import itertools
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorContext
from vllm.logger import init_logger

from lmcache_hybrid.config.stores.base import Place
from lmcache_hybrid.core.backoff import LessOften
from lmcache_hybrid.core.errors import SlowError
from lmcache_hybrid.core.late_loads import Reading, reading
from lmcache_hybrid.core.threads import DaemonPool, anywhere, cores
from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.folder import record_io
from lmcache_hybrid.storage.folder.file_uses import FileUses
from lmcache_hybrid.storage.folder.record_files import DATA, TEMPORARY, temporary_prefix
from lmcache_hybrid.storage.remote.record_connector import (
    BatchConnector,
    awaited,
    bytes_of,
    release_unread,
)

logger = init_logger("vllm.lmcache_hybrid.storage.remote.fs")

READERS = 4
WRITERS = 4
# Threads for short calls: lookups, and removals of damaged records.
ASKERS = 8
# Min files of a large lookup per thread.
LEAST_ASKED = 32
# Writers are stuck when all are busy and none makes progress for this long.
WRITE_SECONDS = 20.0
# Seconds between two checks for that.
LOOK_SECONDS = 0.5
# Max seconds to wait for queued writes at shutdown, and then for calls to end at their next part.
FLUSH_SECONDS, END_SECONDS = 8.0, 1.0
# Temporary names to try if somebody else has taken them.
TRIES = 3

_UNWRITTEN = "the file server does not take what is written"
T = TypeVar("T")


class BusyThreads:
    """Tells whether all threads of a pool are stuck in calls. Thread-safe.

    Attributes:
        busy: calls that run.
        ended: see :meth:`end`.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self.busy, self.ended = 0, False
        self._moved = time.monotonic()

    def __enter__(self) -> "BusyThreads":
        with self._lock:
            self._check_open()
            self.busy += 1
        self._moved = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.busy -= 1
        self._moved = time.monotonic()

    def move(self) -> None:
        """Note progress of a call. Raises ConnectionError if it must not go on."""
        self._check_open()
        self._moved = time.monotonic()

    def end(self) -> None:
        """Have later calls fail, and those in progress at their next part."""
        with self._lock:
            self.ended = True

    def _check_open(self) -> None:
        if self.ended:
            raise ConnectionError("this engine is shutting down")

    def stuck(self, seconds: float) -> bool:
        """Whether all are busy, and none made progress for ``seconds``."""
        return self.busy >= self._threads and time.monotonic() - self._moved >= seconds


class HybridFSConnector(BatchConnector):
    """Reads, writes and looks up records.

    Made on any thread; its coroutines run on LMCache's loop.
    """

    def __init__(self, folders: Sequence[str], context: ConnectorContext) -> None:
        """Create missing folders, as LMCache does.

        Args:
            folders: a record's hash chooses among them.

        Raises:
            OSError: a folder cannot be made.
        """
        super().__init__(context)
        self._pool, self._closed = context.local_cpu_backend, False
        self._folders, self.shown = tuple(folders), ",".join(folders)
        for folder in self._folders:
            os.makedirs(folder, exist_ok=True)
        self._prefix, self._numbers = temporary_prefix(), itertools.count()
        unbound = anywhere(cores())
        with ExitStack() as stack:  # LMCache retries: if one pool fails, the others must end
            self._readers = DaemonPool(READERS, "hybrid-fs-read", unbound)
            stack.callback(self._readers.close)
            self._writers = DaemonPool(WRITERS, "hybrid-fs-write", unbound)
            stack.callback(self._writers.close)
            self._askers = DaemonPool(ASKERS, "hybrid-fs-ask", unbound)
            stack.callback(self._askers.close)
            self._uses = FileUses(self.path)
            stack.pop_all()
        self._reading, self._put = BusyThreads(READERS), BusyThreads(WRITERS)
        self._asking = BusyThreads(ASKERS)
        self._said: defaultdict[tuple[str, int | None], LessOften] = defaultdict(LessOften)

    def path(self, key: CacheEngineKey) -> str:
        """Name a record's file."""
        return os.path.join(self._folder(key), _name(key))

    def _folder(self, key: CacheEngineKey) -> str:
        return self._folders[abs(key.chunk_hash) % len(self._folders)]

    # Reading

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        job = self._readers.submit(self._read, key, reading())
        try:
            return await awaited(job)
        except asyncio.CancelledError:
            job.add_done_callback(release_unread)
            raise

    def _read(self, key: CacheEngineKey, part: Reading) -> MemoryObj | None:
        taken: list[MemoryObj] = []
        begun = time.monotonic()

        def reserve(size: int) -> memoryview | None:
            part.report(time.monotonic() - begun)
            while taken:  # called again, after the file was replaced
                taken.pop().ref_count_down()
            memory = self._pool.allocate(record_shape(size), torch.uint8, MemoryFormat.KV_2LTD)
            if memory is None:
                return None
            taken.append(memory)
            return bytes_of(memory)[:size]

        def got(size: int) -> None:
            self._reading.move()
            part.got(size)

        found = False
        try:
            with self._reading:
                found = record_io.read(self.path(key), reserve, got)
        except SlowError:
            found = True  # not the store's fault; RemoteReader drops what came
        except OSError as error:
            self._say("read", error, "Such records stay and are computed.")
            raise
        finally:
            if not found and taken:
                taken.pop().ref_count_down()
        return taken[0] if found else None

    # Writing

    def has_told(self, error: Exception) -> bool:
        return self._put.ended or (isinstance(error, OSError) and error.errno is not None)

    async def write(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """See :meth:`BatchConnector.write`.

        If all threads are stuck in writes, those queued behind them are dropped: they would hold
        the pool's memory for as long as the file server is away. If those that run last for
        WRITE_SECONDS beside others that go on, they are left to themselves.
        """
        if self._put.stuck(WRITE_SECONDS):  # what is queued now would stay until a thread is free
            self.failed(len(keys))
            raise TimeoutError(_UNWRITTEN)
        jobs = [self._submit(*each) for each in zip(keys, memory_objs, strict=True)]
        left = ends = set(map(awaited, jobs))
        given_up = math.inf
        while left:
            if self._put.stuck(WRITE_SECONDS):
                for job in set(self._writes):
                    job.cancel()  # running ones go on
                raise TimeoutError(_UNWRITTEN)
            if not all(job.running() for job in jobs if not job.done()):
                given_up = math.inf
            elif given_up == math.inf:
                given_up = time.monotonic() + WRITE_SECONDS
            elif time.monotonic() >= given_up:
                return  # they hold their own memory, and LMCache that of the whole batch until then
            _, left = await asyncio.wait(left, timeout=LOOK_SECONDS)
        for end in ends:
            if end.cancelled():
                raise ConnectionError("given up before all was written")
            end.result()

    def _submit(self, key: CacheEngineKey, memory: MemoryObj) -> Future[None]:
        job = self._writers.submit(self._write, key, memory)
        self.follow(job, key, memory)
        return job

    def _write(self, key: CacheEngineKey, memory: MemoryObj) -> None:
        folder, name, record = self._folder(key), _name(key), bytes_of(memory)
        with self._put:
            for left in reversed(range(TRIES)):
                temporary = f"{self._prefix}{next(self._numbers)}{TEMPORARY}"
                try:
                    if record_io.write(folder, temporary, name, record, self._put.move):
                        self.rewritten(record.nbytes)
                    return
                except FileExistsError as error:
                    if not left:
                        self._say("written", error, "Somebody takes names of this engine's files.")
                        raise
                except OSError as error:
                    self._say("written", error, "Other backends keep what they have of it.")
                    raise

    # Short calls

    async def exists(self, key: CacheEngineKey) -> bool:
        return await awaited(self._question(record_io.holds, self.path(key)))

    def existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> list[bool]:
        """See :meth:`.RecordConnector.existing`. A file that cannot be looked up is a miss.

        Raises:
            TimeoutError: no answer in time, or all reads are stuck.
        """
        if self._reading.stuck(self._seconds):
            raise TimeoutError("the file server does not give what is read")
        deadline = time.monotonic() + seconds
        each = max(LEAST_ASKED, -(-len(keys) // ASKERS))
        jobs = [
            self._question(self._existing, keys[at : at + each]) for at in range(0, len(keys), each)
        ]
        try:
            return [
                held for job in jobs for held in job.result(max(0.0, deadline - time.monotonic()))
            ]
        finally:
            for job in jobs:
                job.cancel()

    def _existing(self, keys: Sequence[CacheEngineKey]) -> list[bool]:
        return [self._holds(key) for key in keys]

    def _holds(self, key: CacheEngineKey) -> bool:
        try:
            return record_io.holds(self.path(key))
        except OSError as error:
            self._say("looked for", error, "Such records are misses.")
            return False

    def fate(self, key: CacheEngineKey, largest: int, seconds: float) -> record_io.Fate:
        return self._ask(record_io.fate, seconds, self.path(key), largest)

    def delete(self, key: CacheEngineKey, seconds: float) -> None:
        self._ask(record_io.delete, seconds, self.path(key))

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a record; False if there is none, or it cannot be deleted."""
        try:
            self._ask(os.unlink, self._seconds, self.path(key))
        except (OSError, TimeoutError):
            return False
        return True

    def _ask(self, function: Callable[..., T], seconds: float, *args: object) -> T:
        job = self._question(function, *args)
        try:
            return job.result(seconds)
        finally:
            job.cancel()

    def _question(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Queue a call to the file server; raises TimeoutError while all threads are stuck."""

        def ask() -> T:
            with self._asking:
                return function(*args)

        if self._asking.stuck(self._seconds):
            raise TimeoutError("the file server does not answer")
        return self._askers.submit(ask)

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        self._uses.mark(keys)

    def _say(self, what: str, error: OSError, then: str) -> None:
        """Warn of each kind of error, see :class:`.LessOften`; not of the engine's end."""
        if not self._put.ended and self._said[what, error.errno].is_news():
            logger.warning(
                "Folder %s: a record cannot be %s (%s). %s",
                self.shown,
                what,
                error.strerror or error,
                then,
            )

    async def list(self) -> list[str]:
        raise NotImplementedError("lmcache-hybrid inspect lists what a folder holds")

    async def close(self) -> None:
        """Wait for queued writes, and end all threads that are not stuck. Idempotent."""
        if self._closed:
            return  # what hangs was waited for
        self._closed = True
        await self.flush(FLUSH_SECONDS)
        self._put.end()
        self._reading.end()
        for threads in (self._readers, self._writers, self._askers, self._uses):
            threads.close()
        ends = time.monotonic() + END_SECONDS
        while self.uses_memory and time.monotonic() < ends:
            await asyncio.sleep(LOOK_SECONDS / 10)

    @property
    def uses_memory(self) -> bool:
        return bool(self._put.busy or self._reading.busy)


def connect(place: Place, context: ConnectorContext) -> HybridFSConnector:
    """Make the connector to the folders of a place."""
    found = place.kind.folders(place, context.config)
    assert found is not None
    return HybridFSConnector(found[1], context)


def _name(key: CacheEngineKey) -> str:
    return key.to_string().replace("/", "-SEP-") + DATA
