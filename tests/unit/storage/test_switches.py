# SPDX-License-Identifier: Apache-2.0
"""LMCache's switches and a reset: clear, freeze, health, locations."""

import math

import pytest

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.upstream.lmcache_home import take

from ..helpers import put
from ..store_box import KEYS, SIZE, every_kind


@every_kind
def test_clear_forgets_everything(box, kind):
    """Weights that were replaced in place must not meet what the old ones left anywhere."""
    box = box(kind).write()
    box.store.clear(1)
    assert box.store.locate(KEYS) == {}
    box.assert_pool_is_free()
    box.write()
    box.read()
    box.assert_pool_is_free()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_clear_forgets_what_is_pinned(box, kind):
    """A request that waits with a claim gets nothing that was stored before."""
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.store.clear(1)
    assert box.store.locate(KEYS) == {}
    with pytest.raises(LoadError, match="gone"):
        box.store.fetch(claim, KEYS)
    claim.release()
    box.write()
    box.read()
    box.manager.clear()  # what nobody can find any more is evicted like the rest
    box.assert_pool_is_free()


def test_a_read_under_way_brings_nothing_back(box):
    box = box("disk", local_cpu=True).write()
    box.manager.clear(["LocalCPUBackend"])
    claim = box.store.claim(box.store.locate(KEYS))
    buffers = box.store.fetch(claim, KEYS)
    box.store.clear(1)
    box.store.keep(claim, zip(KEYS, buffers, strict=True))
    assert box.store.locate(KEYS) == {}
    claim.made = math.inf  # a reset that comes while they are kept
    box.store.keep(claim, zip(KEYS, buffers, strict=True))
    for buffer in buffers:
        buffer.release()
    claim.release()
    claim = box.store.claim(box.store.locate(KEYS))
    assert set(claim.located.values()) == {"LocalCPUBackend"}
    with pytest.raises(RecordError, match="fingerprint"):
        box.store.fetch(claim, KEYS)
    claim.release()


def test_a_frozen_engine_is_not_written_to(box):
    box = box("ram").write()
    assert box.store.writable() and box.store.readable()
    box.engine.freeze(True)
    assert not box.store.writable() and box.store.readable()


def test_an_unhealthy_engine_is_neither_read_nor_written(box):
    box = box("ram").write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.engine.mark_init_failed("test")
    assert not box.store.writable() and not box.store.readable()
    with pytest.raises(LoadError, match="unhealthy"):
        box.fetch(claim, KEYS)


def test_lmcaches_health_monitor_waits_as_long_as_the_docs_say():
    """Ten failed reads within 30 seconds switch a remote store off for five minutes."""
    names = "GET_BLOCKING_FAILED_THRESHOLD", "PING_INTERVAL", "WAITING_TIME_FOR_RECOVERY"
    found = [take("v1.health_monitor.constants", f"DEFAULT_{name}") for name in names]
    assert found == [10, 30, 300]


def test_store_location_is_kept(box):
    box = box("disk", local_cpu=True, store_location="LocalCPUBackend")
    put(box.store, KEYS, SIZE)
    assert set(box.store.locate(KEYS).values()) == {"LocalCPUBackend"}
    assert not box.backend.dict and not box.backend.disk_worker.put_tasks


def test_retrieve_locations_are_kept(box):
    box = box("disk", local_cpu=True, retrieve_locations=["LocalDiskBackend"]).write()
    assert set(box.store.locate(KEYS).values()) == {"LocalDiskBackend"}
