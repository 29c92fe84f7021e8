# SPDX-License-Identifier: Apache-2.0
"""Opens files in folders that others can write to."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def open_regular(path: str) -> Iterator[BinaryIO]:
    """Open a regular file; neither a link that took its place, nor a pipe that never answers.

    Raises:
        FileNotFoundError: there is no regular file of this name.
        OSError: it cannot be opened, or is a link.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as data:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise FileNotFoundError(path)
        yield data
