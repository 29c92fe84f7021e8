# SPDX-License-Identifier: Apache-2.0
"""Counts and deletes the files of ``local_disk`` that hold no record of this rank."""

import contextlib
import math
import os
import stat
import threading
import time
from collections.abc import Set

from vllm.logger import init_logger

from lmcache_hybrid.storage.disk.deleter import Deleter

logger = init_logger("vllm.lmcache_hybrid.storage.disk.other_files")


# Min seconds between two attempts at a file that could not be deleted.
AGAIN_SECONDS = 60.0
# Max files that are tried again while a save is queued.
AT_ONCE = 32


class OtherFiles:
    """Files that take room beside the indexed ones: strangers, and those that cannot be deleted.

    Strangers are files of other models, versions and fingerprints. They are never read. Call with
    the index's lock held, except for :meth:`discard`.

    Attributes:
        strangers: bytes of each by path, the oldest first.
        strange_bytes: their sum.
        kept: bytes of each file that could not be deleted, by path.
        deleter: deletes files later, on a thread.
    """

    def __init__(self, lock: threading.Lock) -> None:
        """
        Args:
            lock: of the index.
        """
        self._lock = lock
        self.strangers: dict[str, int] = {}
        self.strange_bytes = 0
        self.kept: dict[str, int] = {}
        self._failed_at, self._warned = -math.inf, False
        self.deleter = Deleter(self._stays)

    def found(self, strangers: dict[str, int]) -> None:
        """Count strangers: bytes of each by path, the oldest first."""
        self.strangers, self.strange_bytes = strangers, sum(strangers.values())

    def strange_bytes_but(self, paths: Set[str]) -> int:
        """Return the bytes of all strangers but those at these paths."""
        return self.strange_bytes - sum(self.strangers.get(path, 0) for path in paths)

    def evict_strangers(self, size: int, but: Set[str]) -> int:
        """Delete the oldest strangers, ``size`` bytes if there are so many.

        Args:
            but: paths of files that stay.

        Returns:
            The bytes that are still to be freed; 0 or less if none are.
        """
        while size > 0:
            path = next((path for path in self.strangers if path not in but), None)
            if path is None:
                break
            size -= self.delete_stranger(path)
        return size

    def delete_stranger(self, path: str) -> int:
        """Delete what is at a path, if it is a stranger, and return the bytes freed."""
        if path not in self.strangers:
            return 0
        size = self.strangers.pop(path)
        self.strange_bytes -= size
        return size if self.delete(path) else 0

    def bytes_kept(self, but: str) -> int:
        """Return the bytes of undeletable files, except for one that is about to be replaced."""
        return sum(self.kept.values()) - self.kept.get(but, 0)

    def may_go_by_now(self) -> bool:
        """Whether :meth:`delete_kept` is due."""
        return bool(self.kept) and time.monotonic() - self._failed_at >= AGAIN_SECONDS

    def delete_kept(self, but: Set[str]) -> None:
        """Try again to delete some that could not be: the cause may be gone, or the file.

        Those of the longest standing are tried. If all go, more are due at once.

        Args:
            but: paths that are being written.
        """
        self._failed_at = -math.inf
        for path in [path for path in self.kept if path not in but][:AT_ONCE]:
            del self.kept[path]
            self.delete(path)

    def replaced(self, path: str) -> None:
        """Note that a record's file was written to a path."""
        self.kept.pop(path, None)

    def delete(self, path: str) -> bool:
        """Delete a file of any kind, or count it as undeletable; returns whether it goes."""
        try:
            self.deleter.delete(path)
        except OSError as error:
            self._keep(path, error)
        return path not in self.kept

    def discard(self, path: str) -> None:
        """Delete the rest of a failed write now, or count it. Takes the lock."""
        with self._lock:
            self.kept.pop(path, None)
        try:
            os.unlink(path)
        except (FileNotFoundError, ValueError):  # ValueError: a name with a NUL
            pass
        except OSError as error:
            self._stays(path, error)

    def _stays(self, path: str, error: OSError) -> None:
        with self._lock:
            self._keep(path, error)

    def _keep(self, path: str, error: OSError) -> None:
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                self.kept[path], self._failed_at = status.st_size, time.monotonic()
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "%s cannot be deleted (%s): such files count towards max_local_disk_size. "
                        "Delete them, or make the folder writable.",
                        path,
                        error.strerror,
                    )

    def check_integrity(self, indexed: Set[str]) -> None:
        """Assert what always holds, given the paths of indexed files."""
        assert self.strange_bytes == sum(self.strangers.values())
        assert indexed.isdisjoint(self.strangers), "a file is indexed and a stranger"
        assert not self.kept.keys() & (indexed | self.strangers.keys()), "a file counts twice"
