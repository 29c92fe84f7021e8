# SPDX-License-Identifier: Apache-2.0
"""What a rank reports of its records, for KV cache events: LMCache's real backends."""

from collections import Counter

import pytest

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey, tags_digest
from lmcache_hybrid.protocol.record_reports import DISK, RAM, REMOTE, RecordName
from lmcache_hybrid.storage import residency as module
from lmcache_hybrid.storage.residency import Residency

from ..helpers import put
from ..store_box import BACKEND, KEYS, MAX_PAYLOAD, SIZE, Box, every_kind, until

TIER = dict.fromkeys(BACKEND, REMOTE) | {"ram": RAM, "disk": DISK}


def name(key: RecordKey) -> RecordName:
    return RecordName(key.group, key.block_hash, tags_digest(key.tags))


NAMES = [name(key) for key in KEYS]


class Told:
    """What a scheduler knows of a rank."""

    def __init__(self) -> None:
        self.residency, self.tiers, self.reports = Residency(0), {}, 0
        self.epoch, self.writing = 0, False

    def step(self, serving: bool = True, unfinished: bool = False) -> bool:
        """One step of the engine; whether the rank reports."""
        report = self.residency.report(serving, unfinished)
        if report is None:
            return False
        if report.epoch != self.epoch:
            self.tiers, self.epoch = {}, report.epoch
        for record, tier in report.changes:
            self.tiers[record] = tier
            if tier is None:
                del self.tiers[record]
        self.writing = report.writing
        return True

    def after(self, tiers: dict) -> None:
        """Steps until the scheduler knows of ``tiers``."""

        def known() -> bool:
            self.step()
            return self.tiers == tiers

        until(known, f"{self.tiers} instead of {tiers}")


@pytest.fixture
def told():
    one = Told()
    yield one
    one.residency.close()


@every_kind
def test_a_record_is_reported_once_it_is_written_and_once_it_is_removed(box, told, kind) -> None:
    one = box(kind, residency=told.residency)
    assert told.step() and told.tiers == {}  # the first report says that there is nothing
    assert not told.step()
    one.write()
    told.after(dict.fromkeys(NAMES, TIER[kind]))
    until(lambda: told.step() or not told.writing, "writes go on")
    assert not told.step()
    one.store.discard(KEYS[1])
    told.after({each: TIER[kind] for each in NAMES if each != NAMES[1]})
    one.write([KEYS[1]])  # anew
    told.after(dict.fromkeys(NAMES, TIER[kind]))


@every_kind
def test_a_damaged_record_is_gone_at_its_load(box, told, kind) -> None:
    one = box(kind, residency=told.residency).write()
    told.after(dict.fromkeys(NAMES, TIER[kind]))
    one.overwrite(KEYS[0], bytes(len(one.raw(KEYS[0]))))
    with pytest.raises(Exception, match="record"):
        one.read()
    told.after(dict.fromkeys(NAMES[1:], TIER[kind]))


FULL_RAM, FULL_DISK = {"max_local_cpu_size": 0.0003}, {"max_local_disk_size": 0.00002}


@pytest.mark.parametrize(
    "kind, policy, size, count",
    [
        *(("ram", policy, FULL_RAM, 90) for policy in ("LRU", "LFU", "FIFO", "MRU")),
        *(("disk", policy, FULL_DISK, 12) for policy in ("LRU", "LFU")),
    ],
)
def test_what_a_full_tier_evicts_is_reported(box, told, kind, policy, size, count) -> None:
    one = box(kind, residency=told.residency, cache_policy=policy, **size)
    keys = [RecordKey(ATTENTION, 3, bytes([i, 7]) * 16, 16) for i in range(count)]
    for key in keys:
        put(one.store, [key], MAX_PAYLOAD)
        if kind == "disk":
            one.settle()
    told.step()
    held = one.store.locate(keys)
    assert 0 < len(held) < len(keys), "nothing was evicted"
    assert told.tiers == {name(key): TIER[kind] for key in held}
    if kind == "ram":
        one.store.manager.local_cpu_backend.clear()
        told.after({})


def test_the_nearest_tier_counts_and_the_next_one_once_that_evicts(box, told) -> None:
    one = box("disk", residency=told.residency, local_cpu=True).write()
    told.after(dict.fromkeys(NAMES, RAM))
    one.store.manager.local_cpu_backend.remove(one.store.engine_key(KEYS[0]))
    told.after({each: DISK if each == NAMES[0] else RAM for each in NAMES})
    one.read()  # brings it back
    told.after(dict.fromkeys(NAMES, RAM))


