# SPDX-License-Identifier: Apache-2.0
"""Bytes that are not the record asked for are removed and never loaded."""

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.storage.key_names import VALUE
from lmcache_hybrid.storage.record_format import HEADER_BYTES, record_bytes
from lmcache_hybrid.storage.tiers.remote import RemoteTier
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
    flip,
    outside,
    until,
)

RemoteMetadata = take("v1.protocol", "RemoteMetadata")
RAM, DISK, REDIS = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"


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
    with pytest.raises((LoadError, RecordError)) as caught:
        box.read(KEYS)
    assert caught.value.reason == ("wrapper" if kind == "fs" else "unreadable")
    assert list(box.store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]
    box.assert_pool_is_free()
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))


class Tiers:
    """A store over RAM, disk and Redis; all of them hold ``KEYS``."""

    def __init__(self, box, valkey) -> None:
        self.client = valkey.client()
        self.box = box("disk", local_cpu=True, remote_url=f"redis://localhost:{valkey.port}")
        self.store, self.ram = self.box.store, self.box.manager.local_cpu_backend
        self.write()

    def write(self) -> None:
        self.client.flushall()
        self.box.write()
        until(lambda: self.client.dbsize() == len(KEYS), "Redis was not written")

    def forget(self, *tiers: str) -> None:
        """Evict KEYS[1] from RAM, from the disk."""
        engine_key = self.store.engine_key(KEYS[1])
        if RAM in tiers:
            self.ram.remove(engine_key)
        if DISK in tiers:
            self.box.backend.remove(engine_key)

    def damage(self, tier: str, at: int = HEADER_BYTES) -> None:
        """Flip a bit of one copy of KEYS[1]."""
        engine_key = self.store.engine_key(KEYS[1])
        if tier == RAM:
            self.ram.hot_cache[engine_key].tensor.view(-1)[at] ^= 1
        elif tier == DISK:
            self.box.overwrite(KEYS[1], flip(at)(self.box.raw(KEYS[1])))
        else:
            name = engine_key.to_string() + VALUE
            self.client.set(name, flip(at)(self.client.get(name)))

    def fails(self) -> None:
        with pytest.raises(RecordError):
            self.box.read()

    def serves(self) -> None:
        assert torch.equal(self.box.read()[1], payload_of(KEYS[1], SIZE))

    @property
    def place(self) -> str | None:
        """Where KEYS[1] is found; the others are in RAM."""
        located = self.store.locate(KEYS)
        assert {located[key] for key in KEYS if key != KEYS[1]} == {RAM}
        return located.get(KEYS[1])


@pytest.fixture
def tiers(box, valkey):
    return Tiers(box, valkey)


@pytest.mark.parametrize("at", [20, HEADER_BYTES], ids=["header", "payload"])
@pytest.mark.parametrize(
    "nearer, tier, next_one",
    [((), RAM, DISK), ((RAM,), DISK, REDIS), ((RAM, DISK), REDIS, None)],
)
def test_only_the_copy_that_was_read_is_removed(tiers, nearer, tier, next_one, at):
    """Other engines read what is in Redis; a bad disk says nothing of it."""
    tiers.forget(*nearer)
    tiers.damage(tier, at)
    tiers.fails()
    assert tiers.place == next_one
    assert tiers.client.dbsize() == len(KEYS) - (tier == REDIS)
    if next_one:
        tiers.serves()
        assert tiers.place == RAM, "it was not kept there"


def test_a_record_that_is_damaged_everywhere_fails_once_for_each_copy(tiers):
    for tier in (RAM, DISK, REDIS):
        tiers.damage(tier)
    for tier in (RAM, DISK, REDIS):
        assert tiers.place == tier
        tiers.fails()
    assert tiers.place is None and tiers.client.dbsize() == len(KEYS) - 1
    tiers.write()
    for tier, nearer in ((RAM, ()), (DISK, (RAM,)), (REDIS, (RAM, DISK))):
        tiers.forget(*nearer)
        assert tiers.place == tier
        tiers.serves()


def test_a_damaged_record_that_cannot_be_deleted_is_hidden_in_its_store_only(tiers, monkeypatch):
    def fails(*args) -> None:
        raise OSError("of the test")

    monkeypatch.setattr(RemoteTier, "remove", fails)
    engine_key = tiers.store.engine_key(KEYS[1])
    memory = tiers.ram.hot_cache[engine_key]
    memory.ref_count_up()
    tiers.forget(RAM, DISK)
    tiers.damage(REDIS)
    tiers.fails()
    assert tiers.place is None, "promised again and again"
    tiers.ram.submit_put_task(engine_key, memory)
    memory.ref_count_down()
    assert tiers.place == RAM
    tiers.serves()
    tiers.forget(RAM)
    tiers.write()
    tiers.forget(RAM, DISK)
    until(lambda: tiers.place == REDIS, "it stays hidden")
    tiers.serves()
