# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import GroupPlan, Window, is_served, page_bytes, plan_groups

N = 384
SHAPE = dict(block_size=N, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
FULL = FullAttentionSpec(**SHAPE)
MLA = MLAAttentionSpec(**SHAPE)
LATENT = dataclasses.replace(MLA, num_kv_heads=1, max_tp_shards=1)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=128)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=128)
STATE = MambaSpec(block_size=N, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


def config(*specs) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"g{i}.a", f"g{i}.b"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "specs, attention, states",
    [
        ((FULL, STATE), (0,), (1,)),
        ((STATE, STATE, STATE, FULL), (3,), (0, 1, 2)),
        ((STATE, FULL, STATE), (1,), (0, 2)),
        ((STATE, FULL, FULL), (1, 2), (0,)),
        ((MLA, STATE), (0,), (1,)),
    ],
)
def test_plan(specs, attention, states):
    assert plan_groups(config(*specs)) == GroupPlan(N, attention, states)


def replicated(spec) -> tuple[int, ...]:
    return plan_groups(config(STATE, spec, FULL)).replicated


def test_latent_attention_is_equal_on_all_ranks():
    assert replicated(LATENT) == (1,)
    assert replicated(several(LATENT, dataclasses.replace(LATENT, head_size=32))) == (1,)


@pytest.mark.parametrize(
    "spec",
    [
        MLA,  # vLLM does not say
        dataclasses.replace(LATENT, max_tp_shards=2),
        dataclasses.replace(LATENT, num_kv_heads=2),
        # One head of keys on each rank need not be the same one.
        dataclasses.replace(FULL, num_kv_heads=1, max_tp_shards=1),
        FULL,
    ],
)
def test_nothing_else_is_taken_for_equal(spec):
    assert replicated(spec) == ()


def test_a_group_is_equal_where_all_of_its_layers_are():
    assert replicated(several(LATENT, dataclasses.replace(LATENT, max_tp_shards=None))) == ()


def test_refuses_groups_that_drop_blocks():
    with pytest.raises(ConfigError, match=r"group 1 is ChunkedLocalAttentionSpec \(layers g1.a"):
        plan_groups(config(FULL, CHUNKED, STATE))


@pytest.mark.parametrize(
    "window, blocks", [(1, 0), (2, 1), (N, 1), (N + 1, 1), (N + 2, 2), (2 * N + 1, 2), (3 * N, 3)]
)
def test_a_window_needs_the_blocks_that_the_next_token_sees(window, blocks):
    """The token after B sees window - 1 tokens before it."""
    spec = dataclasses.replace(WINDOW, sliding_window=window)
    plan = plan_groups(config(spec, FULL))
    assert plan.windows == (Window(0, blocks),) and plan.attention == (1,) and not plan.states
    assert plan.groups == (1, 0)


def test_refuses_windows_that_keep_more_than_they_see():
    with pytest.raises(ConfigError, match="group 0 is SlidingWindowSpec"):
        plan_groups(config(dataclasses.replace(WINDOW, extra_retained_tokens=1), FULL))


@pytest.mark.parametrize(
    "specs, served",
    [
        ((STATE, FULL), True),
        ((STATE,), True),  # refused with a sentence, not left to an adapter that reads it wrongly
        ((WINDOW, FULL), True),
        ((FULL,), False),
        ((WINDOW,), False),
    ],
)
def test_which_models_are_served_here(specs, served):
    assert is_served(config(*specs)) is served


def test_refuses_an_unknown_kind_of_full_attention():
    """A subclass may share or drop blocks."""

    class Unknown(FullAttentionSpec):
        pass

    with pytest.raises(ConfigError, match="group 0 is Unknown"):
        plan_groups(config(Unknown(**SHAPE), STATE))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_refuses_states_outside_align_mode(mode):
    state = dataclasses.replace(STATE, mamba_cache_mode=mode)
    with pytest.raises(
        ConfigError, match=rf"^mamba_cache_mode='{mode}' .*; remove .* and --mamba-cache-mode, so"
    ):
        plan_groups(config(FULL, state))


@pytest.mark.parametrize("specs", [(STATE,), (STATE, STATE), (FULL,), ()])
def test_refuses_a_model_without_both_kinds(specs):
    with pytest.raises(ConfigError, match="lack attention or state groups; start this model with"):
        plan_groups(config(*specs))


