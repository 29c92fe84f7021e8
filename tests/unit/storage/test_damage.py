# SPDX-License-Identifier: Apache-2.0
"""Bytes that are not the record asked for are removed and never loaded."""

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.storage.record import record_bytes
from lmcache_hybrid.upstream.lmcache_home import take

from ..helpers import payload_of
from ..store_box import (
    KEYS,
    MAX_PAYLOAD,
    OTHER_LENGTH,
    SAME_LENGTH,
    SIZE,
    assert_damage_is_found,
    every_kind,
    outside,
)

RemoteMetadata = take("v1.protocol", "RemoteMetadata")


@every_kind
@pytest.mark.parametrize("batch", [KEYS, KEYS[1:2]], ids=["several", "one"])
def test_a_record_that_went_away_after_the_claim_fails_its_load(box, kind, batch):
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(batch))
    box.remove(KEYS[1])
    with pytest.raises((LoadError, RecordError)):
        box.fetch(claim, batch)
    assert box.store.locate([KEYS[1]]) == {}
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))
    box.assert_pool_is_free()


@every_kind
@pytest.mark.parametrize("damage", SAME_LENGTH)
def test_damaged_bytes_are_no_record(box, kind, damage):
    assert_damage_is_found(box(kind), SAME_LENGTH[damage], KEYS)


@outside
def test_a_damaged_record_fails_the_load_of_one_engine_only(box, kind):
    first = box(kind).write()
    first.overwrite(KEYS[1], SAME_LENGTH["header bit"](first.raw(KEYS[1])))
    with pytest.raises(RecordError):
        first.read()
    first.close()
    assert list(box(kind).store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]


@outside
@pytest.mark.parametrize("damage", OTHER_LENGTH)
@pytest.mark.parametrize("batch", [KEYS, KEYS[1:2]], ids=["several", "one"])
def test_cut_values_are_no_record(box, kind, damage, batch):
    assert_damage_is_found(box(kind), OTHER_LENGTH[damage], batch)


@every_kind
def test_another_records_bytes_are_no_record(box, kind):
    box = box(kind)
    box.write()
    other = box.raw(KEYS[0])
    assert_damage_is_found(box, lambda data: other, KEYS)


def remote_metadata(size: int) -> bytes:
    shape = torch.Size([1, 1, 1, size])
    return RemoteMetadata(size, [shape], [torch.uint8], MemoryFormat.KV_2LTD).serialize()


@pytest.mark.parametrize("kind", ["fs", "redis"])
@pytest.mark.parametrize("size", [record_bytes(MAX_PAYLOAD) + 1, 2**31 - 1])
def test_a_damaged_size_does_not_ask_for_memory(box, kind, size):
    """LMCache would evict all it holds, and then wait for memory for ever."""
    box = box(kind).write()
    if kind == "fs":
        old = box.path(KEYS[1]).read_bytes()
        box.path(KEYS[1]).write_bytes(remote_metadata(size) + old[box.metadata_bytes :])
    else:
        name = box.store.engine_key(KEYS[1]).to_string()
        box.redis.set(name + "kv_bytes", bytes(min(size, 1 << 26)))
    with pytest.raises(LoadError):
        box.read(KEYS)
    box.assert_pool_is_free()
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))
