# SPDX-License-Identifier: Apache-2.0
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.record_format import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    HEADER_BYTES,
    check,
    chunks_of,
    digests_of,
    open_record,
    payload_bytes,
    read_header,
    record_bytes,
    seal,
)

FINGERPRINT = bytes(range(16))
KEY = RecordKey(STATE, 3, b"h" * 32, 768, (("user", "a"),))
USED = record_format._FIELDS.size + record_format._CHECKSUM.size  # header bytes that mean something

names = st.text(st.characters(codec="utf-8"), max_size=8)
keys = st.builds(
    RecordKey,
    st.sampled_from([ATTENTION, STATE]),
    st.integers(0, 255),
    st.binary(min_size=1, max_size=64),
    st.integers(0, 2**40),
    st.lists(st.tuples(names, names), max_size=3).map(tuple),
)


def sealed(
    payload: bytes = b"payload!", key: RecordKey = KEY, fingerprint: bytes = FINGERPRINT
) -> bytearray:
    data = bytearray(b"\xff" * record_bytes(len(payload)))
    data[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    seal(memoryview(data), key, fingerprint, digests_of(memoryview(payload)))
    return data


def verify(data: memoryview, key: RecordKey, fingerprint: bytes) -> bytes:
    """Open a record and check its payload, as a load does."""
    digests = open_record(data, key, fingerprint)
    payload = data[HEADER_BYTES : HEADER_BYTES + payload_bytes(len(data))]
    for number, chunk in enumerate(chunks_of(payload)):
        check(chunk, digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
    return bytes(payload)


def reason_of(data: bytes, key: RecordKey = KEY, fingerprint: bytes = FINGERPRINT) -> str:
    with pytest.raises(RecordError) as error:
        verify(memoryview(data), key, fingerprint)
    return error.value.reason


def resealed_header(data: bytearray, offset: int, new: bytes) -> bytearray:
    """``data`` with other header bytes and a header checksum that fits them."""
    data[offset : offset + len(new)] = new
    fields = bytes(data[: record_format._FIELDS.size])
    struct.pack_into("<Q", data, record_format._FIELDS.size, xxhash.xxh3_64_intdigest(fields))
    return data


@given(keys, st.binary(max_size=300), st.binary(min_size=16, max_size=16))
def test_a_sealed_record_reads_back_as_it_was(key, payload, fingerprint):
    data = sealed(payload, key, fingerprint)
    assert bytes(verify(memoryview(data), key, fingerprint)) == payload
    header = read_header(data)
    assert (header.kind, header.group, header.boundary) == (key.kind, key.group, key.boundary)
    assert header.length == len(payload)
    assert header.fingerprint == fingerprint


@given(keys, keys)
def test_a_record_verifies_under_its_own_key_only(one, other):
    data = sealed(key=one)
    if one == other:
        verify(memoryview(data), other, FINGERPRINT)
    else:
        assert reason_of(data, other) == "key"


@pytest.mark.parametrize(
    "change",
    [
        {"group": 2},
        {"kind": ATTENTION},
        {"boundary": 1152},
        {"block_hash": b"i" * 32},
        {"block_hash": b"h" * 33},
        {"block_hash": b"h" * 31},
        {"tags": ()},
        {"tags": (("user", "b"),)},
        {"tags": (("user", "a"), ("x", ""))},
    ],
    ids=str,
)
def test_refuses_the_record_of_another_key(change):
    assert reason_of(sealed(), KEY._replace(**change)) == "key"


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_refuses_less_than_a_header(length):
    assert reason_of(sealed()[:length]) == "short"


def test_refuses_other_magic():
    assert reason_of(b"X" + sealed()[1:]) == "magic"
    assert reason_of(bytes(400)) == "magic"


def test_refuses_another_version():
    assert (
        reason_of(resealed_header(sealed(), 8, struct.pack("<H", record_format.VERSION + 1)))
        == "version"
    )


def test_refuses_a_damaged_header():
    data = sealed()
    data[12] ^= 1
    assert reason_of(data) == "header"


def test_refuses_another_fingerprint():
    assert reason_of(sealed(), fingerprint=bytes(16)) == "fingerprint"


@pytest.mark.parametrize(
    "edit", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:HEADER_BYTES]]
)
def test_refuses_another_length(edit):
    assert reason_of(edit(sealed())) == "length"


def test_refuses_a_damaged_payload():
    for at in (-1, HEADER_BYTES, HEADER_BYTES + 7):  # a digest, the payload
        data = sealed()
        data[at] ^= 0x80
        assert reason_of(data) == "checksum"


def test_refuses_a_payload_with_swapped_halves():
    """A checksum that does not depend on positions would let it pass."""
    data = sealed(b"aaaabbbb")
    data[HEADER_BYTES : HEADER_BYTES + 8] = b"bbbbaaaa"
    assert reason_of(data) == "checksum"


def test_refuses_swapped_chunks_with_their_digests():
    """Each would fit its digest; the header knows their order."""
    one, two = b"a" * CHUNK_BYTES, b"b" * CHUNK_BYTES
    data, other = sealed(one + two), sealed(two + one)
    other[:HEADER_BYTES] = data[:HEADER_BYTES]
    assert reason_of(other) == "checksum"


@given(st.integers(0, 5 * CHUNK_BYTES))
def test_a_payloads_size_follows_from_its_records(size):
    assert payload_bytes(record_bytes(size)) == size
    assert record_bytes(size) - HEADER_BYTES - size == len(digests_of(memoryview(bytes(size))))


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_chunks(size):
    payload = bytes(i % 251 for i in range(size))
    data = sealed(payload)
    assert verify(memoryview(data), KEY, FINGERPRINT) == payload
    data[HEADER_BYTES + size - 1] ^= 1
    assert reason_of(data) == "checksum"


def test_every_flipped_bit_is_found():
    """Except in the header's padding, which means nothing: there the payload stays right."""
    data = sealed()
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        if USED <= bit // 8 < HEADER_BYTES:
            assert bytes(verify(memoryview(broken), KEY, FINGERPRINT)) == b"payload!"
        else:
            reason_of(broken)


@given(st.binary(max_size=400))
def test_foreign_bytes_are_never_a_record(data):
    reason_of(data)


def test_sealing_twice_writes_the_same_bytes():
    """Ranks and restarts compare by bytes; nothing of time or process may get in."""
    assert sealed() == sealed()


@pytest.mark.parametrize(
    "key, label",
    [(RecordKey(ATTENTION, 3, b"", 0), "a3"), (RecordKey(STATE, 0, b"", 0), "s0")],
)
def test_a_label_names_kind_group_and_boundary(key, label):
    assert key.label == label


@pytest.mark.parametrize("missing", [-DIGEST_BYTES, DIGEST_BYTES])
def test_nothing_is_sealed_with_digests_of_another_payload(missing):
    """Nor where asserts are off (python -O)."""
    data = bytearray(record_bytes(8))
    before, digests = bytes(data), bytes(DIGEST_BYTES - missing)
    with pytest.raises(ValueError, match="do not fit a payload"):
        seal(memoryview(data), KEY, FINGERPRINT, digests)
    assert data == before
