# SPDX-License-Identifier: Apache-2.0
"""Keeps the folders of ``fs://`` within limits, and deletes leftovers of killed engines."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.config.folders import FolderLimits
from lmcache_hybrid.config.stores import shared_folders
from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.storage.folder.least_used import least_used
from lmcache_hybrid.storage.folder.lock_file import FolderLock
from lmcache_hybrid.storage.folder.record_files import TEMPORARY, RecordFile, record_files

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

logger = init_logger("vllm.lmcache_hybrid.storage.folder.cleaner")

PAUSE_SECONDS = 60.0
# The pause without limits, where only leftovers of killed engines are deleted.
SWEEP_SECONDS = 3600.0
# Delete down to this part of the limit, so that not every round has to delete.
LOW = 0.95
# Rounds that only ask for the disk's used bytes after one that deleted nothing. Deletions by other
# programs may hide new records for that long.
SKIPPED_ROUNDS = 10
# Files to look at, and to delete, before the thread yields to others.
LOOKED_AT, DELETED = 200, 16
BREATH_SECONDS = 0.01
# Max records to delete per round, so that a wrong clock cannot empty the store at once.
MOST_DELETED = 20_000

# Called with the reason ("age", "size" or "unfinished") and the bytes of one record.
Count = Callable[[str, int], None]


def start_cleaners(
    config: "LMCacheEngineConfig", limits: FolderLimits, ledger: Ledger[WorkerCounts]
) -> "list[FolderCleaner]":
    """Start a cleaner for each store in folders: ``fs://``, and those of plugins.

    Args:
        ledger: of this rank, which counts the deleted records.
    """

    def count(limit: str, size: int) -> None:
        with ledger as counts:
            counts.cleaned_records[limit] += 1
            counts.cleaned_bytes[limit] += size

    pause = PAUSE_SECONDS if limits else SWEEP_SECONDS
    started: list[FolderCleaner] = []
    with ExitStack() as stack:
        for _, folders in shared_folders(config):
            started.append(FolderCleaner(folders, limits, count, pause))
            stack.callback(started[-1].close)
        stack.pop_all()
    return started


@dataclass
class _Round:
    """Results of one round; sizes in bytes."""

    found: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    kept_bytes: int = 0  # of files that may not be deleted

    @property
    def at_its_limit(self) -> bool:
        return self.deleted >= MOST_DELETED


class FolderCleaner:
    """Deletes records by size and age, on a thread of its own. Any thread may close it.

    Old files that an engine did not finish are deleted even without limits.

    One process at a time cleans a folder, the one that holds the lock file in it; the others only
    try the lock. In a folder with the sticky bit a user may delete only their own files: only
    those count, and the lock is released after each round, for the processes of other users. A
    file deleted between a lookup and its load is a failed load, which vLLM computes.
    """

    def __init__(
        self,
        folders: Sequence[str],
        limits: FolderLimits,
        count: Count,
        pause: float,
    ) -> None:
        """Start the thread.

        Args:
            folders: of one store; the byte limit is for all together.
            count: called on the thread, once for each deleted record.
            pause: seconds between two rounds.
        """
        self._folders, self._limits, self._count = tuple(folders), limits, count
        self._pause = pause
        self._lock = FolderLock(folders[0])
        self._skip = 0
        self._told = False
        # Bytes of records, and of all files on their disks, after the last full round.
        self._last = 0, 0
        self._closing = threading.Event()
        # A daemon: it may wait for a file server that is away, which must not delay the exit.
        self._thread = threading.Thread(target=self._run, name="hybrid-cleaner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current file; does not wait. Idempotent."""
        self._closing.set()

    def _run(self) -> None:
        # Do not lower this thread's priority: it would hold the GIL while it waits for a core.
        try:
            while not self._closing.is_set():
                self._try_round()
                self._closing.wait(self._pause)
        finally:
            self._lock.release()

    def _try_round(self) -> None:
        try:
            self.round()
        except _ClosedError:
            pass
        except Exception as error:  # cleaning must not end the engine
            if self._limits:
                logger.warning_once(
                    "%s is not cleaned now (%r); lmcache.hybrid_fs_max_size_gb and "
                    "lmcache.hybrid_fs_max_age_hours hold again once that is repaired.",
                    ",".join(self._folders),
                    error,
                )
            self._lock.release()

    def round(self) -> None:
        """Clean, if this process holds the lock and there may be something to clean.

        Raises:
            OSError: a folder cannot be read, or its file system has no locks.
        """
        if not self._lock.hold() or not self._is_due():
            return
        done = _Round()
        self._by_age(done)
        self._by_size(done)
        if done.deleted:
            logger.info(
                "Deleted %d records (%.3f GB) of %s, which had %.3f GB.",
                done.deleted,
                done.deleted_bytes / (1 << 30),
                ",".join(self._folders),
                done.found / (1 << 30),
            )
        left = done.found - done.deleted_bytes - done.kept_bytes
        self._last = left, _used_bytes(self._folders)
        if done.kept_bytes:
            self._lock.release()
        # Some file systems free the space of deleted files later.
        self._skip = 0 if done.deleted else SKIPPED_ROUNDS

    def _is_due(self) -> bool:
        """Whether the folder may be over a limit, without reading it."""
        if not self._limits:
            return True
        self._skip -= 1
        if self._skip < 0:
            return True
        records, before = self._last
        limit = self._limits.max_bytes
        return limit is not None and records + _used_bytes(self._folders) - before > limit

    def _by_age(self, done: _Round) -> None:
        """Add up the folder, and delete files that are too old."""
        seconds = self._limits.max_seconds
        before = -math.inf if seconds is None else time.time() - seconds
        for file in self._all_files():
            done.found += file.taken
            if file.foreign:
                done.kept_bytes += file.taken
                self._tell(file.path)
            if file.foreign or file.writing or done.at_its_limit:
                continue
            if file.unfinished:
                self._delete(file, "unfinished", done)
            elif file.used < before:
                self._delete(file, "age", done)

    def _by_size(self, done: _Round) -> None:
        limit = self._limits.max_bytes
        left = done.found - done.deleted_bytes - done.kept_bytes
        if limit is None or left <= limit:
            return
        for file in least_used(self._files, left - int(LOW * limit)):
            if done.at_its_limit:
                return
            self._delete(file, "size", done)

    def _delete(self, file: RecordFile, why: str, done: _Round) -> None:
        try:
            os.unlink(file.path)
        except FileNotFoundError:
            return
        except PermissionError:
            done.kept_bytes += file.taken
            self._tell(file.path)
            return
        done.deleted += 1
        done.deleted_bytes += file.taken
        self._count(why, file.taken)
        if not done.deleted % DELETED:
            self._breathe()

    def _tell(self, path: str) -> None:
        if self._limits and not self._told:
            self._told = True
            logger.warning(
                "%s may not be deleted by this user, and neither may files like it: they do not "
                "count, and stay until their owner, or an engine of that user, deletes them.",
                path,
            )

    def _files(self) -> Iterator[RecordFile]:
        return (file for file in self._all_files() if not file.foreign and not file.writing)

    def _all_files(self) -> Iterator[RecordFile]:
        only = () if self._limits else (TEMPORARY,)
        for folder in self._folders:
            for number, file in enumerate(record_files(folder, *only), 1):
                if not number % LOOKED_AT:
                    self._breathe()
                yield file

    def _breathe(self) -> None:
        """Yield to other threads. Raises _ClosedError once the cleaner is closed."""
        if self._closing.wait(BREATH_SECONDS):
            raise _ClosedError


class _ClosedError(Exception):
    """The cleaner was closed in the middle of a round."""


def _used_bytes(folders: Sequence[str]) -> int:
    """Return the bytes in use on the disks of ``folders``, other programs' included."""
    disks = {os.stat(folder).st_dev: os.statvfs(folder) for folder in folders}
    return sum((disk.f_blocks - disk.f_bfree) * disk.f_frsize for disk in disks.values())
