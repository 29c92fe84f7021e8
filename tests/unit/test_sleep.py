# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: vLLM frees the KV cache, and at level 2 the weights, and allocates them anew."""

import threading
from unittest.mock import Mock

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.errors import ConfigError, LoadError
from lmcache_hybrid.identity.weights import LOADED, LoadedWeights
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from vllm_patch import sleep
from vllm_patch.connector import LMCacheConnectorV1, hybrid_class
from vllm_patch.loaders import _changing, _count_reloads

from .helpers import make_caches

# One rank


def test_a_sleeping_worker_holds_no_page(worker_rig):
    rig = worker_rig()
    rig.worker.suspend()
    for pages in rig.pages.values():
        with pytest.raises(LoadError, match="sleep"):
            pages.gather(1, torch.empty(pages.block_bytes, dtype=torch.uint8))
        assert pages.rows == [] and pages._host is None


def test_what_arrives_in_a_sleep_is_skipped_and_counted(worker_rig):
    rig = worker_rig().saved()
    records = dict(rig.store.records)
    load = rig.load()
    rig.worker.suspend()
    rig.worker.suspend()
    rig.worker.save(rig.save_metadata("late"))
    results = rig.run(load)
    assert results.failed_recving == results.finished_recving == {"r"}
    counts = rig.worker.counts
    assert counts.skipped_saves == {"asleep": 1} and counts.failed_loads == {"asleep,none": 1}
    assert rig.store.records == records
    rig.assert_clean()


def test_after_the_sleep_all_goes_on_wherever_the_memory_is(worker_rig):
    rig = worker_rig().saved()
    kept = {group: rig.bytes_of(group, 1) for group in rig.plan.attention}
    rig.worker.suspend()
    moved = make_caches(torch.ones_like(rig.buffer), rig.plan)
    rig.buffer.fill_(1)
    rig.worker.resume(moved)
    rig.worker.resume(moved)
    results = rig.run(rig.load())
    assert not results.failed_recving
    assert {group: rig.bytes_of(group, 7) for group in rig.plan.attention} == kept
    assert (rig.buffer == 1).all(), "that is the memory of before"
    rig.saved()
    assert not rig.worker.counts.skipped_saves


def test_a_load_under_way_ends_before_the_memory_is_freed(worker_rig):
    """Its parts that were not begun are left out, and its request is computed."""
    rig = worker_rig(part_bytes=1).saved()
    begun, go_on = threading.Event(), threading.Event()
    scatter = rig.worker.loads._copies.scatter
    copied = []

    def held(items, after):
        begun.set()
        assert go_on.wait(20)
        assert rig.worker.pages[items[0].key.group].rows, "the memory is freed already"
        scatter(items, after)
        copied.append(items)

    rig.worker.loads._copies.scatter = held
    load = rig.load()
    rig.start(load, rig.load("behind"))
    assert begun.wait(20)
    asleep = threading.Thread(target=rig.worker.suspend)
    asleep.start()
    asleep.join(0.2)
    assert asleep.is_alive()
    go_on.set()
    asleep.join(20)
    assert 0 < len(copied) < len(load.pages(rig.plan))
    ended: set[str] = set()
    while len(ended) < 2:
        results = rig.results()
        assert results.failed_recving == results.finished_recving
        ended |= results.failed_recving
    assert rig.worker.counts.failed_loads == {"asleep,none": 1}
    rig.assert_clean()


def test_another_layout_after_the_sleep_ends_loads_and_saves(worker_rig):
    rig = worker_rig().saved()
    rig.worker.suspend()
    other = {name: torch.zeros(12, 7, dtype=torch.int8) for name in rig.caches}
    with pytest.raises(ConfigError, match="layout"):
        rig.worker.resume(other)
    rig.worker.save(rig.save_metadata())
    assert rig.worker.counts.skipped_saves == {"asleep": 1}
    assert rig.run(rig.load()).failed_recving == {"r"}


# What vLLM calls


def connected(rig) -> HybridConnector:
    hybrid = object.__new__(hybrid_class())
    hybrid.worker = rig and rig.worker
    hybrid.kv_caches = hybrid._registered = rig.caches if rig else {}
    return hybrid


@pytest.fixture
def group(worker_rig, monkeypatch):
    """vLLM's connector of this process, serving a hybrid model."""
    connector = connected(worker_rig().saved())
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    return connector


def mapped(connector) -> bool:
    """Whether anything of the KV cache is held."""
    held = [bool(pages.rows) for pages in connector.worker.pages.values()]
    assert len({*held, bool(connector.kv_caches)}) == 1
    return held[0]


class Backend:
    """Frees memory as vLLM's ``CuMemBackend``; here it notes what is held meanwhile."""

    def __init__(self, connector) -> None:
        self.connector, self.held = connector, []

    def suspend(self, level: int) -> None:
        self.held.append(("suspend", mapped(self.connector)))

    def discard(self, tags) -> None:
        self.held.append(("discard", mapped(self.connector)))

    def resume(self, tags) -> None:
        self.held.append(("resume", mapped(self.connector)))


@pytest.fixture
def worker(group, monkeypatch):
    """vLLM's own GPU worker, without a GPU and a model."""

    class Sleeper(Worker):
        sleep, wake_up, discard = Worker.sleep, Worker.wake_up, Worker.discard
        synchronize_device = get_draft_model = lambda self: None

    sleep.follow(Sleeper)
    worker = object.__new__(Sleeper)
    config = type("Config", (), {"enable_nccl_comm_suspend": False})()
    config.sleep_preserve_parameter_names = ()
    worker.vllm_config = type("Config", (), {"model_config": config})()
    worker.model_config = config
    worker.model_runner = type("Runner", (), {"model": torch.nn.Linear(2, 2)})()
    worker._sleep_mode_backend = Backend(group)
    worker._sleep_saved_buffers = {}
    worker._sleep_saved_parameters = {}
    worker._sleep_saved_draft_buffers = {}
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (1, 2))
    monkeypatch.setattr(LOADED, "discarded", False)
    return worker


