# SPDX-License-Identifier: Apache-2.0
"""Opens, makes and deletes files in folders that others can write to."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

# File modes that keep other users out: records contain prompts.
PRIVATE_FILE = 0o600
GROUP_FILE = 0o660
# Errors that mean no regular file: nothing of this name, a link, a socket.
NO_FILE = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
)


@contextmanager
def open_regular(path: str) -> Iterator[BinaryIO]:
    """Open a regular file; refuse a link that took its place, or a pipe that never answers.

    Raises:
        FileNotFoundError: there is no regular file of this name.
        OSError: it cannot be opened, or is a link.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):  # fdopen does not close a folder
        os.close(number)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    with os.fdopen(number, "rb") as data:
        yield data


def write_anew(path: str, data: Any) -> None:
    """Write a file for this user alone, in place of whatever has the name.

    In a set-group-ID folder that the group may write to, the group may also read and write it.

    Raises:
        OSError: it cannot be written, or somebody else created it meanwhile. What was written of
            it is deleted.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(path, flags, PRIVATE_FILE)
    try:
        with os.fdopen(number, "wb") as file:
            if is_shared(os.stat(os.path.dirname(path))):
                os.fchmod(number, GROUP_FILE)
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)  # it takes room that others wait for
        raise


def is_shared(folder: os.stat_result) -> bool:
    """Whether a folder belongs to a group whose members write there."""
    wanted = stat.S_ISGID | stat.S_IWGRP
    return folder.st_mode & wanted == wanted