def test_copies_of_a_damaged_record_stay_announced(box, told) -> None:
    one = box("disk", residency=told.residency, local_cpu=True).write()
    told.after(dict.fromkeys(NAMES, RAM))
    one.store.manager.local_cpu_backend.hot_cache[one.store.engine_key(KEYS[0])].tensor.zero_()
    with pytest.raises(RecordError):
        one.read()
    told.after({each: DISK if each == NAMES[0] else RAM for each in NAMES})
    one.overwrite(KEYS[0], bytes(len(one.raw(KEYS[0]))))
    with pytest.raises(RecordError):
        one.read()
    told.after(dict.fromkeys(NAMES[1:], RAM))


def test_a_write_that_ends_after_its_record_was_evicted_from_ram(box, told) -> None:
    one = box("disk", residency=told.residency, local_cpu=True).write(KEYS[:1])
    told.after({NAMES[0]: RAM})
    key, entry = next(iter(one.backend.dict.items()))
    one.store.manager.local_cpu_backend.remove(key)
    one.backend.remove(key)
    told.after({})
    one.backend._count(entry.size)  # as when its write began
    one.backend._insert(key, entry)
    told.after({NAMES[0]: DISK})
    one.backend.remove(key)


def test_a_restart_reports_what_lies_on_disk(box, told, monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT_EXPECTED", 1)  # of writes; the disk may hold more
    tagged = KEYS[0]._replace(tags=(("user", "a"),))
    box("disk").write([*KEYS, tagged]).close()
    box("disk", residency=told.residency)
    told.step()
    assert told.tiers == dict.fromkeys([*NAMES, name(tagged)], DISK)


def test_a_lookup_tells_what_a_shared_store_has_and_has_lost(box, told) -> None:
    other = box("redis").write()
    one = box("redis", residency=told.residency)
    told.step()
    assert told.tiers == {}  # nobody asked
    one.store.locate(KEYS[:2])
    told.after(dict.fromkeys(NAMES[:2], REMOTE))
    other.remove(KEYS[0])
    one.store.locate(KEYS[:2])
    told.after({NAMES[1]: REMOTE})


def test_a_write_that_a_shared_store_did_not_take_is_not_reported(box, told, monkeypatch) -> None:
    monkeypatch.setattr(module, "CONFIRM_SECONDS", 0.2)
    one = box("redis", residency=told.residency)
    told.step()
    put(one.store, KEYS[:1], SIZE)
    one.settle()
    one.redis.flushall()
    # It may have been confirmed before; a lookup then tells.
    one.store.locate(KEYS[:1])
    told.after({})
    until(lambda: not told.step() and not told.writing, "it is asked for for ever")
    assert told.tiers == {}


def test_no_more_of_a_shared_store_is_kept_in_mind_than_said(box, told, monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT_REMOTE", 2)
    box("redis", residency=told.residency).write(KEYS[:3])
    until(lambda: told.step() is False and not told.writing, "writes go on")
    assert len(told.tiers) == 2


def test_a_reset_starts_a_new_epoch_without_records(box, told) -> None:
    one = box("ram", residency=told.residency).write()
    told.after(dict.fromkeys(NAMES, RAM))
    one.store.clear(1)
    told.residency.clear(1)
    assert told.step() and told.epoch == 1 and told.tiers == {}
    one.write(KEYS[:1])
    told.after({NAMES[0]: RAM})


def test_a_step_without_news_takes_no_lock(box, told) -> None:
    """Most steps have none, and all of them ask."""
    box("ram", residency=told.residency).write()
    told.step()
    with told.residency._lock:
        assert not told.step()


def test_serving_and_writing_are_reported_when_they_change(box, told) -> None:
    box("ram", residency=told.residency)
    said = Counter(told.step(*state) for state in [(True, False)] * 3)
    assert said == {True: 1, False: 2}
    assert told.step(False, False) and not told.step(False, False)
    assert told.step(True, True) and told.writing
    assert told.step(True, False) and not told.writing


def test_only_backends_that_are_read_from_count(box, told) -> None:
    one: Box = box(
        "disk", residency=told.residency, local_cpu=True, retrieve_locations=["LocalDiskBackend"]
    )
    one.write()
    told.after(dict.fromkeys(NAMES, DISK))
