# SPDX-License-Identifier: Apache-2.0
"""Ways to spread a model over ranks: refused ones, pipeline stages, data-parallel folders."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
import zmq
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import interface

from lmcache_hybrid import connector
from lmcache_hybrid.config.folders import settle_disk_folder
from lmcache_hybrid.config.parallel import check_parallelism, local_ranks, why_no_decode_saves
from lmcache_hybrid.core.errors import ConfigError, LoadError
from lmcache_hybrid.core.groups import BESIDE_KEY
from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.storage.service_factory import HybridServiceFactory
from lmcache_hybrid.worker.pages import GroupPages

from .helpers import STATE_SPEC, engine_config
from .lmcache_settings import assert_one_sentence, lmcache_config
from .test_vllm_patch import FULL, cache_config

N, BLOCKS = 8, 4


def refused(
    model_runner_v2: bool = False, drafts: bool = False, beside: bool = False, **sizes: int | str
) -> str:
    one = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    parallel = SimpleNamespace(**{**one, "distributed_executor_backend": "mp", **sizes})
    transfer = KVTransferConfig(
        kv_connector="LMCacheConnectorV1",
        kv_role="kv_both",
        kv_connector_extra_config={BESIDE_KEY: beside},
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        speculative_config=SimpleNamespace(method="ngram") if drafts else None,
        use_v2_model_runner=model_runner_v2,
    )
    try:
        check_parallelism(config)
    except ConfigError as error:
        assert_one_sentence(str(error))
        return str(error)
    return ""


def test_stages_and_shards_are_served():
    assert not refused(pipeline_parallel_size=4)
    assert not refused(pipeline_parallel_size=4, tensor_parallel_size=2, nnodes_within_dp=1)
    assert not refused(pipeline_parallel_size=4, tensor_parallel_size=2, nnodes_within_dp=2)
    check_parallelism(engine_config("qwen3_next"))


@pytest.mark.parametrize(
    "stages, drafts, hybrid", [(1, True, True), (2, False, True), (2, True, False), (2, True, True)]
)
def test_states_of_generated_tokens_that_stages_write_at_different_steps_are_refused(
    stages, drafts, hybrid
):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=SimpleNamespace(method="ngram") if drafts else None,
        model_config=SimpleNamespace(is_hybrid=hybrid),
    )
    why = why_no_decode_saves(config)
    assert bool(why) == (stages > 1 and drafts and hybrid)
    if why:
        assert_one_sentence(why)


@pytest.mark.parametrize("beside, ranks", [(1, 2), (4, 8)])
def test_engines_of_data_parallelism_on_this_machine_count(beside, ranks):
    parallel = SimpleNamespace(local_world_size=2, data_parallel_size_local=beside)
    assert local_ranks(SimpleNamespace(parallel_config=parallel)) == ranks


def test_prompts_that_are_split_over_ranks_are_refused():
    message = refused(prefill_context_parallel_size=2)
    assert message.startswith("prefill_context_parallel_size=2 ")
    assert "a state needs all tokens" in message and "--tensor-parallel-size" in message
    assert not refused(prefill_context_parallel_size=1)


def test_blocks_that_ranks_share_are_served_without_a_drafter():
    assert not refused(decode_context_parallel_size=2, tensor_parallel_size=4)
    message = refused(decode_context_parallel_size=2, drafts=True)
    assert message.startswith("decode_context_parallel_size=2 with --speculative-config ")
    assert not refused(decode_context_parallel_size=1, drafts=True)


@pytest.mark.parametrize(
    "setting, reason, fix",
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2", "behind a router"),
        ({"distributed_executor_backend": "external_launcher"}, "=external_launcher", "backend mp"),
        ({"beside": True}, "one connector's handshake", "use LMCacheConnectorV1 alone"),
    ],
)
def test_hosts_whose_ranks_cannot_be_asked_are_refused(setting, reason, fix):
    message = refused(nnodes_within_dp=2, **setting)
    assert message.startswith("nnodes=2 ") and reason in message and fix in message
    assert not refused(nnodes_within_dp=1, **setting)


def test_hosts_are_refused_where_lookups_cannot_be_encrypted(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    assert "install pyzmq from its wheel" in refused(nnodes_within_dp=2)
    assert not refused(nnodes_within_dp=1)


def test_drafts_and_stages_are_refused_where_only_the_last_stage_saves():
    message = refused(pipeline_parallel_size=2, drafts=True)
    assert "pipeline_parallel_size=2" in message and "remove one of the two" in message
    assert not refused(pipeline_parallel_size=2, drafts=True, model_runner_v2=True)
    assert not refused(drafts=True)


def test_each_data_parallel_engine_has_a_folder_of_its_own(tmp_path):
    def folder(engine: int) -> str | None:
        config = lmcache_config(local_disk=f"{tmp_path}/a, {tmp_path}/b")
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
        settle_disk_folder(config, SimpleNamespace(data_parallel_index=engine))
        settle_disk_folder(config, SimpleNamespace(data_parallel_index=engine))  # the other role
        return config.local_disk

    assert folder(0) == f"{tmp_path}/a, {tmp_path}/b"
    assert folder(2) == f"{tmp_path}/a/dp2,{tmp_path}/b/dp2"
    assert os.listdir(tmp_path / "b") == ["dp2"]
    config = lmcache_config()
    settle_disk_folder(config, SimpleNamespace(data_parallel_index=1))
    assert config.local_disk is None


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Start the worker side of a rank, without LMCache's engine and the lookup's socket."""
    lmcache = lmcache_config(local_disk=str(tmp_path), max_local_disk_size=1.0)
    monkeypatch.setattr(connector, "load_lmcache_config", lambda *_, **__: lmcache)
    monkeypatch.setattr(connector, "LookupServer", lambda config: None)
    monkeypatch.setattr(connector.HybridConnector, "_start_lmcache", lambda *args: None)
    for name in ("rank", "ranks", "stages"):
        monkeypatch.setattr(ADAPTERS, name, 1)

    def start(**parallel: int) -> str:
        config = copy.copy(engine_config("lfm2"))
        config.parallel_config = copy.copy(config.parallel_config)
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        connector.HybridConnector(config, KVConnectorRole.WORKER, cache_config(FULL, STATE_SPEC))
        return lmcache.local_disk

    return start


