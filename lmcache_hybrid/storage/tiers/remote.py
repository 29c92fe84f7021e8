# SPDX-License-Identifier: Apache-2.0
"""A tier outside this process: ``fs://``, Redis, S3.

Each has a connector of this package's own, see :mod:`lmcache_hybrid.storage.remote.make_connector`.
"""

import asyncio
import contextlib
import functools
from collections.abc import Sequence

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from lmcache_hybrid.storage.folder.record_io import Fate
from lmcache_hybrid.storage.remote.record_connector import RecordConnector, unwrapped
from lmcache_hybrid.storage.remote.silent_reads import RemoteReader
from lmcache_hybrid.storage.tiers.base import Observer, Opening, StorageTier

# Max seconds to remove a damaged record; the server has just answered.
REMOVAL_SECONDS = 1.0
# Max seconds to end a connector, more than it waits for its queued writes.
CLOSE_SECONDS = 12.0


class RemoteTier(StorageTier):
    """A store that other engines may write to and that may be away."""

    shared = True
    backend: RemoteBackend

    def __init__(self, name: str, backend: RemoteBackend, opening: Opening) -> None:
        super().__init__(name, backend, opening)
        self._reader = RemoteReader()
        self._follow_writes(opening)
        self._remove_what_checks_leave()

    def observe(self, observer: Observer) -> None:
        observer.ask(self)

    def held(self, keys: Sequence[CacheEngineKey], seconds: float) -> Sequence[bool]:
        """See :meth:`.StorageTier.held`; waits at most ``blocking_timeout_secs``.

        ``RemoteBackend.contains`` would wait for ever.
        """
        if self.backend.connection is None:
            return [False] * len(keys)
        if self.backend._mla_worker_id_as0_mode:
            keys = [key.with_new_worker_id(0) for key in keys]
        return self._connector.existing(keys, min(seconds, self._patience))

    def read(self, keys: Sequence[CacheEngineKey], promised: float) -> list[MemoryObj | None]:
        return self._reader.read(self.backend, keys, promised)

    def fate(self, key: CacheEngineKey, largest: int) -> Fate:
        return self._connector.fate(key, largest, self._patience)

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        if self.backend.connection is not None:
            self._connector.used(keys)

    def remove(self, key: CacheEngineKey) -> None:
        self._connector.delete(key, REMOVAL_SECONDS)

    def is_writing(self, keys: Sequence[CacheEngineKey], seconds: float) -> bool:
        if self.backend.connection is None:
            return False
        # Behind it, each write submitted before has begun.
        asyncio.run_coroutine_threadsafe(_begun(), self.backend.loop).result(seconds)
        return self._connector.in_flight.any_of(self._names(keys))

    def remove_all(self, keys: Sequence[CacheEngineKey], seconds: float) -> int:
        if self.backend.connection is None:
            raise ConnectionError("it is not connected")
        return self._connector.delete_all(self._names(keys), min(seconds, self._patience))

    def _names(self, keys: Sequence[CacheEngineKey]) -> Sequence[CacheEngineKey]:
        """Name records as they are stored: of equal ones rank 0's alone."""
        if not self.backend._mla_worker_id_as0_mode:
            return keys
        return [key.with_new_worker_id(0) for key in keys]

    def close(self) -> None:
        """See :meth:`.StorageTier.close`. Waits for queued writes, and ends the connector.

        LMCache closes it again, but only after it has freed the memory that is still to be written.
        Where a call hangs that uses it, the memory stays: a second engine's could take its place.
        """
        self._reader.close()
        if self.backend.connection is None:
            return
        if self.backend.loop.is_running():
            ending = asyncio.run_coroutine_threadsafe(self._connector.close(), self.backend.loop)
            with contextlib.suppress(TimeoutError):  # the process ends all the same
                ending.result(CLOSE_SECONDS)
        if self._connector.uses_memory:
            self.backend.local_cpu_backend.memory_allocator._unregistered = True

    @property
    def _patience(self) -> float:
        """Max seconds per call."""
        seconds: float = self.backend.config.blocking_timeout_secs
        return seconds

    @property
    def _connector(self) -> RecordConnector:
        connector = unwrapped(self.backend.connection)
        if not isinstance(connector, RecordConnector):
            raise TypeError(f"{type(connector).__name__} is not a connector of this package")
        return connector

    def _follow_writes(self, opening: Opening) -> None:
        """Pass on the ends of writes, also after a reconnect. Mutates the backend."""
        backend, connect = self.backend, self.backend.init_connection

        def tell() -> None:
            if backend.connection is not None:
                connector = self._connector
                connector.failed = functools.partial(opening.failed, self.name)
                connector.rewritten = functools.partial(opening.rewritten, self.name)
                connector.written = functools.partial(opening.written, self.name)

        @functools.wraps(connect)
        def init_connection() -> None:
            connect()
            tell()

        backend.init_connection = init_connection
        tell()

    def _remove_what_checks_leave(self) -> None:
        """Delete the value of LMCache's health check once it was read. Mutates the backend.

        The check writes pool memory under a name of its own, and leaves it in the store.
        """
        backend, get = self.backend, self.backend.get_blocking

        @functools.wraps(get)
        def get_blocking(key: CacheEngineKey) -> MemoryObj | None:
            memory = get(key)
            if key.dtype is not torch.uint8:  # that of every record
                with contextlib.suppress(Exception):  # the next check replaces it
                    self.remove(key)
            return memory

        backend.get_blocking = get_blocking


async def _begun() -> None:
    """Do nothing."""
