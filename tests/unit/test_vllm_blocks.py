# SPDX-License-Identifier: Apache-2.0
"""Which block holds a state, by vLLM's own KV cache manager, also under speculation.

Speculative decoding gives every request further state blocks, which move along
as it grows. On CPU vLLM does not run it with recurrent layers, so an engine
cannot show that loads and saves still name the right blocks.
"""

import dataclasses

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.scheduler.scheduler import HybridScheduler

from .helpers import OPTIONS, N, Ranks, fill, make_output, make_request

PLAN = GroupPlan(block_size=N, attention=(1,), states=(0,))
PROMPT = 3 * N + 5


def make_manager(drafts: int) -> KVCacheManager:
    state = MambaSpec(
        block_size=N,
        shapes=((4, 8),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )
    full = FullAttentionSpec(block_size=N, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate((state, full))]
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=1024,
        scheduler_block_size=N,
        hash_block_size=N,
        max_in_flight_tokens=1024,
    )


def forward(manager: KVCacheManager, scheduler: HybridScheduler, request, tokens: int, drafts=0):
    """One step as vLLM's scheduler makes it; returns what the connector saves."""
    assert manager.allocate_slots(request, tokens + drafts, num_lookahead_tokens=drafts)
    rid = request.request_id
    offers = manager.take_boundary_state_offloads()
    table = manager.get_blocks(rid).get_block_ids()
    saves = scheduler.build_connector_meta(make_output({rid: tokens}, {rid: table}, offers)).saves
    request.num_computed_tokens += tokens
    return saves


