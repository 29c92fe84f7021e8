# SPDX-License-Identifier: Apache-2.0
"""``local_disk``: LMCache's backend made to survive restarts, lost files and write errors."""

import functools
from collections.abc import Sequence
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from lmcache_hybrid.config.stores.base import folders_in
from lmcache_hybrid.protocol.record_reports import DISK
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.tiers.base import Observer, Opening, Unpin
from lmcache_hybrid.storage.tiers.indexed import IndexedTier


class DiskTier(IndexedTier):
    """Files in the folder, or folders, that ``local_disk`` names."""

    backend: LocalDisk

    def __init__(self, name: str, backend: LocalDiskBackend, opening: Opening) -> None:
        super().__init__(name, backend, opening)
        self.backend = LocalDisk.adopt(
            backend,
            functools.partial(opening.failed, name),
            functools.partial(opening.written, name),
        )

    @property
    def _lock(self) -> Any:
        return self.backend.disk_lock

    @property
    def _index(self) -> Any:
        return self.backend.dict

    def restore(self, opening: Opening) -> None:
        folders = folders_in("LMCache option local_disk", opening.config.local_disk)
        writers = opening.names.writers()
        self.backend.restore(
            opening.model_name, writers, opening.metadata, folders, opening.restored
        )

    def observe(self, observer: Observer) -> None:
        self.backend.watch(lambda index: observer.follow(DISK, index, self.backend.is_writing))

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

    def arrange(
        self, keys: Sequence[CacheEngineKey], passing: Sequence[CacheEngineKey], owner: str
    ) -> None:
        self.backend.arrange(keys, passing, owner)

    def remove(self, key: CacheEngineKey) -> None:
        self.backend.forget(key)

    def check_integrity(self) -> None:
        self.backend.check_integrity()
