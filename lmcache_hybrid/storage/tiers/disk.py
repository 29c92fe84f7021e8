# SPDX-License-Identifier: Apache-2.0
"""``local_disk``: files that survive restarts."""

import functools
from collections.abc import Sequence
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from vllm.logger import init_logger

from lmcache_hybrid.config.stores.base import folders_in
from lmcache_hybrid.protocol.record_reports import DISK
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.folder.folder_use import FolderUse
from lmcache_hybrid.storage.keep_shares import evicted_last
from lmcache_hybrid.storage.tiers.base import Observer, Opening, Unpin
from lmcache_hybrid.storage.tiers.indexed import IndexedTier

logger = init_logger("vllm.lmcache_hybrid.storage.tiers.disk")


class DiskTier(IndexedTier):
    """Files in the folder, or folders, that ``local_disk`` names."""

    backend: LocalDisk

    def __init__(self, name: str, backend: LocalDisk, opening: Opening) -> None:
        super().__init__(name, backend, opening)
        backend.failed = functools.partial(opening.failed, name)
        backend.written = functools.partial(opening.written, name)
        self._use = FolderUse(self.backend.path)
        self.kept = evicted_last(backend.cache_policy, backend.max_cache_size)

    @property
    def _lock(self) -> Any:
        return self.backend.disk_lock

    @property
    def _index(self) -> Any:
        return self.backend.dict

    def restore(self, opening: Opening) -> None:
        if opening.metadata.worker_id == 0 and not opening.visit:
            self._warn_of_others()
        self.backend.visited = opening.visit  # then an engine's records make no room
        folders = folders_in("LMCache option local_disk", opening.config.local_disk)
        writers = opening.names.writers()
        self.backend.restore(opening.model_name, writers, folders, opening.restored)

    def _warn_of_others(self) -> None:
        """Warn where another engine uses the folder; the lock is this one's until it ends."""
        try:
            alone = self._use.hold()
        except OSError as error:  # no locks there
            logger.debug("Who uses %s is unknown: %s", self.backend.path, error)
            return
        if not alone:
            logger.warning(
                "local_disk %s is in use by another engine. Neither sees what the other stores, "
                "and each deletes the other's records to stay within max_local_disk_size: give "
                "each engine a folder of its own, or let them share one with "
                "remote_url: fs://localhost:0%s.",
                self.backend.path,
                self.backend.path,
            )

    def observe(self, observer: Observer) -> None:
        backend = self.backend
        with self._lock:
            backend.dict = observer.follow(DISK, backend.dict, lambda: bool(backend.put_tasks))

    def pin(self, keys: Sequence[CacheEngineKey]) -> Unpin | None:
        """Pin the index entries; a rewritten record gets a new entry."""
        with self._lock:
            index = self._index
            entries = [index.get(key) for key in keys]
            if None in entries:
                return None
            for entry in entries:
                entry.pin()

        def unpin() -> None:
            with self._lock:
                for entry in entries:
                    entry.unpin()

        return unpin

    def read(self, keys: Sequence[CacheEngineKey], promised: float) -> list[MemoryObj | None]:
        memories = super().read(keys, promised)
        self.used([key for key, memory in zip(keys, memories, strict=True) if memory is not None])
        return memories

    def arrange(
        self, keys: Sequence[CacheEngineKey], passing: Sequence[CacheEngineKey], owner: str
    ) -> None:
        self.backend.arrange(keys, passing, owner)

    def is_writing(self, keys: Sequence[CacheEngineKey], seconds: float) -> bool:
        with self._lock:
            return not self.backend.put_tasks.isdisjoint(keys)

    def close(self) -> None:
        """Finish all writes, and end the threads.

        LMCache closes the backend after it has freed the memory that is still to be written.
        """
        try:
            self.backend.close()
        finally:
            self._use.release()

    def check_integrity(self) -> None:
        self.backend.check_integrity()