@pytest.mark.parametrize(
    "small, big, common", [(1536, 3072, 3072), (128, 384, 384), (256, 384, 768)]
)
def test_different_block_sizes_meet_at_their_common_multiple(small, big, common):
    """Kimi-K3 on MI355X has the first two."""
    small_full, state = (dataclasses.replace(spec, block_size=small) for spec in (FULL, STATE))
    plan = plan_groups(config(state, dataclasses.replace(FULL, block_size=big), small_full))
    assert (plan.block_size, plan.attention, plan.states) == (common, (1, 2), (0,))
    assert [plan.blocks_in(g) for g in range(3)] == [common // s for s in (small, big, small)]
    assert [plan.blocks_per_record(g) for g in range(3)] == [1, common // big, common // small]
    assert plan.with_unit(64).unit == 0


def test_a_record_has_all_blocks_up_to_its_boundary():
    small = dataclasses.replace(FULL, block_size=N // 3)
    state = dataclasses.replace(STATE, block_size=N // 3)
    plan = plan_groups(config(FULL, small, state))
    ids = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert plan.pages(ids, 1, 1, 3) == ((13, 14, 15), (16, 17, 18))
    assert plan.pages(ids, 0, 1, 3) == (11, 12)
    assert [plan.state_block(ids, 2, at * N) for at in (1, 3, 4)] == [12, 18, 0]
    assert plan.state_block(ids[:8], 2, 3 * N) == 0
    assert plan_groups(config(FULL, STATE)).state_block(ids, 1, 3 * N) == 12


# Decode context parallelism


def test_a_block_of_attention_spans_the_tokens_of_all_ranks_that_share_it():
    plan = plan_groups(config(STATE, FULL, LATENT), dcp=2)
    assert (plan.block_size, plan.state_tokens, plan.dcp) == (2 * N, N, 2)
    assert (plan.attention, plan.states, plan.split) == ((1, 2), (0,), ((0, 2),))
    assert [plan.blocks_per_record(group) for group in range(3)] == [1, 1, 1]
    assert plan.replicated == (), "each rank has other tokens"
    assert plan.pages([10, 11, 12], 1, 1, 3) == (11, 12)


def test_vllm_hits_inside_a_block_that_ranks_share():
    plan = plan_groups(config(FULL, STATE), dcp=2).with_unit(N)
    assert plan.unit == N
    ids = [0, 0, 12, 13]
    assert [plan.state_block(ids, 1, at) for at in (3 * N, 4 * N, 5 * N)] == [12, 13, 0]
    finer = plan.with_unit(N // 4)
    assert finer.unit == N // 4
    assert [finer.state_block(ids, 1, at) for at in (2 * N + 1, 3 * N - 1, 3 * N + 1)] == [
        12,
        12,
        13,
    ]
    # Of blocks that are larger for another reason it does not.
    big = dataclasses.replace(FULL, block_size=2 * N)
    assert plan_groups(config(big, STATE)).with_unit(N).unit == 0
    with pytest.raises(ConfigError, match="blocks of several sizes"):
        plan_groups(config(big, FULL, STATE), dcp=2)


@pytest.mark.parametrize(
    "spec", [WINDOW, CircularBufferSpec(**SHAPE), dataclasses.replace(FULL, dcp_sharded=False)]
)
def test_refuses_groups_that_ranks_do_not_share_like_attention(spec):
    with pytest.raises(
        ConfigError, match=r"^decode_context_parallel_size=2 with .* group 1, .*; set it to 1\.$"
    ):
        plan_groups(config(FULL, spec, STATE), dcp=2)


@pytest.mark.parametrize(
    "specs, small",
    [
        # Of windows vLLM keeps only those blocks that they reach.
        ((FULL, WINDOW), WINDOW),
        ((WINDOW, FULL), STATE),
        # vLLM never makes the blocks of states larger, nor those of some states only.
        ((STATE,), FULL),
        ((STATE, FULL), STATE),
    ],
    ids=["window", "beside a window", "attention", "states"],
)
def test_refuses_other_differences_of_block_sizes(specs, small):
    with pytest.raises(ConfigError, match=r"block sizes \[128, 384\] .*differ; remove"):
        plan_groups(config(*specs, dataclasses.replace(small, block_size=128)))


# Scratch

RING = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [16, N])
def test_scratch_is_left_out_of_records(size):
    """Wherever its group is; the other groups keep their indices."""
    ring = dataclasses.replace(RING, block_size=size)
    assert plan_groups(config(ring, STATE, ring, FULL)) == GroupPlan(N, (3,), (1,))
    several = UniformTypeKVCacheSpecs(
        block_size=size, kv_cache_specs={f"g0.{name}": ring for name in "ab"}
    )
    assert plan_groups(config(several, STATE, FULL)).groups == (2, 1)


def test_vllm_itself_hits_without_scratch():
    """That is why a hit needs nothing of it."""
    served = config(RING, STATE, FULL)
    assert served.prefix_cacheable_group_ids == (1, 2) == plan_groups(served).groups[::-1]
    manager = KVCacheSpecRegistry.get_manager_class(RING)
    hit = manager.find_longest_cache_hit([], N, [0], None, RING, False, N)
    assert hit == (([],), 0)


def test_refuses_scratch_that_vllm_looks_for(monkeypatch):
    monkeypatch.setattr(CircularBufferSpec, "prefix_cacheable", True)
    with pytest.raises(ConfigError, match="group 0 is CircularBufferSpec"):
        plan_groups(config(dataclasses.replace(RING, block_size=N), STATE, FULL))


def test_refuses_an_unknown_kind_of_scratch():
    class Unknown(CircularBufferSpec):
        pass

    with pytest.raises(ConfigError, match="group 0 is Unknown"):
        plan_groups(config(Unknown(**vars(RING)), STATE, FULL))


def test_refuses_scratch_whose_blocks_move_vllms_hits():
    with pytest.raises(ConfigError, match=r"block sizes \[160, 384\] .*differ; remove"):
        plan_groups(config(FULL, STATE, dataclasses.replace(RING, block_size=160)))


def test_scratch_alone_makes_no_model_of_ours():
    assert not is_served(config(RING, FULL))
    with pytest.raises(ConfigError, match="lack attention or state groups"):
        plan_groups(config(RING, STATE))


# Groups of several specs


def several(*specs) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(
        block_size=N, kv_cache_specs={f"g0.{name}": spec for name, spec in zip("ab", specs)}
    )


WIDE_FULL = dataclasses.replace(FULL, num_kv_heads=8)


@pytest.mark.parametrize(
    "specs, plan",
    [
        ((several(FULL, WIDE_FULL), STATE), GroupPlan(N, (0,), (1,))),
        ((several(FULL, MLA), STATE), GroupPlan(N, (0,), (1,))),
        ((several(STATE, STATE), FULL), GroupPlan(N, (1,), (0,))),
        ((several(WINDOW, WINDOW), FULL), GroupPlan(N, (1,), (), (Window(0, 1),))),
    ],
)
def test_layers_of_one_kind_share_a_group(specs, plan):
    """vLLM shows the first spec alone to the scheduler, so both sides must plan the same."""
    assert plan_groups(config(*specs)) == plan and is_served(config(*specs))
    first = [getattr(spec, "first_spec", spec) for spec in specs]
    assert plan_groups(config(*first)) == plan and is_served(config(*first))


def test_page_bytes_count_every_layer():
    groups = config(several(FULL, WIDE_FULL), FULL, STATE).kv_cache_groups
    sizes = [page_bytes(group) for group in groups]
    assert sizes == [5 * FULL.page_size_bytes, 2 * FULL.page_size_bytes, 2 * 128]


def test_a_stage_without_a_layer_of_a_group_plans_as_the_others_do():
    """vLLM keeps the specs of such a group, of all layers where they differ."""
    whole = config(several(FULL, WIDE_FULL), STATE)
    stage = copy.deepcopy(whole)
    for group in stage.kv_cache_groups:
        group.layer_names.clear()
    assert plan_groups(stage) == plan_groups(whole) and is_served(stage)
    assert [page_bytes(group) for group in stage.kv_cache_groups] == [0, 0]
    assert [page_bytes(group, ()) for group in whole.kv_cache_groups] == [0, 0]


@pytest.mark.parametrize(
    "odd, name",
    [
        (several(FULL, RSWASpec(**SHAPE, rswa_window=64)), "FullAttentionSpec and RSWASpec"),
        (several(FULL, WINDOW), "FullAttentionSpec and SlidingWindowSpec"),
        (several(FULL, STATE), "FullAttentionSpec and MambaSpec"),
        # Without a view per layer.
        (HiSparseResidentSpec(block_size=N, page_size=64), "HiSparseResidentSpec"),
        (several(), ""),
    ],
)
def test_refuses_a_group_of_other_kinds(odd, name):
    assert name != "HiSparseResidentSpec" or not odd.has_layer_views
    with pytest.raises(ConfigError, match=rf"^KV cache group 0 is {name} \(layers g0.a and 1 more"):
        plan_groups(config(odd, FULL, STATE))


def test_refuses_one_state_outside_align_mode_among_several():
    other = dataclasses.replace(STATE, mamba_cache_mode="all")
    with pytest.raises(ConfigError, match="^mamba_cache_mode='all' of KV cache group 0 keeps"):
        plan_groups(config(several(STATE, other), FULL))
