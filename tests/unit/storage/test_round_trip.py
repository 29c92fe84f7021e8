# SPDX-License-Identifier: Apache-2.0
"""Records come back bit for bit from every backend, under keys of their own."""

import pytest
import torch
from lmcache.utils import CacheEngineKey

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.tools.sizing import storage as sizing

from ..helpers import payload_of
from ..store_box import BACKEND, KEYS, MAX_PAYLOAD, SIZE, N, every_kind


@every_kind
def test_records_come_back_bit_for_bit(box, kind):
    box = box(kind).write()
    assert box.store.locate(KEYS) == dict.fromkeys(KEYS, BACKEND[kind])
    for key, payload in zip(KEYS, box.read()):
        assert torch.equal(payload, payload_of(key, SIZE))
    box.assert_pool_is_free()


@every_kind
@pytest.mark.parametrize("size", [1, 63, MAX_PAYLOAD])
def test_records_of_any_size_up_to_the_largest_come_back(box, kind, size):
    box = box(kind).write(KEYS[:1], size)
    (payload,) = box.read(KEYS[:1])
    assert torch.equal(payload, payload_of(KEYS[0], size))
    box.assert_pool_is_free()


@pytest.mark.parametrize("kind", sizing.BACKENDS)
def test_a_record_takes_what_plan_counts(box, kind):
    box, record = box(kind).write(KEYS[:1], MAX_PAYLOAD), record_bytes(MAX_PAYLOAD)
    counted = sizing.BACKENDS[kind].stored(record)
    if kind == "ram":
        assert counted == box.used() - box.start
    elif kind == "redis":
        name = box.store.engine_key(KEYS[0]).to_string()
        # This server's allocator is libc's, which rounds up less than jemalloc.
        assert record < box.redis.memory_usage(name + "kv_bytes") <= counted
    else:
        size = box.path(KEYS[0]).stat().st_size
        assert size == record + box.metadata_bytes <= counted < size + sizing.PAGE
        assert box.metadata_bytes in (0, sizing.METADATA_BYTES)


@every_kind
def test_fetch_gives_the_records_in_the_order_asked_for(box, kind):
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(KEYS))
    some = [KEYS[2], KEYS[0]]
    for key, payload in zip(some, box.fetch(claim, some), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


@every_kind
def test_locate_names_each_record_that_is_there(box, kind):
    box = box(kind).write([KEYS[0], KEYS[1], KEYS[3]])
    assert list(box.store.locate(KEYS)) == [*KEYS[:2], KEYS[3]]
    assert box.store.locate([KEYS[2]]) == {}
    assert list(box.store.locate([KEYS[3], KEYS[0]])) == [KEYS[3], KEYS[0]]
    assert box.store.locate([]) == {}


def test_a_prefix_may_lie_in_several_backends(box):
    box = box("disk", local_cpu=True).write()
    ram = box.manager.local_cpu_backend
    for key in KEYS[2:]:
        ram.remove(box.store.engine_key(key))
    located = box.store.locate(KEYS)
    assert list(located.values()) == ["LocalCPUBackend"] * 2 + ["LocalDiskBackend"] * 2
    box.write(KEYS[2:])  # to RAM; its first ones are evicted
    for key in KEYS[:2]:
        ram.remove(box.store.engine_key(key))
    located = box.store.locate(KEYS)
    assert list(located.values()) == ["LocalDiskBackend"] * 2 + ["LocalCPUBackend"] * 2
    for key, payload in zip(KEYS, box.read()):
        assert torch.equal(payload, payload_of(key, SIZE))


@every_kind
def test_writing_again_changes_nothing(box, kind):
    """A second request may store the same blocks."""
    box = box(kind).write().write()
    assert torch.equal(box.read()[3], payload_of(KEYS[3], SIZE))
    box.assert_pool_is_free()


@pytest.mark.parametrize(
    "other", [{"rank": 1}, {"fingerprint": bytes(16)}, {"model": "other"}], ids=str
)
@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_a_shared_store_keeps_ranks_layouts_and_models_apart(box, kind, other):
    box(kind).write()
    assert box(kind, **other).store.locate(KEYS[:1]) == {}
    again = box(kind)
    assert torch.equal(again.read()[0], payload_of(KEYS[0], SIZE))


@pytest.mark.parametrize(
    "tags", [(), (("user", "a"),), (("user", "a"), ("team", "b c")), (("u", ""),)], ids=str
)
def test_keys_survive_being_written_down(box, tags):
    store = box("ram").store
    key = store.engine_key(RecordKey(STATE, 2, b"\xff" * 32, 16, tags))
    assert CacheEngineKey.from_string(key.to_string()) == key


def test_different_records_have_different_keys(box):
    one, other = box("ram").store, box("ram", fingerprint=bytes(16)).store
    base = RecordKey(STATE, 0, b"a" * 32, N)
    keys = [
        base,
        RecordKey(ATTENTION, 0, b"a" * 32, N),
        RecordKey(STATE, 1, b"a" * 32, N),
        RecordKey(STATE, 0, b"b" * 32, N),
        RecordKey(STATE, 0, b"a" * 32, N, (("user", "a"),)),
        RecordKey(STATE, 0, b"a" * 32, N, (("user", "b"),)),
    ]
    names = {one.engine_key(key).to_string() for key in keys}
    names.add(other.engine_key(base).to_string())
    assert len(names) == len(keys) + 1


@every_kind
def test_two_hashes_with_one_key_are_told_apart_by_the_record(box, kind):
    """LMCache's key has 64 bits of the hash, the record all of it."""
    box = box(kind).write(KEYS[:1])
    twin = RecordKey(ATTENTION, 3, KEYS[0].block_hash[:8] + b"x" * 24, N)
    assert box.store.engine_key(twin) == box.store.engine_key(KEYS[0])
    with pytest.raises(RecordError, match="^key"):
        box.read([twin])
    box.assert_pool_is_free()


@every_kind
@pytest.mark.parametrize(
    "tags",
    [
        (("hybrid", "a0-0123456789abcdef"),),
        (("of", "x"),),
        (("team", "t" * 4000),),
        (("a/b", "c/d"),),
    ],
    ids=["ours", "ours too", "long", "slashes"],
)
def test_no_tag_of_a_client_changes_what_our_own_tags_say(box, kind, tags):
    """Groups keep keys of their own, and names stay short enough for a file."""
    keys = [key._replace(tags=tags) for key in KEYS]
    box = box(kind).write(keys)
    names = {box.store.engine_key(key).to_string() for key in (*keys, *KEYS)}
    assert len(names) == 2 * len(KEYS) and max(map(len, names)) < 200
    assert box.store.locate(KEYS) == {}
    box.read(keys)
    box.assert_pool_is_free()
