# SPDX-License-Identifier: Apache-2.0
"""RAM: LMCache's CPU pool."""

import functools
from collections.abc import Sequence
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_hybrid.protocol.record_reports import RAM
from lmcache_hybrid.storage import eviction_order
from lmcache_hybrid.storage.keep_shares import evicted_last
from lmcache_hybrid.storage.tiers.base import Observer, Opening, Unpin
from lmcache_hybrid.storage.tiers.indexed import IndexedTier


class RamTier(IndexedTier):
    """Records in the pool, which loads use in place."""

    in_place = True
    backend: LocalCPUBackend

    def __init__(self, name: str, backend: LocalCPUBackend, opening: Opening) -> None:
        super().__init__(name, backend, opening)
        if backend.use_hot:
            capacity = int(opening.config.max_local_cpu_size * 1024**3)
            self.kept = evicted_last(backend.cache_policy, capacity)

    @property
    def _lock(self) -> Any:
        return self.backend.cpu_lock

    @property
    def _index(self) -> Any:
        return self.backend.hot_cache

    def observe(self, observer: Observer) -> None:
        backend = self.backend
        with self._lock:
            backend.hot_cache = observer.follow(RAM, backend.hot_cache)

    def pin(self, keys: Sequence[CacheEngineKey]) -> Unpin | None:
        """Hold references, because anybody can remove LMCache's own pins.

        LMCache never evicts a referenced record. One removed by force keeps its memory until the
        last reference is dropped.
        """
        with self._lock:
            index = self._index
            memories = [index.get(key) for key in keys]
            if None in memories:
                return None
            for memory in memories:
                memory.ref_count_up()
        return functools.partial(unpin_memory, memories)

    def arrange(
        self, keys: Sequence[CacheEngineKey], passing: Sequence[CacheEngineKey], owner: str
    ) -> None:
        with self._lock:
            eviction_order.arrange(self.backend.cache_policy, self._index, keys, passing, owner)


def unpin_memory(memories: Sequence[MemoryObj]) -> None:
    """Drop the references of a pin."""
    for memory in memories:
        memory.ref_count_down()
