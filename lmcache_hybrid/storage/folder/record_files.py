# SPDX-License-Identifier: Apache-2.0
"""The files of LMCache's ``fs://`` that hold records."""

import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_hybrid.storage.disk.files import open_regular
from lmcache_hybrid.storage.folder.least_used import UNREADABLE, Depth, depth_of
from lmcache_hybrid.storage.key_names import StoredKey, parse_key
from lmcache_hybrid.storage.record import HEADER_BYTES

DATA, TEMPORARY = ".data", ".tmp"
# LMCache's own header in front of a record: length, memory format, dtype, four dimensions, of
# one group of layers, as this package configures LMCache. A unit test compares it with LMCache's.
WRAPPER = struct.Struct("7i")
WRAPPER_BYTES = WRAPPER.size
# An incomplete record that was changed since may still be in the writing.
WRITING_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class RecordFile:
    """
    Attributes:
        used: seconds since the epoch; engines set the time of a file that they hit.
        taken: its bytes.
    """

    path: str
    used: float
    taken: int

    def depth(self) -> Depth:
        try:
            with open_regular(self.path) as data:
                return depth_of(data.read(WRAPPER_BYTES + HEADER_BYTES)[WRAPPER_BYTES:])
        except OSError:
            return UNREADABLE

    @property
    def writing(self) -> bool:
        """Whether LMCache may be writing it now."""
        young = time.time() - self.used < WRITING_SECONDS
        return young and self.path.endswith(TEMPORARY)


def key_of(name: str, *suffixes: str) -> StoredKey | None:
    """What a file's name says; None where it is none of ours."""
    stem, suffix = os.path.splitext(name)
    return parse_key(stem) if suffix in suffixes else None


def record_files(folder: str) -> Iterator[RecordFile]:
    """List the regular files directly in ``folder`` that have a record's name.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as files:
        for file in files:
            if key_of(file.name, DATA, TEMPORARY) is None:
                continue
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield RecordFile(file.path, status.st_mtime, status.st_size)
