# SPDX-License-Identifier: Apache-2.0
"""Checks that a stored record is what its name claims: by its header, or by all of its bytes."""

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO

from lmcache_hybrid.core.digests import DIGEST_BYTES, PLAIN, UNSEALED, Digester
from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.storage.folder.least_used import Depth, depth_of
from lmcache_hybrid.storage.folder.record_files import WRITING_SECONDS, check_wrapper
from lmcache_hybrid.storage.key_names import StoredKey
from lmcache_hybrid.storage.record_format import (
    CHUNK_BYTES,
    HEADER_BYTES,
    Header,
    check_digests,
    check_seal,
    read_header,
    record_bytes,
)
from lmcache_hybrid.tools.stored.record_store import Entry, RecordStore


class Status(StrEnum):
    """How an engine would treat a record."""

    GOOD = "good"
    DAMAGED = "damaged"
    OTHER_VERSION = "other version"
    UNFINISHED = "unfinished"
    GONE = "gone"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """
    Attributes:
        header: of a good record; None otherwise.
        reason: why it is not good, else empty.
    """

    entry: Entry
    status: Status
    header: Header | None = None
    reason: str = ""

    # Deletable, for least_used().

    @property
    def used(self) -> float:
        return time.time() - (self.entry.age or 0.0)

    @property
    def taken(self) -> int:
        return self.entry.taken

    def depth(self) -> Depth:
        return depth_of(self.entry.head)


def judge(entry: Entry) -> AuditResult:
    """Judge a record by name, sizes and headers only; its payload is not read."""
    if entry.missing is not None:
        return _incomplete(entry, entry.missing)
    try:
        header = read_header(entry.head)
        if entry.size != record_bytes(header.length):
            raise RecordError("length", f"{entry.size} bytes for a payload of {header.length}")
        if entry.wrapper is not None:
            check_wrapper(entry.wrapper, entry.size)
        _check_name(entry.key, header)
    except RecordError as error:
        if error.reason == "version":
            return AuditResult(entry, Status.OTHER_VERSION, None, str(error))
        if error.reason in ("short", "length") and entry.in_place:
            return _incomplete(entry, str(error))
        return AuditResult(entry, Status.DAMAGED, None, str(error))
    return AuditResult(entry, Status.GOOD, header)


def verify(store: RecordStore, entry: Entry, digester: Digester = PLAIN) -> AuditResult:
    """Judge a record by every byte.

    Args:
        digester: of the key that records must be sealed with. A record with another key, or
            none, is UNREADABLE: other engines may have written it.

    Raises:
        StoreError: the store is away.
    """
    verdict = judge(entry)
    if verdict.header is None:
        return verdict
    try:
        with store.open(entry) as data:
            header = _check_payload(data, entry.key, digester)
    except FileNotFoundError:
        return AuditResult(entry, Status.GONE)
    except OSError as error:
        # The disk may be broken, or the file server away: no reason to delete it.
        return AuditResult(entry, Status.UNREADABLE, None, f"cannot be read: {error.strerror}")
    except _OtherKey as error:
        return AuditResult(entry, Status.UNREADABLE, None, str(error))
    except RecordError as error:
        return AuditResult(entry, Status.DAMAGED, None, str(error))
    return AuditResult(entry, Status.GOOD, header)


class _OtherKey(Exception):
    """Sealed with a key that is not available, so it cannot be judged."""


def _incomplete(entry: Entry, reason: str) -> AuditResult:
    young = entry.age is None or entry.age < WRITING_SECONDS
    return AuditResult(entry, Status.UNFINISHED if young else Status.DAMAGED, None, reason)


def _check_name(key: StoredKey, header: Header) -> None:
    """Raise if a record is under another one's name, which is a miss for an engine."""
    if header.label != key.label:
        raise RecordError("name", f"holds {header.label} under the name of {key.label}")
    if header.fingerprint[:8].hex() != key.fingerprint:
        raise RecordError("name", "holds bytes of another model, layout or rank")
    # A hash other than SHA-256 is stored as twice its digest, so the name cannot be checked.
    half = len(header.block_hash) // 2
    widened = header.block_hash[:half] == header.block_hash[half:]
    if not widened and int.from_bytes(header.block_hash[:8], "big") != key.block_hash:
        raise RecordError("name", "holds another block")
    if header.tags != key.tags:
        raise RecordError("name", "holds another request's block")


def _check_payload(data: BinaryIO, key: StoredKey, digester: Digester) -> Header:
    """Check a record from its first byte to its last, a chunk at a time."""
    head = data.read(HEADER_BYTES)
    header = read_header(head)
    _check_name(key, header)
    if header.seal == UNSEALED:
        if digester.key_id:
            raise _OtherKey("not sealed: written by an engine without a key, or not by an engine")
    elif header.key_id != digester.key_id:
        raise _OtherKey(f"sealed with the key {header.key_id.hex()}; name its file in --key-file")
    check_seal(head, digester)
    digests = bytearray()
    for start in range(0, header.length, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, header.length - start)
        chunk = data.read(wanted)
        if len(chunk) < wanted:
            raise RecordError("length", f"ends within a payload of {header.length} bytes")
        digests += digester.chunk(chunk)
    stored = data.read(len(digests) + 1)
    if len(stored) != len(digests):
        raise RecordError("length", f"does not end after the digests of {header.length} bytes")
    check_digests(stored, header, digester)
    if stored != digests:
        first = next(at for at, (a, b) in enumerate(zip(stored, digests)) if a != b)
        raise RecordError("checksum", f"chunk {first // DIGEST_BYTES} of the payload is damaged")
    return header
