# SPDX-License-Identifier: Apache-2.0
"""LMCache's switches and a reset: clear, freeze, health, locations."""

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.storage.remote.record_connector import unwrapped
from lmcache_hybrid.upstream.lmcache_home import take

from ..helpers import put
from ..store_box import DEADLINE, KEYS, SIZE, every_kind, until

HealthMonitor = take("v1.health_monitor.base", "HealthMonitor")


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


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_a_store_that_was_switched_off_comes_back(box, kind, hybrid_log):
    """LMCache switches it on again once its own check has written and read a value there."""
    box = box(kind, local_cpu=True)
    put(box.store, KEYS, SIZE)
    writing = unwrapped(box.backend.connection)
    until(lambda: len(box.names()) == len(KEYS) and not writing.writing, "not written")
    extra = box.backend.config.extra_config or {}
    box.backend.config.extra_config = {**extra, "waiting_time_for_recovery": 0}
    monitor = HealthMonitor(SimpleNamespace(lmcache_engine=box.engine, config=box.engine.config))
    box.engine.set_health_monitor(monitor)
    before, used, failed = box.names(), box.used(), dict(box.store.failed_writes)
    missing = box.store.engine_key(KEYS[0]._replace(block_hash=b"m" * 32))
    for _ in range(10):
        assert box.backend.get_blocking(missing) is None
    hybrid_log.clear()
    monitor._execute()
    assert not box.store.readable() and not box.store.writable()
    monitor._execute()
    assert box.store.readable() and box.store.writable()
    ours = [each.getMessage() for each in hybrid_log.records if each.name.startswith("vllm")]
    assert ours == [], "nobody else has written to the store"
    until(lambda: box.names() == before, "the check's value stays in the store")
    until(lambda: box.used() == used, "the check's memory stays taken")
    assert box.store.failed_writes == failed
    for tier in ("LocalCPUBackend", "RemoteBackend"):
        assert set(box.store.locate(KEYS).values()) == {tier}
        box.read()
        box.manager.clear(["LocalCPUBackend"])


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_a_connector_that_cannot_start_all_threads_leaves_none(box, kind, monkeypatch):
    """LMCache's health monitor makes it anew, again and again."""
    before = set(threading.enumerate())
    box, start = box(kind), threading.Thread.start
    threads = [t for t in set(threading.enumerate()) - before if f"hybrid-{kind}" in t.name]
    close = box.backend.connection.close()
    asyncio.run_coroutine_threadsafe(close, box.manager.loop).result(DEADLINE)
    for most in range(len(threads)):
        begun: list[threading.Thread] = []

        def start_some(thread, most=most, begun=begun):
            if thread.name.startswith("hybrid-"):
                if len(begun) == most:
                    raise RuntimeError("can't start new thread")
                begun.append(thread)
            start(thread)

        box.backend.connection, box.backend.failure_time = None, -math.inf
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_some)
            box.backend.init_connection()
        assert box.backend.connection is None and len(begun) == most
        until(lambda begun=begun: not any(t.is_alive() for t in begun), "threads are left")
    box.backend.failure_time = -math.inf
    box.backend.init_connection()
    box.write()
    box.read()


def test_store_location_is_kept(box):
    box = box("disk", local_cpu=True, store_location="LocalCPUBackend")
    put(box.store, KEYS, SIZE)
    assert set(box.store.locate(KEYS).values()) == {"LocalCPUBackend"}
    assert not box.backend.dict and not box.backend.put_tasks


def test_retrieve_locations_are_kept(box):
    box = box("disk", local_cpu=True, retrieve_locations=["LocalDiskBackend"]).write()
    assert set(box.store.locate(KEYS).values()) == {"LocalDiskBackend"}
