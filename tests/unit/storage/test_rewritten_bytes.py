# SPDX-License-Identifier: Apache-2.0
"""Counts records that are saved although a backend holds them."""

import pytest

from lmcache_hybrid.storage.record_format import record_bytes

from ..helpers import put
from ..store_box import BACKEND, KEYS, SIZE, until

TWO = 2 * record_bytes(SIZE)


@pytest.mark.parametrize("kind", ["ram", "disk", "fs", "redis"])
def test_records_that_were_there_already_are_counted(box, kind):
    one = box(kind).write()
    assert one.store.rewritten_bytes == {}
    one.write(KEYS[:2])
    assert one.store.rewritten_bytes == {BACKEND[kind]: TWO}


def test_each_backend_is_counted_by_itself(box, tmp_path):
    (tmp_path / "disk").mkdir()
    one = box("fs", local_cpu=True, local_disk=str(tmp_path / "disk"), max_local_disk_size=0.01)
    names = [one.store.engine_key(key) for key in KEYS]
    put(one.store, KEYS, SIZE)
    until(
        lambda: all(all(tier.held(names, 1.0)) for tier in one.store.tiers.values()), "not written"
    )
    one.store.tiers["LocalDiskBackend"].remove(names[0])
    put(one.store, KEYS[:2], SIZE)
    counted = {"LocalCPUBackend": TWO, "LocalDiskBackend": TWO // 2, "RemoteBackend": TWO}
    until(lambda: one.store.rewritten_bytes == counted, "they were not counted")


@pytest.mark.parametrize("kind", ["ram", "disk", "fs", "redis"])
def test_a_removed_record_is_new(box, kind):
    one = box(kind).write()
    one.store.discard(KEYS[0])
    one.write(KEYS[:1])
    assert one.store.rewritten_bytes == {}


def test_a_user_of_redis_who_may_not_ask_writes_all_the_same(box, may_only):
    """Each SET follows an EXISTS, whose refusal is not the write's."""
    may_only("set")
    one = box("redis")
    put(one.store, KEYS, SIZE)
    until(lambda: len(one.names()) == len(KEYS), "records were not written")
    assert not one.store.failed_writes
