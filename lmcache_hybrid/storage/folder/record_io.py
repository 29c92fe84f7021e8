# SPDX-License-Identifier: Apache-2.0
"""Reads, writes and looks up one file of ``fs://``, in a folder that others may write to.

Somebody may put a link, a pipe or anything else under a record's name. Only regular files are
read, and no link is followed. An unreadable file may be whole, and is distinguished from a damaged
one.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Literal, TypeVar

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.storage.disk.files import NO_FILE, is_shared, open_regular
from lmcache_hybrid.storage.folder.record_files import WRAPPER_BYTES, check_wrapper, wrapper_of

# Bytes to read or write at once; progress is noted after each.
STEP_BYTES = 4 << 20
# Mode of a new file, less the umask, and that added in a folder that a group shares.
MODE, SHARED_MODE = 0o666, 0o660
# Why a promised record could not be read: missing; maybe whole; not whole.
Fate = Literal["gone", "unreadable", "damaged"]
T = TypeVar("T")


def holds(path: str) -> bool:
    """Whether there is a record that this user may read.

    Raises:
        OSError: that cannot be found out.
    """
    try:
        status = _again(lambda: os.stat(path, follow_symlinks=False))
    except OSError as error:
        if error.errno in NO_FILE:
            return False
        raise
    if not stat.S_ISREG(status.st_mode):
        return False
    # Another user's private file, if promised, would fail one load after the other.
    return status.st_uid == os.geteuid() or os.access(path, os.R_OK, effective_ids=True)


def read(
    path: str,
    reserve: Callable[[int], memoryview | None],
    got: Callable[[int], object] = lambda size: None,
) -> bool:
    """Read a record into the memory that ``reserve`` gives for its size.

    Args:
        got: called with the number of bytes as they arrive; raises to end the read.

    Returns:
        False where there is none.

    Raises:
        RecordError: LMCache's header does not fit it.
        MemoryError: ``reserve`` gave none.
        OSError: it cannot be read, or another file took its place meanwhile.
    """
    try:
        _again(lambda: _read(path, reserve, got))
    except OSError as error:
        if error.errno in NO_FILE:
            return False
        raise
    return True


def _read(
    path: str, reserve: Callable[[int], memoryview | None], got: Callable[[int], object]
) -> None:
    with open_regular(path) as data:
        number = data.fileno()
        size = os.fstat(number).st_size - WRAPPER_BYTES
        memory = reserve(size) if size > 0 else None
        if memory is None:
            raise MemoryError(f"no memory for a record of {size} bytes")
        wrapper = bytearray(WRAPPER_BYTES)
        have = os.readv(number, [wrapper, memory[:STEP_BYTES]]) - WRAPPER_BYTES
        check_wrapper(bytes(wrapper), size)
        got(max(0, have))
        while have < size:
            read = os.readv(number, [memory[have : have + STEP_BYTES]])
            if not read:
                raise OSError(errno.EIO, f"the file ended after {have} of {size} bytes")
            have += read
            got(read)


def write(
    folder: str,
    temporary: str,
    name: str,
    record: memoryview,
    moved: Callable[[], object] = lambda: None,
) -> bool:
    """Write a record under a temporary name, and rename it.

    An existing file of its name is replaced, not written to. In a set-group-ID folder that the
    group may write to, the group may read the file whatever the umask is.

    Args:
        temporary: name in ``folder`` that no other write has.
        moved: called after each part.

    Returns:
        Whether it replaced a file.

    Raises:
        FileExistsError: ``temporary`` exists already.
        OSError: it was not written; nothing is left of it.
    """
    path, final = os.path.join(folder, temporary), os.path.join(folder, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(path, flags, MODE)
    try:
        try:
            if is_shared(os.stat(folder)):
                os.fchmod(number, stat.S_IMODE(os.fstat(number).st_mode) | SHARED_MODE)
            _write(number, record, moved)
        finally:
            os.close(number)  # tells on NFS whether the server took it all
        replaces = os.path.lexists(final)
        os.replace(path, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return replaces


def _write(number: int, record: memoryview, moved: Callable[[], object]) -> None:
    wrapper = wrapper_of(record.nbytes)
    done = -len(wrapper)
    while done < record.nbytes:
        parts = [record[max(0, done) :][:STEP_BYTES]]
        if done < 0:
            parts.insert(0, memoryview(wrapper)[done:])
        done += os.writev(number, parts)
        moved()


def delete(path: str) -> None:
    """Delete a record; a missing one is not an error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def fate(path: str, largest: int) -> Fate:
    """Find out why a record that :func:`holds` found could not be read.

    Args:
        largest: bytes of the largest record.
    """
    try:
        with open_regular(path) as data:
            size = os.fstat(data.fileno()).st_size - WRAPPER_BYTES
            wrapper = data.read(WRAPPER_BYTES)
    except OSError as error:
        return "gone" if error.errno in NO_FILE else "unreadable"
    try:
        check_wrapper(wrapper, size)
    except RecordError:
        return "damaged"
    return "damaged" if size > largest else "unreadable"


def _again(call: Callable[[], T]) -> T:
    """Call, and retry once if the file was replaced on its server meanwhile."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return call()