def test_vllm_lets_this_connector_sleep():
    """vLLM 0.33 asks the class at start-up, beside others in a MultiConnector too."""
    alone = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": [alone]}
    for given in (alone, several):
        config = KVTransferConfig(**given)
        found = KVConnectorFactory.get_connector_class(config)
        supports = getattr(found, "supports_sleep_mode", lambda _: True)
        assert supports(config), found


def test_beside_other_connectors_it_is_told_too(worker, group, monkeypatch):
    several = object.__new__(MultiConnector)
    several._connectors = [group]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", several)
    worker.sleep()
    worker.wake_up()
    assert worker._sleep_mode_backend.held == [("suspend", False), ("resume", False)]
    assert mapped(group)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_the_pages_are_let_go_before_the_memory_is_freed(worker, group, level, tags):
    """By vLLM 0.33 itself, by us on releases before."""
    assert mapped(group)
    worker.sleep(level=level)
    assert not mapped(group)
    worker.wake_up(["weights"])
    assert not mapped(group), "the KV cache is not there yet"
    worker.wake_up(tags=tags)
    assert mapped(group)
    held = [("suspend", False), ("resume", False), ("resume", False)]
    assert worker._sleep_mode_backend.held == held


def test_the_kv_cache_is_let_go_when_it_alone_is_freed(worker, group):
    worker.discard(("weights",))
    assert mapped(group)
    worker.discard(("kv_cache",))
    assert not mapped(group)
    worker.wake_up(["kv_cache"])
    assert mapped(group)
    assert worker._sleep_mode_backend.held[1:] == [("discard", False), ("resume", False)]


def test_others_are_left_alone(worker, monkeypatch):
    """A model that LMCache's own adapter serves, and an engine without a connector."""
    told = []
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.setattr(
            KVConnectorBase_V1, name, lambda self, name=name: told.append(name), raising=False
        )
    dense = object.__new__(LMCacheConnectorV1)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", dense)
    monkeypatch.setattr(Backend, "suspend", lambda *_: None)
    monkeypatch.setattr(Backend, "resume", lambda *_: None)
    worker.sleep()
    worker.wake_up()
    assert told in ([], ["unregister_kv_caches", "restore_kv_caches"])
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    worker.sleep()
    worker.wake_up()


def test_a_rank_without_a_store_sleeps_too(group):
    group.worker = None
    group.unregister_kv_caches()
    assert group.kv_caches == {}
    group.restore_kv_caches()
    assert group.kv_caches is group._registered


def test_a_layout_that_changed_is_logged_and_ends_nothing(group, hybrid_log):
    group.unregister_kv_caches()
    group._registered = {name: torch.zeros(12, 7) for name in group._registered}
    group.restore_kv_caches()
    assert group.worker.loads._asleep
    (error,) = [r.getMessage() for r in hybrid_log.records if r.levelname == "ERROR"]
    assert "restart the engine" in error


@pytest.mark.parametrize("level", [0, 1, 2])
def test_level_0_only_pauses(level):
    """vLLM resets no cache then and tells no worker."""
    core = Mock(**{"pause_scheduler.return_value": None})
    EngineCore.sleep(core, level, "keep")
    core.pause_scheduler.assert_called_once_with(mode="keep", clear_cache=level > 0)
    assert core.model_executor.sleep.called == (level > 0)


# Weights


def test_level_2_leaves_unknown_weights_until_some_are_loaded(worker):
    guard = WeightsGuard(LOADED)
    guard.reset()
    worker.sleep(level=1)
    assert guard.stands(), "level 1 keeps them"
    worker.sleep(level=2)
    assert not guard.stands()
    worker.wake_up()
    assert not guard.stands()
    guard.reset()
    assert not guard.stands(), "a reset brings no weights"
    with pytest.raises(ZeroDivisionError):
        _changing(lambda: 1 / 0)()
    _count_reloads()
    worker.model_runner.get_model = lambda: torch.nn.Linear(2, 2)
    Worker.reset_weights(worker)
    assert not guard.stands(), "zeros"
    _changing(lambda: None)()
    assert guard.stands()


def test_what_was_computed_without_weights_needs_a_reset():
    loaded = LoadedWeights()
    guard = WeightsGuard(loaded)
    guard.reset()
    loaded.discarded = True
    guard.computing()
    loaded.changes, loaded.discarded = loaded.changes + 1, False
    assert not guard.stands()
    guard.reset()
    assert guard.stands()


def test_after_level_2_nothing_is_stored_or_taken_for_loaded(worker_rig, monkeypatch):
    rig = worker_rig()
    monkeypatch.setattr(LOADED, "discarded", False)
    hybrid = connected(rig)
    hybrid._guard = WeightsGuard(LOADED)
    LOADED.discarded = True
    hybrid._metadata = rig.save_metadata()
    hybrid.wait_for_save()
    assert not rig.store.records
    rig.saved()
    hybrid.bind_connector_metadata(ConnectorMetadata(loads=(rig.load(),), idle=True))
    results = hybrid.get_transfer_results(set())
    while not results.finished_recving:
        results = hybrid.get_transfer_results(set())
    assert results.failed_recving == {"r"}
