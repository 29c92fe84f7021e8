# SPDX-License-Identifier: Apache-2.0
"""Weights that are written into a running model."""

import functools

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.worker.gpu_worker import Worker

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.identity.weights import LOADED, LoadedWeights
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.storage.weights_guard import GuardedLookup, WeightsGuard

from .toy_weights import Toy, configured, tensors, write_safetensors


def test_every_way_into_a_loaded_model_counts(granite, model_folder):
    write_safetensors(model_folder, tensors())
    config, toy = configured(granite, model_folder), Toy()
    loader = get_model_loader(config.load_config)
    loader.create_model = lambda **_: toy
    with set_current_vllm_config(config):
        loader.load_model(vllm_config=config, model_config=config.model_config)
        guard = WeightsGuard()
        guard.computing()
        assert guard.stands()
        loader.load_weights(toy, config.model_config)
    assert not guard.stands()
    guard.reset()
    guard.computing()
    assert guard.stands()
    toy.load_weights(iter(tensors().items()))
    assert not guard.stands() and torch.equal(toy.norm, tensors()["norm"])
    for write in (
        Worker.reload_weights,
        Worker.reset_weights,
        functools.partial(Worker.update_weights, update_info={}),
        Worker.finish_weight_update,
    ):
        guard.reset()
        guard.computing()
        with pytest.raises(AttributeError):
            write(None)
        assert not guard.stands()


def test_weights_that_change_before_anything_is_computed_do_not_matter():
    """As after sleep(level=2), which resets all caches: weights are reloaded when it wakes."""
    loaded = LoadedWeights()
    guard = WeightsGuard(loaded)
    loaded.changes += 1
    assert not guard.stands()  # before the first reset the store is shared with others
    guard.reset()
    loaded.changes += 1
    assert guard.stands()
    guard.computing()
    assert guard.stands()
    loaded.changes += 1
    assert not guard.stands()


def test_each_change_is_warned_of_once(hybrid_log):
    loaded = LoadedWeights()
    guard = WeightsGuard(loaded)
    for number in (1, 2):
        guard.computing()
        loaded.changes += 1
        assert not guard.stands() and not guard.stands()
        assert hybrid_log.text.count("Weights were written into the running model") == number
        guard.reset()
    for number in (1, 2):
        loaded.discarded = True
        assert not guard.stands() and not guard.stands()
        assert hybrid_log.text.count("vLLM slept at level 2") == number
        loaded.discarded = False
        assert guard.stands()


def connected(rig) -> HybridConnector:
    connector = object.__new__(HybridConnector)
    connector.worker, connector._guard = rig.worker, WeightsGuard()
    return connector


def test_after_a_change_nothing_is_stored_until_a_reset(worker_rig):
    rig = worker_rig()
    connector = connected(rig)
    connector._metadata = rig.save_metadata()
    LOADED.changes += 1
    connector.wait_for_save()
    assert not rig.store.records
    connector._reset(0)
    connector.wait_for_save()
    assert rig.store.records


def test_a_step_under_way_when_the_reset_comes_is_not_stored(worker_rig, monkeypatch):
    """Of new weights, by the name of the old ones, where other engines would find it."""
    rig = worker_rig()
    connector, reset = connected(rig), rig.worker.reset
    connector._metadata = rig.save_metadata()
    LOADED.changes += 1

    def step_ends_first(epoch):
        connector.wait_for_save()
        assert not rig.store.records
        reset(epoch)

    monkeypatch.setattr(rig.worker, "reset", step_ends_first)
    connector._reset(1)
    assert connector._guard.stands()


def test_after_a_change_nothing_is_looked_up_and_loads_fail(worker_rig):
    rig = worker_rig().saved()
    connector, load = connected(rig), rig.load()
    connector.bind_connector_metadata(ConnectorMetadata(loads=(load,), idle=True))
    LOADED.changes += 1
    ended = connector.get_transfer_results(set())
    while not ended.finished_recving:
        ended = connector.get_transfer_results(set())
    assert ended.failed_recving == {"r"}
    rig.load("next")
    lookup = GuardedLookup(rig.lookup, connector._guard)
    question = LookupRequest("next", load.prefix, load.boundary, load.start, number=99)
    assert lookup.answer(question) == UNAVAILABLE
    rig.assert_clean()
    connector._guard.reset()
    assert lookup.answer(question).boundary == load.boundary
