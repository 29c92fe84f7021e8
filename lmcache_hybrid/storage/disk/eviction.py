# SPDX-License-Identifier: Apache-2.0
"""Writes to a disk that others fill, too: old records make room for new ones, within bounds."""

import errno
import math
import os
import threading
from collections.abc import Callable
from time import monotonic

FULL = (errno.ENOSPC, errno.EDQUOT)
# Attempts to write one record. Writes beside it may each take what it made room with; LMCache
# has four threads for them.
TRIES = 5
# Writes are made one by one for so long after the disk was full.
ALONE_SECONDS = 60.0
# The first and the longest pause after records were evicted in vain.
PAUSE_SECONDS, LONGEST_PAUSE = 60.0, 3600.0


class Room:
    """Makes room for records on a disk that is full.

    Thread-safe. A write that finds the disk full has as much evicted as it needs. That helps
    only where the room is still there for it: other programs may take it, and a file that a
    link or a snapshot holds gives none. The whole store would be lost for nothing, record by
    record, so after an eviction in vain there is none for a while, which doubles each time.
    """

    def __init__(
        self, folder: str, evict: Callable[[int], bool], finish_deleting: Callable[[], None]
    ) -> None:
        """Watch the file system of ``folder``.

        Args:
            evict: deletes files of so many bytes, or returns False and deletes none.
            finish_deleting: waits for files that are being deleted.
        """
        self._folder, self._evict, self._finish_deleting = folder, evict, finish_deleting
        self._lock = threading.Lock()
        self._alone_until = self._paused_until = -math.inf
        self._pause = PAUSE_SECONDS

    def write(self, write: Callable[[], None], size: int) -> None:
        """Call ``write``, which writes ``size`` bytes or leaves nothing behind.

        Raises:
            OSError: of ``write``; or the disk is full and may not be made room on.
        """
        if monotonic() >= self._alone_until:
            try:
                write()
                return
            except OSError as error:
                self._note(error)
        with self._lock:
            self._write_alone(write, size)

    def _note(self, error: OSError) -> None:
        """From now on writes are made one by one; raises an error of another kind."""
        if error.errno not in FULL:
            raise error
        self._alone_until = monotonic() + ALONE_SECONDS

    def _write_alone(self, write: Callable[[], None], size: int) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._finish_deleting()
        short = free_bytes(self._folder) < size
        for _ in range(TRIES):
            if short and not self._may_evict(size):
                self._note(full)
                raise full
            try:
                write()
            except OSError as error:
                self._note(error)
                short, full = True, error
                continue
            if short:
                self._note(full)
                self._pause = PAUSE_SECONDS
            return
        self._paused_until = monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        raise full

    def _may_evict(self, size: int) -> bool:
        if monotonic() < self._paused_until:
            return False
        try:
            return self._evict(size)
        except (LookupError, ValueError):  # of a policy of eviction: it ends no writer
            return False


def free_bytes(folder: str) -> int:
    """Of its file system, for this user."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
