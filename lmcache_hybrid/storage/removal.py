# SPDX-License-Identifier: Apache-2.0
"""Removes records that were found damaged, each from the backend that it was read from."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from vllm.logger import init_logger

from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.notes import StoreNotes
from lmcache_hybrid.storage.remote import connectors as remote

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.storage_manager import StorageManager

logger = init_logger("vllm.lmcache_hybrid.storage.removal")

# Damaged records of one backend to hide at most.
MAX_HIDDEN = 4096


class Removal:
    """Removes damaged records from one rank's backends. Any thread may call it.

    RAM and disk lose a record with its entry in their index. Any other backend may fail to delete
    it, or keep it for other engines, so there it is hidden from lookups until it is written anew:
    it would be promised and fail for every later request.
    """

    def __init__(self, manager: "StorageManager", notes: StoreNotes | None) -> None:
        self._manager, self._notes = manager, notes
        self._hidden: dict[str, set[CacheEngineKey]] = {}

    def hidden(self, backend: str) -> Collection[CacheEngineKey]:
        """Keys that are not to be looked up in a backend."""
        return self._hidden.get(backend, ())

    def unhide(self, keys: Sequence[CacheEngineKey]) -> None:
        """Look records up again, which are about to be written."""
        for hidden in list(self._hidden.values()):
            hidden.difference_update(keys)

    def clear(self) -> None:
        """Hide nothing: all records have new names."""
        self._hidden.clear()

    def remove(self, key: CacheEngineKey, location: str | None, damaged: bool) -> None:
        """Remove a record; never raises.

        Args:
            location: backend that it was read from. Copies in others stay: nobody has seen them,
                and one that is damaged, too, goes when it is read. None for all backends.
            damaged: False where it could not be read, so it may be whole.
        """
        for name, backend in self._manager.storage_backends.items():
            if location not in (None, name):
                continue
            try:
                if isinstance(backend, LocalDisk):
                    backend.forget(key)
                elif isinstance(backend, LocalCPUBackend):
                    backend.remove(key)
                else:
                    self._hide(name, key)
                    if isinstance(backend, RemoteBackend):
                        remote.remove(backend, key, damaged)
                    else:
                        backend.remove(key)
            except Exception as error:
                logger.debug("%s could not remove %s: %r", name, key, error)

    def _hide(self, name: str, key: CacheEngineKey) -> None:
        hidden = self._hidden.setdefault(name, set())
        if len(hidden) >= MAX_HIDDEN:
            hidden.clear()
        hidden.add(key)
        if self._notes is not None:
            self._notes.discarded(key)
