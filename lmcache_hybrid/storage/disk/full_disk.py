# SPDX-License-Identifier: Apache-2.0
"""Frees space on a disk that others also fill."""

import errno
import math
import os
import threading
import time
from collections.abc import Callable

from lmcache_hybrid.core.backoff import Backoff
from lmcache_hybrid.core.errors import FULL_DISK

# Attempts to write one record: three other writers may each take the space that it freed.
TRIES = 5
# Seconds for which writes run one by one after the disk was full.
ALONE_SECONDS = 60.0
# The first and the longest pause after an eviction that freed nothing.
PAUSE_SECONDS, LONGEST_PAUSE = 60.0, 3600.0


class DiskFullHandler:
    """Makes room for records on a disk that is full. Thread-safe.

    On ENOSPC, evict as many bytes as the write needs and retry. Other programs may take the space,
    and a file that a link or a snapshot holds frees none. To not lose the whole store for nothing,
    stop evicting for a while if the retries fail; double the pause each time.
    """

    def __init__(
        self, folder: str, evict: Callable[[int], bool], finish_deleting: Callable[[], None]
    ) -> None:
        """Watch the file system of ``folder``.

        Args:
            evict: deletes files of at least that many bytes, or returns False and deletes none.
            finish_deleting: waits until evicted files are deleted.
        """
        self._folder, self._evict, self._finish_deleting = folder, evict, finish_deleting
        self._lock = threading.Lock()
        self._alone_until = -math.inf
        self._pause = Backoff(PAUSE_SECONDS, LONGEST_PAUSE)

    def write(self, write: Callable[[], None], size: int) -> None:
        """Call ``write``, which writes ``size`` bytes or leaves nothing behind.

        Raises:
            OSError: of ``write``; or the disk is full and no space may be freed.
        """
        if time.monotonic() >= self._alone_until:
            try:
                write()
                return
            except OSError as error:
                self._note(error)
        with self._lock:
            self._write_alone(write, size)

    def _note(self, error: OSError) -> None:
        """Note a full disk: writes now run one by one. Raises any other error."""
        if error.errno not in FULL_DISK:
            raise error
        self._alone_until = time.monotonic() + ALONE_SECONDS

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
                self._pause.succeed()
            return
        self._pause.fail()
        raise full

    def _may_evict(self, size: int) -> bool:
        if self._pause.lasts:
            return False
        try:
            return self._evict(size)
        except (LookupError, ValueError):  # of an eviction policy: must not end the writer
            return False


def free_bytes(folder: str) -> int:
    """Return the bytes free for this user on the folder's file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
