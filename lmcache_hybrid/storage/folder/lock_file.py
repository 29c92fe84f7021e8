# SPDX-License-Identifier: Apache-2.0
"""Lets one process at a time use a folder, or clean it."""

import errno
import fcntl
import os
import stat

from lmcache_hybrid.storage.disk.files import is_shared
from lmcache_hybrid.storage.folder.record_io import MODE, SHARED_MODE

# Lock files: of who cleans a folder of fs://, and of the engine that uses one of local_disk.
CLEANER_LOCK, ENGINE_LOCK = LOCK_NAMES = ".lmcache-hybrid-cleaner", ".lmcache-hybrid-engine"


class FolderLock:
    """A lock file in a folder. The system releases it when the process ends. One thread.

    Users who share the folder's records share the file: it has the mode of a record.
    """

    def __init__(self, folder: str, name: str = CLEANER_LOCK) -> None:
        """
        Args:
            name: one of LOCK_NAMES.
        """
        self._folder = folder
        self._path = os.path.join(folder, name)
        self._number: int | None = None

    def hold(self) -> bool:
        """Take the lock, or make sure that it is still held; False where another holds it.

        Raises:
            OSError: the folder is away, its file system has no locks, or the lock's name is not
                a regular file, without further links, that this user may read.
        """
        if self._number is not None and not self._is_in_place(self._number):
            self.release()
        if self._number is None:
            self._number = self._take()
        return self._number is not None

    def is_held(self) -> bool:
        """Whether another process holds it; False where that cannot be told. Creates nothing."""
        try:
            return is_locked(self._open())
        except OSError:
            return False

    def _take(self) -> int | None:
        try:
            number = self._create()
            if number is None:
                number = self._open()
        except FileNotFoundError:
            if not os.path.isdir(self._folder):
                raise
            return None  # deleted between the two; the next call creates it again
        taken = False
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have emptied the folder since it was opened.
            taken = self._is_in_place(number)
        except BlockingIOError:
            pass
        finally:
            if not taken:
                os.close(number)
        return number if taken else None

    def _create(self) -> int | None:
        """Create the file; None if something has its name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            number = os.open(self._path, flags, MODE)
        except FileExistsError:
            return None
        try:
            if is_shared(os.stat(self._folder)):
                os.fchmod(number, stat.S_IMODE(os.fstat(number).st_mode) | SHARED_MODE)
        except BaseException:
            os.close(number)
            raise
        return number

    def _open(self) -> int:
        """Open the existing file, which may be somebody else's; never changes it."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            number = os.open(self._path, flags | os.O_RDWR)  # NFS locks only writable files
        except PermissionError:
            number = os.open(self._path, flags | os.O_RDONLY)
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(number)
            raise OSError(errno.EINVAL, "this is not a lock file, delete it", self._path)
        return number

    def _is_in_place(self, number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let another process have it. Idempotent."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


def is_locked(number: int) -> bool:
    """Whether another process has locked an open file or folder. Closes it.

    Raises:
        OSError: its file system has no such locks.
    """
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(number)
