# SPDX-License-Identifier: Apache-2.0
"""The index of record files, the account of their sizes, and the order in which they go."""

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from lmcache.observability import LMCStatsMonitor
from lmcache.utils import CacheEngineKey, DiskCacheMetadata
from lmcache.v1.storage_backend.cache_policy import get_cache_policy
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy

from lmcache_hybrid.core.lmcache_stats import only_logged
from lmcache_hybrid.storage import eviction_order
from lmcache_hybrid.storage.disk.other_files import OtherFiles


class LimitedIndex:
    """An index of files within a size limit that also counts all other files of this package.

    Any thread may call it; ``disk_lock`` guards its state. Methods that need it held say so.
    Files are deleted later, on a thread; whoever owns the index closes ``others.deleter``.

    Attributes:
        dict: the index, in the type that ``cache_policy`` needs. A pin belongs to an entry.
        put_tasks: keys of records that are queued or being written.
        current_cache_size: bytes of the records in either.
        max_cache_size: bytes that all files may take.
        others: the files that are not indexed; evicted first.
    """

    def __init__(self, cache_policy: str, max_cache_size: int) -> None:
        """
        Args:
            cache_policy: LMCache's name of it.
        """
        self.disk_lock = threading.Lock()
        self.cache_policy: Any = get_cache_policy(cache_policy)
        self.dict: Any = self.cache_policy.init_mutable_mapping()
        self.put_tasks: set[CacheEngineKey] = set()
        self.current_cache_size, self.max_cache_size = 0, max_cache_size
        self._monitor = LMCStatsMonitor.GetOrCreate()
        # By record in flight: its save's eviction order, and which of that save are in flight.
        self._arranged: dict[CacheEngineKey, tuple[Sequence[CacheEngineKey], set[Any]]] = {}
        self.others = OtherFiles(self.disk_lock)

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        with self.disk_lock:
            entry = self.dict.get(key)
            return entry is not None and (not pin or entry.pin())

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        with self.disk_lock:
            return key in self.put_tasks

    def pin(self, key: CacheEngineKey) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        with self.disk_lock:
            entry = self.dict.get(key)
            return entry is not None and entry.unpin()

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a record, its file and its share of the account.

        Args:
            force: of LMCache's interface; makes no difference.

        Returns:
            Whether it was indexed.
        """
        with self.disk_lock:  # two threads may find it damaged
            entry = self._drop(key)
            if entry is not None:
                self.others.delete(entry.path)
            return entry is not None

    def _insert(self, key: CacheEngineKey, entry: DiskCacheMetadata) -> None:
        """Index a record whose file is complete. Call with ``disk_lock`` held."""
        self.others.replaced(entry.path)
        if not isinstance(self.cache_policy, eviction_order.ARC):
            # LMCache's LFU fails for a record that it knows and that is not indexed.
            self.cache_policy.update_on_put(key)
        self.dict[key] = entry

    def _drop(self, key: CacheEngineKey) -> DiskCacheMetadata | None:
        """Take a record out of the index and the account. Call with ``disk_lock`` held."""
        entry = self.dict.pop(key, None)
        if entry is not None:
            self._count(-entry.size)
            self.cache_policy.update_on_force_evict(key)
        return entry

    def _count(self, size: int) -> None:
        """Add to ``current_cache_size``. Call with ``disk_lock`` held."""
        self.current_cache_size += size
        with only_logged():
            self._monitor.update_local_storage_usage(self.current_cache_size)

    # Room

    def _make_room(self, path: str, size: int) -> bool:
        """Evict for a new record; nothing where even all would be too little.

        Call with ``disk_lock`` held.

        Args:
            path: of its file; one that is there is replaced.

        Returns:
            Whether there is room; if not, there may be later.

        Raises:
            OSError: there will never be, or evicted files cannot be deleted.
        """
        self.others.delete_stranger(path)
        kept = self.others.bytes_kept(path)
        if size > self.max_cache_size - kept:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.current_cache_size + self.others.strange_bytes + kept
        return self._evict(taken + size - self.max_cache_size)

    def _evict(self, size: int, but: Set[str] = frozenset()) -> bool:
        """Evict ``size`` bytes, strangers first. Call with ``disk_lock`` held.

        Args:
            but: paths of files that stay.

        Returns:
            False, with nothing evicted, if even all would be less.

        Raises:
            OSError: too few of the files can be deleted. At most one findable record is lost.
        """
        staying = [entry for entry in self.dict.values() if entry.path in but] if but else []
        with _pinned(staying):
            entries = (entry.size for entry in self.dict.values() if entry.can_evict)
            strange = self.others.strange_bytes_but(but)
            if all(total < size for total in itertools.accumulate(entries, initial=strange)):
                return False
            size = self.others.evict_strangers(size, but)
            while size > 0:
                freed = self._evict_record()
                if not freed:
                    raise OSError(errno.EIO, "evicted files cannot be deleted")
                size -= freed
        return True

    def _evict_record(self) -> int:
        """Delete the record that the policy names and return the bytes freed."""
        for key in self.cache_policy.get_evict_candidates(self.dict, num_candidates=1):
            entry = self._drop(key)
            if entry is not None and self.others.delete(entry.path):
                return int(entry.size)
        return 0

    # Order

    def arrange(
        self,
        keys: Sequence[CacheEngineKey],
        passing: Sequence[CacheEngineKey] = (),
        owner: str = "",
    ) -> None:
        """Set the eviction order of records, as :func:`.eviction_order.arrange`. Thread-safe.

        LMCache's LRU orders only indexed records, so this waits for those in flight.
        """
        with self.disk_lock:
            if type(self.cache_policy) is not LRUCachePolicy:
                eviction_order.arrange(self.cache_policy, self.dict, keys, passing, owner)
                return
            pending = {key for key in keys if key not in self.dict and key in self.put_tasks}
            self._arranged.update(dict.fromkeys(pending, (keys, pending)))
            if not pending:
                self._move_to_end(keys)

    def _arrive(self, key: CacheEngineKey) -> None:
        """Note the end of a write; the last one of a save sets the save's eviction order."""
        with self.disk_lock:
            self.put_tasks.discard(key)
            keys, pending = self._arranged.pop(key, ((), set()))
            pending.discard(key)
            if not pending:
                self._move_to_end(keys)

    def _move_to_end(self, keys: Sequence[CacheEngineKey]) -> None:
        for key in keys:
            if key in self.dict:
                self.dict.move_to_end(key)

    def check_integrity(self) -> None:
        """Assert what holds while no write is in flight."""
        with self.disk_lock:
            held = sum(entry.size for entry in self.dict.values())
            assert self.current_cache_size == held, "the size account is not that of the index"
            assert not self._arranged, "records that are not written wait for their order"
            self.others.check_integrity({entry.path for entry in self.dict.values()})


@contextmanager
def _pinned(entries: Iterable[DiskCacheMetadata]) -> Iterator[None]:
    for entry in entries:
        entry.pin()
    try:
        yield
    finally:
        for entry in entries:
            entry.unpin()
