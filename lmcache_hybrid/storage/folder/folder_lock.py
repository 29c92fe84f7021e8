# SPDX-License-Identifier: Apache-2.0
"""Has one process at a time clean a folder."""

import fcntl
import os

from lmcache_hybrid.storage.disk.files import GROUP_FILE, PRIVATE_FILE, is_shared

LOCK_NAME = ".lmcache-hybrid-cleaner"


class FolderLock:
    """A lock file in a folder. The system releases it when the process ends. One thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, LOCK_NAME)
        self._number: int | None = None

    def hold(self) -> bool:
        """Take the lock, or make sure that it is still held; False where another holds it.

        Raises:
            OSError: the folder is away, or its file system has no locks.
        """
        if self._number is not None and not self._is_in_place(self._number):
            self.release()
        if self._number is None:
            self._number = self._take()
        return self._number is not None

    def _take(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(self._path, flags, PRIVATE_FILE)
        taken = False
        try:
            if os.fstat(number).st_uid == os.geteuid() and is_shared(os.stat(self._folder)):
                os.fchmod(number, GROUP_FILE)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have emptied the folder since it was opened.
            taken = self._is_in_place(number)
        except BlockingIOError:
            pass
        finally:
            if not taken:
                os.close(number)
        return number if taken else None

    def _is_in_place(self, number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let another process clean. Idempotent."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)