def test_a_worker_knows_its_place(worker, tmp_path):
    folder = worker(
        pipeline_parallel_size=2, world_size=4, rank=3, data_parallel_index=1, data_parallel_size=1
    )
    assert folder == f"{tmp_path}/dp1"
    assert (ADAPTERS.rank, ADAPTERS.ranks, ADAPTERS.stages) == (3, 4, 2)
    with pytest.raises(ConfigError, match="prefill_context_parallel_size=2"):
        worker(prefill_context_parallel_size=2)


def test_lmcache_counts_a_layer_on_a_stage_without_attention():
    config = engine_config("lfm2")
    factory = HybridServiceFactory(lmcache_config(chunk_size=N), config, "worker", FULL, 0)
    assert factory.get_or_create_metadata().kv_shape == (1, 2, N, 2, 64)


def test_lmcache_finds_its_rank_in_a_data_parallel_engine(monkeypatch):
    """On CPU vLLM numbers devices within one data-parallel engine, and LMCache across all."""
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", [1])
    config = copy.copy(engine_config("lfm2"))
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.data_parallel_rank_local = 1
    factory = HybridServiceFactory(lmcache_config(chunk_size=N), config, "worker", FULL, 1)
    metadata = factory.get_or_create_metadata()
    assert (metadata.worker_id, metadata.world_size, metadata.role) == (0, 1, "worker")


def test_a_stage_without_a_layer_of_a_group_has_empty_records():
    pages = GroupPages([], {}, BLOCKS)
    assert pages.block_bytes == 0 and pages.layout == () and pages.num_blocks == BLOCKS
    nothing = torch.empty(0, dtype=torch.uint8)
    assert pages.gather(1, nothing) == b""
    pages.scatter(1, nothing, b"")
    pages.check_payload(nothing, b"")
    assert pages.pieces(1, nothing) == []
    with pytest.raises(ValueError, match="block 0 of 4"):
        pages.gather(0, nothing)
    pages.unmap()
    with pytest.raises(LoadError, match="vLLM has freed"):
        pages.scatter(1, nothing, b"")
    pages.map({})
    pages.scatter(1, nothing, b"")