def running_state(manager: KVCacheManager, request) -> int:
    """The block that vLLM's model runner leaves the state in (``preprocess_mamba``)."""
    states = manager.get_blocks(request.request_id).get_block_ids()[0]
    return states[-(-request.num_computed_tokens // N) - 1]


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_the_state_of_a_boundary_is_saved_from_the_running_block(drafts):
    manager, ranks = make_manager(drafts), Ranks(plan=PLAN)
    scheduler = HybridScheduler(PLAN, OPTIONS, N, ranks.queue)
    scheduler.bind(manager.block_pool)
    request = make_request(tokens=PROMPT)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    (save,) = forward(manager, scheduler, request, 3 * N)
    assert save.states == ((3, (running_state(manager, request),)),)
    table = manager.get_blocks("r").get_block_ids()
    assert save.attention == tuple((i, (table[1][i],)) for i in range(3))
    # Decoding past the next boundary, with drafts: vLLM may offer it, nothing is saved.
    assert not forward(manager, scheduler, request, 5)
    for token in range(2 * N):
        request.append_output_token_ids([token])
        assert not forward(manager, scheduler, request, 1, drafts)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_state_is_restored_where_the_next_step_reads_it(drafts):
    manager, ranks = make_manager(drafts), Ranks(plan=PLAN)
    scheduler = HybridScheduler(PLAN, OPTIONS, N, ranks.queue)
    scheduler.bind(manager.block_pool)
    request = make_request(tokens=PROMPT)
    fill(ranks.stores[0], prefix_of(request, N, 1), 3, (3,), PLAN)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (3 * N, True)
    assert manager.allocate_slots(
        request, 0, num_external_computed_tokens=3 * N, delay_cache_blocks=True
    )
    table = manager.get_blocks("r").get_block_ids()
    scheduler.update_state_after_alloc(request, table, 3 * N)
    (load,) = scheduler.build_connector_meta(make_output({}, {})).loads
    assert load.attention_blocks == (tuple(table[1][:3]),)
    assert load.state_blocks == (table[0][2],) and table[0][2] != 0
    assert table[0][:2] == [0, 0]
    # The load has ended: vLLM takes the tokens as computed and goes on from there.
    request.num_computed_tokens = 3 * N
    manager.cache_blocks(request, 3 * N)
    assert running_state(manager, request) == load.state_blocks[0]
    assert manager.allocate_slots(request, 5, num_lookahead_tokens=drafts)
    after = manager.get_blocks("r").get_block_ids()
    assert after[0][2] == load.state_blocks[0], "moved before the step could read it"
    assert after[0][3] not in (0, load.state_blocks[0]), "the step writes over the boundary"
    assert len(set(after[0][2:])) == len(after[0][2:]) == 2 + drafts


@pytest.mark.parametrize("fate", ["stored", "given away", "not scheduled"])
def test_a_state_whose_block_may_be_another_requests_by_now_is_not_stored(fate):
    """Accepted drafts are hashed after their step, and the next pass frees what they passed.

    The other request's attention page lies in that block then, whose hash says as many tokens.
    What comes after is stored all the same.
    """
    manager, ranks = make_manager(drafts=2), Ranks(plan=PLAN)
    options = dataclasses.replace(OPTIONS, save_decode=True)
    scheduler = HybridScheduler(PLAN, options, N, ranks.queue)
    scheduler.bind(manager.block_pool)
    request = make_request(tokens=2 * N + 1)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    forward(manager, scheduler, request, 2 * N + 1)
    request.append_output_token_ids([7])
    while request.num_computed_tokens < 3 * N - 2:
        forward(manager, scheduler, request, 1, drafts=2)
        request.append_output_token_ids([7])
    state = running_state(manager, request)
    assert manager.allocate_slots(request, 3, num_lookahead_tokens=2)
    scheduler.build_connector_meta(
        make_output({"r": 3}, {"r": manager.get_blocks("r").get_block_ids()})
    )
    # Both drafts were right.
    request.num_computed_tokens += 3
    request.append_output_token_ids([7, 7, 7])
    manager.cache_blocks(request, request.num_computed_tokens)
    scheduler.get_num_new_matched_tokens(
        request, request.num_computed_tokens
    )  # takes the new hashes
    assert manager.allocate_slots(request, 3, num_lookahead_tokens=2)
    if fate == "given away":
        other = make_request("other", [9] * 3 * N)
        manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - 6)
        assert manager.allocate_slots(other, 3 * N)
        assert manager.get_blocks("other").get_block_ids()[1][2] == state
    offers = manager.take_boundary_state_offloads()
    assert offers["r"] == [(0, state, 3 * N)]
    table = manager.get_blocks("r").get_block_ids()
    step = make_output(
        {} if fate == "not scheduled" else {"r": 3}, {"r": table}, {"r": offers["r"]}
    )
    saves = scheduler.build_connector_meta(step).saves
    stored = [boundary for save in saves for boundary, _ in save.states]
    assert stored == ([3] if fate == "stored" else [])
    reason = {"given away": {"not_cached": 1}, "not scheduled": {"not_running": 1}}
    assert scheduler.counts.dropped_offers == reason.get(fate, {})
    scheduler.check_integrity()
    assert request.shared_prefix_boundary == 4 * N, "vLLM would hand off no later state"


def test_states_are_stored_only_where_vllms_blocks_are_known():
    manager, ranks = make_manager(drafts=0), Ranks(plan=PLAN)
    scheduler = HybridScheduler(PLAN, OPTIONS, N, ranks.queue)
    request = make_request(tokens=PROMPT)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    (save,) = forward(manager, scheduler, request, 3 * N)
    assert save.states == () and scheduler.counts.dropped_offers == {"not_cached": 1}
    beyond = make_request(tokens=N - 1)
    scheduler.bind(manager.block_pool)
    assert not scheduler.blocks.hold(beyond, (0, 1, N))
    assert not scheduler.blocks.hold(request, (0, 1, 0))


def test_a_block_of_another_group_is_not_taken_for_the_offered_one():
    """All groups share vLLM's blocks; at one boundary hashes differ by the group alone."""
    manager, ranks = make_manager(drafts=0), Ranks(plan=PLAN)
    scheduler = HybridScheduler(PLAN, OPTIONS, N, ranks.queue)
    scheduler.bind(manager.block_pool)
    request = make_request(tokens=PROMPT)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    (save,) = forward(manager, scheduler, request, 3 * N)
    (state,), (page,) = save.states[0][1], save.attention[2][1]
    assert scheduler.blocks.hold(request, (0, state, 3 * N))
    assert scheduler.blocks.hold(request, (1, page, 3 * N))
    assert not scheduler.blocks.hold(request, (0, page, 3 * N))
