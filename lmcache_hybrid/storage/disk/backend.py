# SPDX-License-Identifier: Apache-2.0
"""LMCache's ``local_disk`` made to survive restarts, lost files and write errors.

``LocalDiskBackend`` keeps its index in memory, so a restart forgets every file it wrote. Here the
index is rebuilt from the records' headers.
"""

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.cache_policy.lfu import LFUCachePolicy
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from vllm.logger import init_logger

from lmcache_hybrid.storage import eviction_order
from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.disk.deleter import Deleter
from lmcache_hybrid.storage.disk.files import NO_FILE, create_anew, open_regular
from lmcache_hybrid.storage.disk.full_disk import DiskFullHandler, LFUWithPendingWrites
from lmcache_hybrid.storage.disk.index import Found, find
from lmcache_hybrid.storage.record import Header

if TYPE_CHECKING:
    from lmcache.v1.metadata import LMCacheMetadata

logger = init_logger("vllm.lmcache_hybrid.storage.disk.backend")


class LocalDisk(LocalDiskBackend):
    """LMCache's backend, with a size limit that counts every file of this package.

    LMCache writes into one of the folders that ``local_disk`` names, by the rank's device. Files
    in the others, from when the list was different, are found, counted and evicted there.

    Strangers (files of other models, versions and fingerprints) are never read. They count
    towards the size limit and are evicted before any record that can still be found. Files that
    cannot be deleted also count. All else is LMCache's. Any thread may call it; ``disk_lock``
    guards its state.

    Methods that replace LMCache's for a bug have a test in tests/repairs/test_disk.py, which
    says when they can go. Seen in: LMCache 0.5.6 and 0.5.7rc2.
    """

    _failed: Callable[[int], None]
    _written: Callable[[CacheEngineKey], None]
    _limit: int
    _rank: int
    # Bytes of each stranger by path, the oldest first, and their sum.
    _strangers: dict[str, int]
    _strange_bytes: int
    # Files on other file systems than that of the folder written to.
    _elsewhere: set[str]
    # Bytes of each file that could not be deleted, by path.
    _kept: dict[str, int]
    # By record in flight: its save's eviction order, and which of that save are in flight.
    _arranged: dict[CacheEngineKey, tuple[Sequence[CacheEngineKey], set[CacheEngineKey]]]
    # Threads in whose write LMCache's writer has already released the buffer.
    _given_back: set[int]
    # Makes room on a full disk; whether a full disk, and a failed write, were logged.
    _disk_full: DiskFullHandler
    _said_full: bool
    _warned: bool

    @classmethod
    def adopt(
        cls,
        backend: LocalDiskBackend,
        failed: Callable[[int], None] = lambda records: None,
        written: Callable[[CacheEngineKey], None] = lambda key: None,
    ) -> "LocalDisk":
        """Take over ``backend`` with its threads; it must not be used any more.

        LMCache makes an instance of its own class, and another instance would start threads again.

        Args:
            failed: called with the number of records that were not written, by any thread.
            written: called with the key of each record that was, by any thread.
        """
        self = cls.__new__(cls)
        self.__dict__.update(backend.__dict__)
        if type(self.cache_policy) is LFUCachePolicy:
            self.cache_policy = LFUWithPendingWrites()
        self._failed, self._written = failed, written
        self._limit = self.max_cache_size
        self._strangers, self._strange_bytes, self._kept = {}, 0, {}
        self._arranged, self._given_back, self._elsewhere = {}, set(), set()
        self._deleter = Deleter(self._stays)
        self._disk_full = DiskFullHandler(self.path, self._give_way, self._deleter.finish)
        self._warned = self._said_full = False
        return self

    # Start

    def restore(
        self,
        model_name: str,
        writers: Mapping[bytes, int],
        metadata: "LMCacheMetadata",
        folders: Sequence[str] = (),
        restored: Callable[[CacheEngineKey, Header], None] = lambda key, header: None,
    ) -> int:
        """Index the records of this model, layout and rank on disk.

        The oldest come first, so the policy evicts them first. Files past the size limit are
        deleted: strangers, then the oldest records.

        Args:
            writers: this rank's fingerprints, and the rank in the keys of each.
            folders: all that ``local_disk`` names.
            restored: called for each record that is found.

        Returns:
            The number of indexed records.
        """
        self._rank = metadata.worker_id
        folders = _different(self.path, *folders)
        files = find(folders, model_name, writers, metadata)
        device = os.stat(self.path).st_dev
        self._elsewhere = {file.path for file in files if file.device != device}
        own = [file for file in files if file.key is not None]
        strangers = [file for file in files if file.key is None]
        over = sum(file.size for file in files) - self._limit
        for ranked in (strangers, own):
            while over > 0 and ranked:
                oldest = ranked.pop(0)
                with self.disk_lock:
                    over -= oldest.size if self._delete(oldest.path) else 0
        self._strangers = {file.path: file.size for file in strangers}
        for file in own:
            if file.key is not None and file.header is not None and self._index(file):
                restored(file.key, file.header)
            else:
                self._strangers[file.path] = file.size
        self._strange_bytes = sum(self._strangers.values())
        logger.info(
            "local_disk %s: %d records (%.1f MB) of this model found again; %d other files "
            "(%.1f MB) are evicted first.",
            ", ".join(folders),
            len(self.dict),
            self.current_cache_size / 1e6,
            len(self._strangers),
            self._strange_bytes / 1e6,
        )
        return len(self.dict)

    def _key_to_path(self, key: CacheEngineKey) -> str:
        """Name a file by this rank: ranks share a folder, and each deletes its own files."""
        if key.worker_id != self._rank:
            key = key.with_new_worker_id(self._rank)
        return super()._key_to_path(key)

    def _index(self, file: Found) -> bool:
        if file.key is None or file.key in self.dict:
            return False
        if os.path.basename(self._key_to_path(file.key)) != os.path.basename(file.path):
            return False
        shape = record_shape(file.size)
        self.insert_key(file.key, file.size, shape, torch.uint8, MemoryFormat.KV_2LTD)
        self.dict[file.key].path = file.path
        if isinstance(self.cache_policy, eviction_order.ARC):
            self.cache_policy.found_again(file.key)
        else:
            self.cache_policy.update_on_put(file.key)
        self.current_cache_size += file.size
        self.usage += file.size
        return True

    def watch(self, wrap: Callable[[Any], Any]) -> Any:
        """Replace the index by ``wrap`` of it, and return that."""
        with self.disk_lock:
            index = self.dict = wrap(self.dict)  # type: ignore[has-type]
        return index

    # Writing

    def is_writing(self) -> bool:
        """Whether writes are in flight."""
        return bool(self.disk_worker.put_tasks)

    def batched_submit_put_task(
        self, keys: Any, memory_objs: Any, transfer_spec: Any = None, **kwargs: Any
    ) -> None:
        """Write each record that there is room for; never raises: other backends follow.

        Writing and deleting begin when all are queued: the saving step waits for this call, and
        they would take a core and the GIL from it.
        """
        with self._deleter.queueing:
            for key, memory in zip(keys, memory_objs, strict=False):
                try:
                    self.submit_put_task(key, memory, **kwargs)
                except Exception as error:
                    self._fail(error)

    def submit_put_task(self, key: CacheEngineKey, memory_obj: MemoryObj, **kwargs: Any) -> None:
        size = memory_obj.get_physical_size()
        with self.disk_lock:
            new = key not in self.dict and not self.exists_in_put_tasks(key)
            if new:
                # Check first: evict nothing for a record that cannot be written.
                os.stat(self.path)
                if not os.access(self.path, os.W_OK | os.X_OK):
                    raise OSError(errno.EACCES, os.strerror(errno.EACCES))
                self._make_room(self._key_to_path(key), size)
                if size > self.max_cache_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().submit_put_task(key, memory_obj, **kwargs)

    def _make_room(self, path: str, size: int) -> None:
        """Evict for a new record, strangers first; nothing if even all would be too little.

        LMCache then refuses the record. LMCache's own code adds up the sizes of all records for
        each new one. Call with ``disk_lock`` held.
        """
        if path in self._strangers:  # about to be replaced
            self._delete_stranger(path)
        self._evict_bytes(size + int(self.current_cache_size) + self._others(path) - self._limit)
        self.max_cache_size = max(0, self._limit - self._others(path))

    def _others(self, path: str) -> int:
        """Return bytes of strangers and undeletable files, except one that ``path`` replaces."""
        kept = sum(self._kept.values()) - self._kept.get(path, 0)
        return self._strange_bytes + kept

    def _delete_stranger(self, path: str) -> int:
        """Delete a stranger and return the bytes freed; call with ``disk_lock`` held."""
        size = self._strangers.pop(path)
        self._strange_bytes -= size
        return size if self._delete(path) else 0

    def _delete(self, path: str) -> bool:
        """Delete a file, or count it as undeletable; call with ``disk_lock`` held."""
        try:
            self._deleter.delete(path)
        except OSError as error:
            self._keep(path, error)
        return path not in self._kept

    def _keep(self, path: str, error: OSError) -> None:
        """Count a file that could not be deleted; call with ``disk_lock`` held."""
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                self._kept[path] = status.st_size
                logger.warning_once(
                    "%s cannot be deleted (%s): such files count towards max_local_disk_size. "
                    "Delete them, or make the folder writable.",
                    path,
                    error.strerror,
                )

    def _stays(self, path: str, error: OSError) -> None:
        with self.disk_lock:
            self._keep(path, error)

    def _give_way(self, size: int) -> bool:
        """Evict ``size`` bytes of this file system, strangers first.

        Returns:
            False, with nothing evicted, if even all would be less.
        """
        with self.disk_lock:
            if not self._evict_bytes(size, self._elsewhere):
                return False
        self._deleter.finish()
        if not self._said_full:
            self._said_full = True
            logger.warning(
                "local_disk %s ends before max_local_disk_size: the oldest records make room for "
                "new ones. Make room there, or lower the limit.",
                self.path,
            )
        return True

    def _evict_bytes(self, size: int, but: Set[str] = frozenset()) -> bool:
        """See :meth:`_give_way`; call with ``disk_lock`` held.

        Args:
            but: files that stay.

        Raises:
            OSError: too few of the files can be deleted. At most one findable record is lost.
        """
        index = self.dict
        if but:
            index = {key: entry for key, entry in index.items() if entry.path not in but}
        entries = (entry.size for entry in index.values() if entry.can_evict)
        strange = self._strange_bytes - sum(self._strangers.get(path, 0) for path in but)
        if all(total < size for total in itertools.accumulate(entries, initial=strange)):
            return False
        while size > 0:
            path = next((path for path in self._strangers if path not in but), None)
            if path is None:
                break
            size -= self._delete_stranger(path)
        while size > 0:
            freed = self._evict(index)
            if not freed:
                raise OSError(errno.EIO, "evicted files cannot be deleted")
            size -= freed
        return True

    def _evict(self, index: Any) -> int:
        """Delete the record that the policy names and return the bytes freed.

        Args:
            index: the part of the index that the policy sees.
        """
        candidates = self.cache_policy.get_evict_candidates(index, num_candidates=1)
        if not candidates:
            return 0
        entry = self.dict[candidates[0]]
        self.current_cache_size -= entry.size
        self.remove(candidates[0], force=False)
        index.pop(candidates[0], None)
        return 0 if entry.path in self._kept else int(entry.size)

    def async_save_bytes_to_disk(
        self, key: CacheEngineKey, memory_obj: MemoryObj, **kwargs: Any
    ) -> None:
        """Write a record, and clean up after a failed write.

        In LMCache's writer an error (disk full, folder gone) skips releasing the buffer, the bytes
        of the size account and the in-flight mark: each failure leaks a buffer of the CPU pool
        and blocks the key for ever.
        """
        self._deleter.wait_for_queueing()
        size, length = memory_obj.get_physical_size(), len(memory_obj.byte_array)
        here = threading.get_ident()
        self._given_back.discard(here)
        try:
            super().async_save_bytes_to_disk(key=key, memory_obj=memory_obj, **kwargs)
        except Exception as error:
            self._fail(error)
            with self.disk_lock:
                self.current_cache_size -= size
                self.dict.pop(key, None)
                self.cache_policy.update_on_force_evict(key)
            self.usage -= length
            self._discard(self._key_to_path(key))
            if here not in self._given_back:
                memory_obj.ref_count_down()
            # From here on the record may be written again.
            self.disk_worker.remove_put_task(key)
            self._arrive(key)

    def _discard(self, path: str) -> None:
        """Delete the rest of a failed write, or count it."""
        with self.disk_lock:
            self._kept.pop(path, None)
        try:
            os.unlink(path)
        except (FileNotFoundError, ValueError):
            pass
        except OSError as error:
            self._stays(path, error)

    def insert_key(self, key: CacheEngineKey, *args: Any, **kwargs: Any) -> None:
        self._given_back.add(threading.get_ident())  # LMCache's writer released it before
        with self.disk_lock:
            self._kept.pop(self._key_to_path(key), None)  # replaced
        super().insert_key(key, *args, **kwargs)
        self._written(key)
        self._arrive(key)

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
            writing = self._being_written()
            pending = {key for key in keys if key not in self.dict and key in writing}
            self._arranged.update(dict.fromkeys(pending, (keys, pending)))
            if not pending:
                self._move_to_end(keys)

    def _being_written(self) -> set[CacheEngineKey]:
        """Copy LMCache's list of writes in flight to a set, for fast search."""
        with self.disk_worker.put_lock:
            return set(self.disk_worker.put_tasks)

    def _arrive(self, key: CacheEngineKey) -> None:
        """Note the end of a write; the last one of a save sets the save's eviction order."""
        with self.disk_lock:
            keys, pending = self._arranged.pop(key, ((), set()))
            pending.discard(key)
            if not pending:
                self._move_to_end(keys)

    def _move_to_end(self, keys: Sequence[CacheEngineKey]) -> None:
        for key in keys:
            if key in self.dict:
                self.dict.move_to_end(key)

    def write_file(self, buffer: Any, path: str) -> None:
        self._disk_full.write(lambda: self._write(buffer, path), len(buffer))

    def _write(self, buffer: Any, path: str) -> None:
        try:
            with create_anew(path) as data:
                data.write(buffer)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)  # what was written takes room that others wait for
            raise

    def _fail(self, error: Exception) -> None:
        self._failed(1)
        if not self._warned:
            self._warned = True
            logger.warning(
                "local_disk %s cannot be written (%s): such records are kept in the other backends "
                "only. Make room there, or make it a writable directory.",
                self.path,
                getattr(error, "strerror", None) or error,
            )

    # Reading

    def read_file(self, key: CacheEngineKey, buffer: Any, path: str) -> None:
        """Read a record, which may be cut off; forget it if the file is gone."""
        try:
            with open_regular(path) as data:
                data.readinto(buffer)  # type: ignore[attr-defined]
        except OSError as error:
            if error.errno not in NO_FILE:
                raise  # it may be whole
            with self.disk_lock:
                entry = self.dict.pop(key, None)
                self.cache_policy.update_on_force_evict(key)
                if entry is not None:
                    self.current_cache_size -= entry.size
                    self.usage -= entry.size

    def load_bytes_from_disk(
        self, key: CacheEngineKey, path: str, dtype: Any, shape: Any, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """Read one record; None if it cannot be read, like LMCache's read of several.

        LMCache's own raises and leaks the buffer; the caller then takes the whole disk as
        unreachable and retries the record.
        """
        memory = self.local_cpu_backend.allocate(shape, dtype, fmt)
        return self._load_chunk_into_memory(key, path, memory)

    # Deleting

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a record from the index, whether or not its file still exists.

        LMCache's own deletes on the caller's thread, and raises if it cannot.
        """
        entry = self.dict.get(key)
        if entry is None:
            return False
        with self.disk_lock if force else contextlib.nullcontext():
            self._delete(entry.path)
        with contextlib.suppress(OSError):  # it is gone, or stays
            super().remove(key, force)
        if force:
            with self.disk_lock:
                self.cache_policy.update_on_force_evict(key)
        return True

    def forget(self, key: CacheEngineKey) -> None:
        """Remove one record, its file and its share of the size account."""
        with self.disk_lock:  # two threads may find it damaged
            entry = self.dict.get(key)
            if entry is not None:
                self.remove(key, force=False)
                self.cache_policy.update_on_force_evict(key)
                self.current_cache_size -= entry.size

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._deleter.close()

    def check_integrity(self) -> None:
        """Assert what holds while no write is in flight."""
        with self.disk_lock:
            held = sum(entry.size for entry in self.dict.values())
            assert self.current_cache_size == held, "the size account is not that of the index"
            assert self._strange_bytes == sum(self._strangers.values())
            own = {entry.path for entry in self.dict.values()}
            assert own.isdisjoint(self._strangers), "a file is indexed and a stranger"
            assert not self._kept.keys() & (own | self._strangers.keys()), "a file counts twice"
            assert not self._arranged, "records that are not written wait for their order"


def _different(*folders: str) -> list[str]:
    """List each folder once, by the first of its names."""
    by_place: dict[tuple[int, int], str] = {}
    for folder in folders:
        status = os.stat(folder)
        by_place.setdefault((status.st_dev, status.st_ino), folder)
    return list(by_place.values())
