# SPDX-License-Identifier: Apache-2.0
"""A claim pins what it found, all or nothing, until its release."""

import pytest
import torch

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.upstream.lmcache_home import take

from ..helpers import payload_of, put
from ..store_box import KEYS, MAX_PAYLOAD, SIZE, until

PinMonitor = take("v1.pin_monitor", "PinMonitor")


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_pins_end_with_their_claims(box, kind):
    box = box(kind).write()
    claims = [box.store.claim(box.store.locate(KEYS)) for _ in range(2)]
    assert [box.pins(key) for key in KEYS] == [2] * 4
    for left in (1, 0):
        claim = claims.pop()
        claim.release()
        claim.release()
        assert [box.pins(key) for key in KEYS] == [left] * 4


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_claim_is_all_or_nothing(box, kind):
    box = box(kind).write()
    located = box.store.locate(KEYS)
    box.store.discard(KEYS[2])
    assert box.store.claim(located) is None
    assert [box.pins(key) for key in (KEYS[0], KEYS[1], KEYS[3])] == [0] * 3


def test_claimed_records_are_not_evicted(box):
    box = box("ram").write()
    claim = box.store.claim(box.store.locate(KEYS[:2]))
    box.manager.clear()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    assert list(box.store.locate(KEYS)) == KEYS[:2]
    for buffer in held:
        buffer.release()
    for key, payload in zip(KEYS, box.fetch(claim, KEYS[:2])):
        assert torch.equal(payload, payload_of(key, SIZE))
    box.assert_pool_is_free()


def test_a_damaged_record_loses_its_pins(box):
    box = box("ram").write()
    first = box.store.claim(box.store.locate(KEYS))
    second = box.store.claim(box.store.locate(KEYS))
    box.overwrite(KEYS[1], bytes(SIZE))
    with pytest.raises(RecordError):
        box.fetch(first, KEYS)
    second.release()
    box.write([KEYS[1]])
    assert [box.pins(key) for key in KEYS] == [0] * 4
    box.assert_pool_is_free()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_claim_unpins_what_it_pinned_and_not_what_came_after_it(box, kind):
    box = box(kind).write()
    old = box.store.claim(box.store.locate(KEYS))
    box.store.discard(KEYS[1])
    box.write([KEYS[1]])
    new = box.store.claim(box.store.locate(KEYS))
    old.release()
    assert [box.pins(key) for key in KEYS] == [1] * 4
    new.release()
    assert [box.pins(key) for key in KEYS] == [0] * 4
    box.assert_pool_is_free()


def test_a_claim_outlives_the_time_that_lmcache_gives_a_pin(box):
    """LMCache's pin monitor takes all pins of a record away, whoever holds them."""
    box = box("ram").write()
    old = box.store.claim(box.store.locate(KEYS))
    record = box.backend.hot_cache[box.store.engine_key(KEYS[1])]
    record.pin()  # somebody else's, so that the monitor knows of the record
    PinMonitor.GetOrCreate()._force_unpin_timeout_object(record, 1e9)
    new = box.store.claim(box.store.locate(KEYS))
    old.release()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    for buffer in held:
        buffer.release()
    for key, payload in zip(KEYS, box.fetch(new, KEYS)):
        assert torch.equal(payload, payload_of(key, SIZE))
    box.assert_pool_is_free()


@pytest.mark.parametrize("beside", [False, True], ids=["before", "in the middle"])
def test_what_a_load_read_before_a_reset_is_not_kept_after_it(box, monkeypatch, beside):
    """It says the name of before: promised to the next request, it would fail that one's load."""
    one = box("redis", local_cpu=True)
    put(one.store, KEYS, SIZE)
    until(lambda: one.redis.dbsize() == len(KEYS), "nothing was written")
    one.manager.clear()
    claim = one.store.claim(one.store.locate(KEYS))
    buffers = one.store.fetch(claim, KEYS)
    if beside:  # another thread's, as keep takes its first name
        name, resets = one.store.engine_key, iter([lambda: one.store.clear(1)])
        monkeypatch.setattr(
            one.store, "engine_key", lambda key: (next(resets, int)(), name(key))[1]
        )
    else:
        one.store.clear(1)
    one.store.keep(claim, zip(KEYS, buffers, strict=True))
    for buffer in buffers:
        buffer.release()
    claim.release()
    assert one.store.locate(KEYS) == {}
