# SPDX-License-Identifier: Apache-2.0
"""LMCache's ``local_disk`` as a backend of this package, whose records survive restarts.

The index is rebuilt from the records' headers. Files have the names that LMCache gives them.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey, DiskCacheMetadata
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface
from lmcache.v1.storage_backend.path_sharder import PathSharder
from vllm.logger import init_logger

from lmcache_hybrid.core.backends import DISK
from lmcache_hybrid.core.threads import anywhere, cores, started
from lmcache_hybrid.storage import eviction_order
from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.disk.files import NO_FILE, open_regular, write_anew
from lmcache_hybrid.storage.disk.full_disk import DiskFullHandler
from lmcache_hybrid.storage.disk.index import SUFFIX, Found, find
from lmcache_hybrid.storage.disk.limited_index import LimitedIndex
from lmcache_hybrid.storage.record_format import Header

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

logger = init_logger("vllm.lmcache_hybrid.storage.disk.backend")

# Threads that write, and threads that read, as LMCache's, unless disk_io_threads says otherwise.
THREADS = 4


class LocalDisk(LimitedIndex, StorageBackendInterface):
    """LMCache's ``local_disk``: records of one rank in files.

    Writes into one of the folders that ``local_disk`` names, by the rank's device. Files in the
    others, from when the list was different, are found, counted and evicted there.

    Any thread may call it. :meth:`close` ends its threads.

    Attributes:
        path: the folder that it writes into.
        failed: called with the number of records that were not written, by any thread.
        written: called with the key of each record that was, by any thread.
    """

    def __init__(
        self,
        config: "LMCacheEngineConfig",
        loop: Any,
        local_cpu_backend: "LocalCPUBackend",
        dst_device: str,
        lmcache_worker: Any,
        metadata: "LMCacheMetadata",
    ) -> None:
        """Open an empty index; LMCache calls it, see :mod:`.make_backend`.

        Args:
            loop: not needed.
            local_cpu_backend: owner of the memory that is read into.
            lmcache_worker: of LMCache's controller, which no hybrid model has.

        Raises:
            OSError: a folder cannot be created.
        """
        StorageBackendInterface.__init__(self, dst_device)
        folders, sharding = config.local_disk, config.local_disk_path_sharding
        self.path: str = PathSharder(folders, sharding, dst_device, create_dirs=True).selected
        self.failed: Callable[[int], None] = lambda records: None
        self.written: Callable[[CacheEngineKey], None] = lambda key: None
        self._pool, self._metadata = local_cpu_backend, metadata
        # Files on other file systems than that of the folder written to.
        self._elsewhere: set[str] = set()
        # Whether a full disk, and a failed write, were logged.
        self._said_full = self._warned = False
        self.visited = False
        threads = config.get_extra_config_value("disk_io_threads", THREADS)
        unbound = anywhere(cores())
        LimitedIndex.__init__(self, config.cache_policy, int(config.max_local_disk_size * 1024**3))
        with ExitStack() as stack:
            stack.callback(self.others.deleter.close)
            self._writers = started(threads, "hybrid-disk-write", unbound)
            stack.callback(self._writers.shutdown)
            self._readers = started(threads, "hybrid-disk-read", unbound)
            stack.callback(self._readers.shutdown)
            self._ends = stack.pop_all()
        self._disk_full = DiskFullHandler(self.path, self._give_way, self.others.deleter.finish)

    def __str__(self) -> str:
        return DISK  # LMCache's name of the backend, also in store_location

    def get_allocator_backend(self) -> "LocalCPUBackend":
        return self._pool

    def touch_cache(self) -> None:
        """Hits are noted by :meth:`.IndexedTier.used`."""

    def close(self) -> None:
        """Finish all writes and deletions, and end the threads. Idempotent."""
        self._ends.close()

    def path_of(self, key: CacheEngineKey) -> str:
        """Name a file by this rank: ranks share a folder, and each deletes its own files."""
        if key.worker_id != self._metadata.worker_id:
            key = key.with_new_worker_id(self._metadata.worker_id)
        return os.path.join(self.path, key.to_string().replace("/", "-") + SUFFIX)

    # Start

    def restore(
        self,
        model_name: str,
        writers: Mapping[bytes, int],
        folders: Sequence[str] = (),
        restored: Callable[[CacheEngineKey, Header], None] = lambda key, header: None,
    ) -> None:
        """Index the records of this model, layout and rank on disk. Called once, before others.

        The oldest come first, so the policy evicts them first. Files past the size limit are
        deleted: strangers, then the oldest records.

        Args:
            writers: this rank's fingerprints, and the rank in the keys of each.
            folders: all that ``local_disk`` names.
            restored: called for each record that is found.
        """
        folders = _different(self.path, *folders)
        files = find(folders, model_name, writers, self._metadata)
        device = os.stat(self.path).st_dev
        self._elsewhere = {file.path for file in files if file.device != device}
        own = [file for file in files if file.key is not None]
        strangers = [file for file in files if file.key is None]
        over = sum(file.size for file in files) - self.max_cache_size
        for ranked in (strangers, own):
            while over > 0 and ranked:
                oldest = ranked.pop(0)
                with self.disk_lock:
                    over -= oldest.size if self.others.delete(oldest.path) else 0
        others = {file.path: file.size for file in strangers}
        for file in own:
            if file.key is not None and file.header is not None and self._restore(file, file.key):
                restored(file.key, file.header)
            else:
                others[file.path] = file.size
        with self.disk_lock:
            self.others.found(others)
        logger.info(
            "local_disk %s: %d records (%.1f MB) of this model found again; %d other files "
            "(%.1f MB) are evicted first.",
            ", ".join(folders),
            len(self.dict),
            self.current_cache_size / 1e6,
            len(others),
            self.others.strange_bytes / 1e6,
        )

    def _restore(self, file: Found, key: CacheEngineKey) -> bool:
        """Index a file; returns whether it is the record's, and the first."""
        with self.disk_lock:
            if key in self.dict:
                return False
            if os.path.basename(self.path_of(key)) != os.path.basename(file.path):
                return False
            if isinstance(self.cache_policy, eviction_order.ARC):
                self.cache_policy.found_again(key)
            self._insert(key, DiskCacheMetadata(file.path, file.size, record_shape(file.size)))
            self._count(file.size)
            return True

    # Writing

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Write each record that there is room for; never raises: other backends follow.

        Writing and deleting begin when all are queued: the saving step waits for this call, and
        they would take a core and the GIL from it.

        Args:
            objs: referred to until their writes have ended.
            transfer_spec, on_complete_callback: of LMCache's interface; not used.
        """
        with self.others.deleter.queueing:
            for key, memory in zip(keys, objs, strict=False):
                try:
                    self._queue(key, memory)
                except Exception as error:
                    self._fail(error)

    def _queue(self, key: CacheEngineKey, memory: MemoryObj) -> None:
        """Queue a write, unless the record is held, in flight, or all room is in use.

        Call with ``queueing`` held, so that the write does not begin.

        Raises:
            OSError: it cannot be written, and nothing was evicted for it; or the evicted files
                cannot be deleted.
        """
        size = memory.get_physical_size()
        with self.disk_lock:
            if key in self.dict:
                self.cache_policy.update_on_hit(key, self.dict)
                return
            if key in self.put_tasks:
                return
            # Check first: evict nothing for a record that cannot be written.
            os.stat(self.path)
            if not os.access(self.path, os.W_OK | os.X_OK):
                read_only = os.statvfs(self.path).f_flag & os.ST_RDONLY
                code = errno.EROFS if read_only else errno.EACCES
                raise OSError(code, os.strerror(code))
            if self.others.may_go_by_now():
                self.others.delete_kept({self.path_of(each) for each in self.put_tasks})
            if not self._make_room(self.path_of(key), size):
                logger.debug("%s is not written: all room is promised or in flight", key)
                return
            if isinstance(self.cache_policy, eviction_order.ARC):
                self.cache_policy.update_on_put(key)
            self._writers.submit(self._write, key, memory, size)
            memory.ref_count_up()
            self.put_tasks.add(key)
            self._count(size)

    def _write(self, key: CacheEngineKey, memory: MemoryObj, size: int) -> None:
        """Write a queued record and index it, or leave nothing of it. On a writer's thread."""
        self.others.deleter.wait_for_queueing()
        path = self.path_of(key)
        try:
            self.write_file(memory.byte_array, path)
            with self.disk_lock:
                self._insert(key, DiskCacheMetadata(path, size, memory.get_shape()))
        except Exception as error:
            self._fail(error)
            with self.disk_lock:
                self._count(-size)
                self.cache_policy.update_on_force_evict(key)
            self.others.discard(path)
        else:
            self.written(key)
        finally:
            memory.ref_count_down()
            self._arrive(key)  # from here on the record may be written again

    def write_file(self, buffer: Any, path: str) -> None:
        """Write a file, in place of the oldest ones where the disk is full; raises OSError."""
        self._disk_full.write(partial(write_anew, path, buffer), len(buffer))

    def _give_way(self, size: int) -> bool:
        """Evict ``size`` bytes of the file system that is written to.

        Returns:
            False, with nothing evicted, if even all would be less.
        """
        with self.disk_lock:
            if self.visited or not self._evict(size, self._elsewhere):
                return False
        self.others.deleter.finish()
        if not self._said_full:
            self._said_full = True
            logger.warning(
                "local_disk %s ends before max_local_disk_size: the oldest records make room for "
                "new ones. Make room there, or lower the limit.",
                self.path,
            )
        return True

    def _fail(self, error: Exception) -> None:
        self.failed(1)
        if not self._warned:
            self._warned = True
            logger.warning(
                "local_disk %s cannot be written (%s): such records are kept in the other backends "
                "only. Make room there, or make it a writable directory.",
                self.path,
                getattr(error, "strerror", None) or error,
            )

    # Reading

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Read records, several at once. What is read may be cut off or damaged.

        Returns:
            For each its memory, which the caller owns; None if it is gone, cannot be read, or
            there is no memory.
        """
        with self.disk_lock:
            entries = [self.dict.get(key) for key in keys]
        if len(keys) == 1:
            return [self._read(keys[0], entries[0])]
        return list(self._readers.map(self._read, keys, entries))

    def _read(self, key: CacheEngineKey, entry: DiskCacheMetadata | None) -> MemoryObj | None:
        """Read one record; forget it if its file is gone. Never raises."""
        if entry is None:
            return None
        memory = None
        try:
            memory = self._pool.allocate(entry.shape, torch.uint8, MemoryFormat.KV_2LTD)
            if memory is not None:
                with open_regular(entry.path) as file:
                    file.readinto(memory.byte_array)  # type: ignore[attr-defined]
            return memory
        except Exception as error:
            if memory is not None:
                memory.ref_count_down()
            if getattr(error, "errno", None) in NO_FILE:
                with self.disk_lock:
                    if self.dict.get(key) is entry:
                        self._drop(key)
            else:  # it may be whole
                logger.warning("%s cannot be read: %s", entry.path, error)
            return None


def _different(*folders: str) -> list[str]:
    """List each folder once, by the first of its names."""
    by_place: dict[tuple[int, int], str] = {}
    for folder in folders:
        status = os.stat(folder)
        by_place.setdefault((status.st_dev, status.st_ino), folder)
    return list(by_place.values())
