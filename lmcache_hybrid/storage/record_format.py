# SPDX-License-Identifier: Apache-2.0
"""Writes and checks records: header, pages of one block of one group, and their digests.

Each chunk of bytes has its own digest, so it is copied and digested, or checked and copied, while
it lies in a core's cache: memory is read once.

A record proves that its bytes are the right ones: not those of another key, model, layout, rank or
request, not cut off or damaged. That holds against damage and mix-ups; with a keyed digester also
against others who write to the store, see :mod:`lmcache_hybrid.core.digests`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from lmcache_hybrid.core.digests import (
    DIGEST_BYTES,
    KEY_ID_BYTES,
    PLAIN,
    SEAL_BYTES,
    UNSEALED,
    Chunk,
    Digester,
)
from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import RecordKey, tags_digest, wide_hash

VERSION = 3
MAGIC = b"LMCHYBRD"
# magic, version, kind, group, boundary, payload length, fingerprint, block hash,
# tags digest, digest of the digests; then 8 bytes of header checksum, and the seal.
_FIELDS = struct.Struct("<8sHBBQQ16s32s16s16s")
_CHECKSUM = struct.Struct("<Q")
# Whole cache lines, so that the payload stays aligned.
HEADER_BYTES = 192
_SEAL = _FIELDS.size + _CHECKSUM.size
assert _SEAL + SEAL_BYTES <= HEADER_BYTES

# Bytes of a chunk: it and its copy fit into a core's L2 cache.
CHUNK_BYTES = 512 << 10


def _header(key: RecordKey, fingerprint: bytes, length: int, checksum: bytes) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        key.kind,
        key.group,
        key.boundary,
        length,
        fingerprint,
        wide_hash(key.block_hash),
        tags_digest(key.tags),
        checksum,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def record_bytes(payload: int) -> int:
    """Return the bytes of a record with ``payload`` bytes of pages."""
    return HEADER_BYTES + payload + DIGEST_BYTES * -(-payload // CHUNK_BYTES)


def payload_bytes(record: int) -> int:
    """Invert :func:`record_bytes`; at most 0 for a size that is too small for a record."""
    rest = record - HEADER_BYTES
    return rest - DIGEST_BYTES * -(-rest // (CHUNK_BYTES + DIGEST_BYTES))


def chunks_of(payload: memoryview) -> Iterator[memoryview]:
    return (payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES))


def digests_of(payload: memoryview, digester: Digester = PLAIN) -> bytes:
    return b"".join(map(digester.chunk, chunks_of(payload)))


def check(chunk: Chunk, expected: bytes, digester: Digester = PLAIN) -> None:
    """Raise RecordError unless these bytes of the payload have the digest ``expected``."""
    if digester.chunk(chunk) != expected:
        raise RecordError("checksum", f"{len(chunk)} bytes of the payload are damaged")


def seal(
    record: memoryview,
    key: RecordKey,
    fingerprint: bytes,
    digests: bytes,
    digester: Digester = PLAIN,
) -> None:
    """Write header and digests around a payload that is in place. Mutates ``record``.

    Args:
        record: writable, ``record_bytes`` of the payload.
        key: of the payload.
        fingerprint: 16 bytes naming model, layout and rank.
        digests: of the payload's chunks, by ``digester``.

    Raises:
        ValueError: too many or too few digests; ``record`` is as it was.
    """
    length = payload_bytes(len(record))
    if len(record) != HEADER_BYTES + length + len(digests):
        raise ValueError(f"{len(digests)} bytes of digests do not fit a payload of {length} bytes")
    header = _header(key, fingerprint, length, digester.digests(digests))
    header += digester.seal(header)
    record[: len(header)] = header
    record[len(header) : HEADER_BYTES] = bytes(HEADER_BYTES - len(header))
    record[HEADER_BYTES + length :] = digests


def open_record(
    record: memoryview, key: RecordKey, fingerprint: bytes, digester: Digester = PLAIN
) -> bytes:
    """Check all but the payload.

    Returns:
        The digests to check the payload with, see :func:`check`.

    Raises:
        RecordError: the bytes are not the record of ``key`` under ``fingerprint``.
    """
    stored = read_header(record)
    if stored.fingerprint != fingerprint:
        raise RecordError("fingerprint", "written by another model, layout or rank")
    if len(record) != record_bytes(stored.length):
        raise RecordError("length", f"{len(record)} bytes for a payload of {stored.length}")
    expected = _FIELDS.unpack_from(_header(key, fingerprint, stored.length, stored.checksum))
    if expected != stored.fields:
        raise RecordError("key", "holds another block, boundary or request")
    check_seal(record, digester)
    digests = bytes(record[HEADER_BYTES + stored.length :])
    check_digests(digests, stored, digester)
    return digests


def check_seal(head: bytes | memoryview, digester: Digester) -> None:
    """Raise RecordError unless this header was sealed with the digester's key."""
    if not digester.opens(bytes(head[:_SEAL]), bytes(head[_SEAL : _SEAL + SEAL_BYTES])):
        raise RecordError("seal", "not written with this engine's key (lmcache.hybrid_key_file)")


def check_digests(digests: bytes, header: "Header", digester: Digester = PLAIN) -> None:
    """Raise RecordError unless these are the digests that belong to ``header``."""
    if digester.digests(digests) != header.checksum:
        raise RecordError("checksum", f"the digests of {header.length} bytes are damaged")


@dataclass(frozen=True, slots=True)
class Header:
    """A header whose checksum is right; seal and payload are not checked yet."""

    fields: tuple
    kind: int
    group: int
    boundary: int
    length: int
    fingerprint: bytes
    block_hash: bytes
    tags: bytes
    checksum: bytes
    seal: bytes = UNSEALED

    @property
    def key_id(self) -> bytes:
        """Id of the key that sealed the record; zeros without one."""
        return self.seal[:KEY_ID_BYTES]

    @property
    def label(self) -> str:
        """As :attr:`RecordKey.label`; with the number for an unknown kind."""
        return f"{'as'[self.kind] if self.kind < 2 else self.kind}{self.group}"


def read_header(data: bytes | memoryview) -> Header:
    """Parse the first HEADER_BYTES of a record.

    Raises:
        RecordError: not a header of this version.
    """
    if len(data) < HEADER_BYTES:
        raise RecordError("short", f"{len(data)} bytes, no room for a header")
    fields = _FIELDS.unpack_from(data)
    magic, version, *meaning = fields
    if magic != MAGIC:
        raise RecordError("magic", "not a record of this program")
    if version != VERSION:
        raise RecordError("version", f"record version {version}, this is {VERSION}")
    if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(
        bytes(data[: _FIELDS.size])
    ):
        raise RecordError("header", "header is damaged")
    meaning.append(bytes(data[_SEAL : _SEAL + SEAL_BYTES]))
    return Header(fields, *meaning)
