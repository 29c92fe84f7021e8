# SPDX-License-Identifier: Apache-2.0
"""Modes of vLLM in which stored bytes would be wrong, or the engine would end or hang."""

from contextlib import nullcontext

import pytest

from lmcache_hybrid import scheduler_side
from vllm_patch import configuration, unsound

from .helpers import OPTIONS, PLAN, engine_config
from .lmcache_settings import lmcache_config


def test_a_pooling_model_without_prefixes_is_told_so():
    """Nobody turned them off: vLLM does by default."""
    config = engine_config("qwen3_next")
    config.cache_config.enable_prefix_caching = False
    config.model_config.runner_type = "pooling"
    with pytest.raises(ValueError, match="this pooling model, .* remove --kv-transfer"):
        configuration._settle(config)


@pytest.mark.parametrize(
    "parallel, sentence",
    [
        ({"enable_fault_tolerance": True}, "enable_fault_tolerance=True .*; remove --enable-fault"),
        (
            {"all2all_backend": "nixl_ep", "data_parallel_size": 2},
            "all2all_backend='nixl_ep' .*; choose another --all2all-backend",
        ),
        ({"all2all_backend": "nixl_ep"}, None),
        (
            {"distributed_executor_backend": "external_launcher", "world_size": 2},
            "'external_launcher' .* lookups .*; use 'mp' or 'ray'",
        ),
        ({"distributed_executor_backend": "external_launcher"}, None),
    ],
)
def test_what_makes_blocks_or_schedules_differ_is_refused(parallel, sentence, monkeypatch):
    """What a failed step left in its blocks would be stored, and served to every engine."""
    monkeypatch.delenv("RANK", raising=False)
    config = engine_config("qwen3_next")
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        configuration._settle(config)


def test_a_rank_that_torchrun_started_is_refused(monkeypatch):
    """It names itself by its number among all, and its scheduler asks the first one."""
    config = engine_config("qwen3_next")
    config.parallel_config.distributed_executor_backend = "external_launcher"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="external_launcher"):
        configuration._settle(config)


@pytest.mark.parametrize("caps", [False, True])
def test_experts_of_each_token_are_not_returned_for_hits(caps, monkeypatch):
    """vLLM 0.32 ends at the first hit; 0.33 computes where it has no experts."""
    monkeypatch.setattr(unsound, "_caps_hits", lambda: caps)
    config = engine_config("qwen3_next")
    config.aux_output_config.enable_return_routed_experts = True
    with nullcontext() if caps else pytest.raises(ValueError, match="; remove --enable-return-r"):
        configuration._settle(config)


@pytest.mark.parametrize("returned", [False, True])
def test_it_says_that_experts_of_other_engines_are_unknown(returned, hybrid_log):
    config = engine_config("lfm2")
    config.aux_output_config.enable_return_routed_experts = returned
    scheduler_side._warn(config, PLAN, lmcache_config(), OPTIONS)
    assert ("Remove --enable-return-routed-experts" in hybrid_log.text) == returned
