# SPDX-License-Identifier: Apache-2.0
"""Lists and describes the record files of ``fs://``, named and laid out as LMCache does."""

import errno
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.storage.disk.files import open_regular
from lmcache_hybrid.storage.folder.least_used import UNREADABLE, Depth, depth_of
from lmcache_hybrid.storage.key_names import StoredKey, parse_key
from lmcache_hybrid.storage.record_format import HEADER_BYTES

DATA, TEMPORARY = ".data", ".tmp"
# LMCache's header in front of a record: length, memory format, dtype, four dimensions; for one
# group of layers, as this package configures LMCache. A unit test compares it with LMCache's.
WRAPPER = struct.Struct("7i")
WRAPPER_BYTES = WRAPPER.size
_KV_2LTD, _UINT8 = 1, 6
# Prefix of files being written, followed by host, process and number. LMCache's own connector
# writes to the record's name with TEMPORARY instead of DATA.
WRITING = ".lmcache-hybrid-writing-"
# A temporary file changed within this time may still be in flight.
WRITING_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A record's file.

    Attributes:
        used: seconds since the epoch; engines set the time of a file that they hit.
        taken: its bytes.
        foreign: another user's, which the folder's sticky bit protects from this one.
    """

    path: str
    used: float
    taken: int
    foreign: bool = False

    def depth(self) -> Depth:
        try:
            with open_regular(self.path) as data:
                return depth_of(data.read(WRAPPER_BYTES + HEADER_BYTES)[WRAPPER_BYTES:])
        except OSError:
            return UNREADABLE

    @property
    def writing(self) -> bool:
        """Whether an engine may be writing it now."""
        young = time.time() - self.used < WRITING_SECONDS
        return young and self.path.endswith(TEMPORARY)

    @property
    def unfinished(self) -> bool:
        """Whether an engine ended while it wrote it."""
        return self.path.endswith(TEMPORARY) and not self.writing


def temporary_prefix() -> str:
    """Make the part before the number in temporary names, for one writer of this process."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())
    return f"{WRITING}{host[:64]}-{os.getpid()}-{os.urandom(4).hex()}-"


def is_temporary(name: str) -> bool:
    """Whether a file name is that of a record being written."""
    return name.startswith(WRITING) and name.endswith(TEMPORARY)


def wrapper_of(size: int) -> bytes:
    """Make LMCache's header for a record of ``size`` bytes.

    Raises:
        OSError: the size does not fit LMCache's header.
    """
    try:
        return WRAPPER.pack(size, _KV_2LTD, _UINT8, 1, 1, 1, size)
    except struct.error:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG)) from None


def check_wrapper(wrapper: bytes, size: int) -> None:
    """Raise RecordError unless LMCache would read a record of ``size`` bytes with this header."""
    if len(wrapper) != WRAPPER_BYTES:
        raise RecordError("wrapper", f"LMCache's header has {len(wrapper)} bytes")
    length, memory_format, dtype, *shape = WRAPPER.unpack(wrapper)
    if (memory_format, dtype) != (_KV_2LTD, _UINT8):
        raise RecordError("wrapper", "LMCache's header names another format")
    if not length == math.prod(shape) == size or min(shape) < 1:
        raise RecordError("wrapper", f"LMCache's header says {length} bytes, there are {size}")


def key_of(name: str, *suffixes: str) -> StoredKey | None:
    """Parse a file name; None if it is not of a record."""
    stem, suffix = os.path.splitext(name)
    return parse_key(stem) if suffix in suffixes else None


def record_files(folder: str, *suffixes: str) -> Iterator[RecordFile]:
    """List the regular files directly in ``folder`` that have a record's or a temporary name.

    Args:
        suffixes: of the names, DATA and TEMPORARY by default.

    Raises:
        OSError: the folder cannot be read.
    """
    here = os.stat(folder)
    deletes_all = not here.st_mode & stat.S_ISVTX or os.geteuid() in (0, here.st_uid)
    with os.scandir(folder) as files:
        for file in files:
            wanted = suffixes or (DATA, TEMPORARY)
            if key_of(file.name, *wanted) is None and not is_temporary(file.name):
                continue
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                foreign = not deletes_all and status.st_uid != os.geteuid()
                yield RecordFile(file.path, status.st_mtime, status.st_size, foreign)
