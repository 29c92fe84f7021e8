# SPDX-License-Identifier: Apache-2.0
"""Tells whether another engine uses a folder of ``local_disk``."""

import fcntl
import os
import time

from lmcache_hybrid.storage.folder.lock_file import ENGINE_LOCK, FolderLock, is_locked

TRIES, PAUSE_SECONDS = 10, 0.01


class FolderUse:
    """An engine's lock on its folder. The system releases it when the process ends. One thread.

    It is on the folder itself, which needs no file, and all engines in it share it. NFS locks only
    files that are open for writing: there it is on a file in the folder, which one of them holds.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._number: int | None = None
        self._file = FolderLock(folder, ENGINE_LOCK)

    def hold(self) -> bool:
        """Take the lock, once; False where another engine holds it, too.

        Raises:
            OSError: the folder is away, or its file system has no locks.
        """
        number = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        alone = True
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
            _share(number)
        except BlockingIOError:
            os.close(number)
            return False
        except OSError:
            os.close(number)
            return self._file.hold()
        self._number = number
        return alone

    def release(self) -> None:
        """Let another engine have it. Idempotent."""
        number, self._number = self._number, None
        if number is not None:
            fcntl.flock(number, fcntl.LOCK_UN)  # also for a child that was forked since
            os.close(number)
        self._file.release()


def _share(number: int) -> None:
    """Take a shared lock; who takes the folder at this moment shares it at once.

    Raises:
        BlockingIOError: somebody keeps it alone.
    """
    for _ in range(TRIES):
        try:
            return fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_SECONDS)
    fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)


def in_use(folder: str) -> bool:
    """Whether an engine uses the folder now; False where that cannot be told. Creates nothing."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_locked(number)
    except OSError:  # NFS
        return FolderLock(folder, ENGINE_LOCK).is_held()
