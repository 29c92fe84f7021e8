# SPDX-License-Identifier: Apache-2.0
"""The repairs of vLLM, and that they leave engines without this connector alone."""

import dataclasses
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

import vllm_patch
from vllm_patch import cpu, partial_hits, scheduler_repairs

from .helpers import STATE_SPEC, engine_config

vllm_patch.register()


def block_size_after(check, blocks: int | None) -> int:
    """What a later check makes of 384 tokens while the cache has ``blocks`` blocks."""
    from vllm.platforms.cpu import CpuPlatform

    config = engine_config("qwen3_next")
    config.cache_config.block_size = 384
    config.cache_config.num_gpu_blocks = blocks
    check(CpuPlatform, config)
    return config.cache_config.block_size


def checks():
    """(vLLM's check as it is after our repairs, vLLM's own)."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__
    return check, getattr(check, "__wrapped__", check)


@pytest.mark.parametrize("blocks", [None, 0, 100])
def test_the_block_size_is_kept_once_the_cache_exists(blocks):
    check, of_vllm = checks()
    expected = 384 if blocks else block_size_after(of_vllm, blocks)
    assert block_size_after(check, blocks) == expected


def test_a_vllm_that_keeps_the_block_size_itself_is_left_alone():
    check, of_vllm = checks()
    assert (check is of_vllm) == (block_size_after(of_vllm, 100) == 384)


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_no_prefill_checkpoints_on_cpu(monkeypatch, checkpoints):
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec = dataclasses.replace(
        STATE_SPEC,
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=64 if checkpoints else None,
    )
    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", lambda self, config: spec)
    cpu.no_cpu_prefill_checkpoints()
    assert MambaMixer2.get_kv_cache_spec(None, None) == STATE_SPEC


CONNECTORS = pytest.mark.parametrize(
    "connector_name, ours", [("LMCacheConnectorV1", True), ("NixlConnector", False), (None, False)]
)


def scheduler_of(connector_name: str | None, **attributes) -> SimpleNamespace:
    transfer = connector_name and KVTransferConfig(kv_connector=connector_name, kv_role="kv_both")
    return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer), **attributes)


@CONNECTORS
def test_loads_are_promoted_in_order(monkeypatch, connector_name, ours):
    from vllm.v1.core.sched.scheduler import Scheduler

    def __init__(self):
        vars(self).update(vars(scheduler_of(connector_name)))
        self.policy = SchedulingPolicy.PRIORITY
        self.kv_holding_waiting = create_request_queue(self.policy)

    monkeypatch.setattr(Scheduler, "__init__", __init__)
    scheduler_repairs.promote_loads_in_order()
    expected = SchedulingPolicy.FCFS if ours else SchedulingPolicy.PRIORITY
    assert type(Scheduler().kv_holding_waiting) is type(create_request_queue(expected))


@CONNECTORS
def test_restored_states_are_published(monkeypatch, connector_name, ours):
    from vllm.v1.core.sched.scheduler import Scheduler

    published = []
    monkeypatch.setattr(
        Scheduler,
        "_update_waiting_for_remote_kv",
        lambda self, request: published.append(request.shared_prefix_boundary),
    )
    scheduler_repairs.publish_restored_states()
    request = SimpleNamespace(shared_prefix_boundary=48, num_computed_tokens=32)
    Scheduler._update_waiting_for_remote_kv(scheduler_of(connector_name), request)
    assert published == [32 if ours else 48]
    assert request.shared_prefix_boundary == 48


@CONNECTORS
@pytest.mark.parametrize("free", [4, 5])
def test_ends_are_published_where_room_is(monkeypatch, connector_name, ours, free):
    from vllm.v1.core.sched.scheduler import Scheduler

    published = []
    monkeypatch.setattr(
        Scheduler,
        "_update_waiting_for_remote_kv",
        lambda self, request: published.append(request.num_computed_tokens),
    )
    scheduler_repairs.skip_partial_publish_when_full()
    scheduler = scheduler_of(
        connector_name,
        cache_config=SimpleNamespace(block_size=16),
        _request_remaining_blocks=lambda request: 2,
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
            coordinator=SimpleNamespace(single_type_managers=[None] * 3),
        ),
    )
    for tokens in (32, 35):
        request = SimpleNamespace(num_computed_tokens=tokens)
        Scheduler._update_waiting_for_remote_kv(scheduler, request)
        assert request.num_computed_tokens == tokens
    assert published == [32, 32 if ours and free < 5 else 35]


@dataclasses.dataclass(frozen=True)
class Waiting:
    request_id: str
    num_computed_tokens: int


@pytest.mark.parametrize("paused", PauseState)
@CONNECTORS
def test_failed_loads_leave_the_queue_of_those_with_blocks(
    monkeypatch, connector_name, ours, paused
):
    """A pause that lets requests end runs and counts no others: there they go to its end."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_update_from_kv_xfer_finished", lambda self, output: None)
    scheduler_repairs.free_failed_loads()
    requests = [
        Waiting(name, computed)
        for name, computed in (("failed", 0), ("loading", 0), ("partly", 16), ("also", 0))
    ]
    freed = []
    scheduler = scheduler_of(
        connector_name,
        failed_recving_kv_req_ids={"failed", "partly", "also"},
        finished_recving_kv_req_ids={"failed", "partly", "also", "another"},
        kv_holding_waiting=create_request_queue(SchedulingPolicy.FCFS),
        waiting=create_request_queue(SchedulingPolicy.FCFS),
        _handle_blocked_waiting_request=lambda request: freed.append(request.request_id),
        _inflight_prefills=set(requests),
        pause_state=paused,
    )
    scheduler.kv_holding_waiting.extend(requests)
    Scheduler._update_from_kv_xfer_finished(scheduler, None)
    assert freed == (["failed", "also"] if ours else [])
    drains = paused == PauseState.PAUSED_NEW
    assert [request.request_id for request in scheduler.waiting] == ([] if drains else freed)
    kept = ["loading", "partly"] if ours else ["failed", "loading", "partly", "also"]
    assert [request.request_id for request in scheduler.kv_holding_waiting] == (
        kept + freed if drains else kept
    )
    assert {request.request_id for request in scheduler._inflight_prefills} == set(kept)


@CONNECTORS
@pytest.mark.parametrize(
    "cap, held, drafts, expected",
    [
        (None, [1, 1, 1], 0, 5),  # full attention: vLLM's own count is right
        (4, [0, 0, 1], 0, 5 + 1),  # vLLM has counted one
        (4, [0, 1, 1], 0, 5 + 1),
        (2, [0, 0, 1], 0, 5 + 1),
        (2, [0, 1, 1], 0, 5),
        (8, [0, 0, 1], 0, 5),  # both
        (2, [], 0, 5),
        (3, [0, 0, 0, 0, 1], 0, 5),
        (3, [0, 0, 0, 0, 1], 15, 5 + 1),  # drafts take a sixth block
    ],
)
def test_loads_reserve_what_their_windows_still_need(
    monkeypatch, connector_name, ours, cap, held, drafts, expected
):
    """A request of five blocks, of which ``held`` has some; 0 stands for the null block."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_request_remaining_blocks", lambda self, request: 5)
    scheduler_repairs.reserve_windows()
    manager = SimpleNamespace(
        block_size=16,
        max_admission_blocks_per_request=cap,
        req_to_blocks={"r": [SimpleNamespace(is_null=not block) for block in held]},
    )
    coordinator = SimpleNamespace(single_type_managers=[manager])
    scheduler = scheduler_of(
        connector_name,
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
        num_spec_tokens=drafts,
        num_lookahead_tokens=0,
    )
    request = SimpleNamespace(request_id="r", num_tokens=65)
    found = Scheduler._request_remaining_blocks(scheduler, request)
    assert found == (expected if ours else 5)


@CONNECTORS
@pytest.mark.parametrize(
    "computed, evicted", [(48, {3, 13}), (63, {3, 13}), (47, {2, 3, 12, 13}), (64, set())]
)
def test_blocks_of_a_step_that_was_taken_back_lose_their_hash(
    monkeypatch, connector_name, ours, computed, evicted
):
    """A request of four blocks in two groups; the null block stands for a state not kept."""
    from vllm.v1.core.sched.scheduler import Scheduler

    freed, seen = [], set()
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda self, request, *args, **kwargs: freed.append(args)
    )
    scheduler_repairs.unhash_uncomputed_blocks()
    managers = [
        SimpleNamespace(
            block_size=16,
            block_pool=SimpleNamespace(evict_blocks=seen.update),
            req_to_blocks={"r": [SimpleNamespace(block_id=i, is_null=i == 10) for i in ids]},
        )
        for ids in (range(4), (10, 10, 12, 13), ())
    ]
    coordinator = SimpleNamespace(single_type_managers=managers)
    scheduler = scheduler_of(
        connector_name, kv_cache_manager=SimpleNamespace(coordinator=coordinator)
    )
    request = SimpleNamespace(request_id="r", num_computed_tokens=computed)
    Scheduler._preempt_request(scheduler, request, 1.0)
    assert seen == (evicted if ours else set()) and freed == [(1.0,)]


@CONNECTORS
@pytest.mark.parametrize(
    "start, count, expected",
    [
        (20, 30, 12),  # up to the end of the block it starts in
        (20, 12, 12),
        (20, 5, 5),
        (32, 68, 68),  # a checkpoint may lie inside
        (99, 4, 4),  # decoding, with drafts
    ],
)
def test_a_chunk_that_starts_inside_a_block_ends_with_it(
    monkeypatch, connector_name, ours, start, count, expected
):
    """A prompt of 99 tokens, blocks of 16; the part of ``start`` that hits is given apart."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(
        Scheduler, "_mamba_block_aligned_split", lambda self, request, tokens, *args, **more: tokens
    )
    partial_hits.stop_at_the_next_boundary()
    scheduler = scheduler_of(connector_name, cache_config=SimpleNamespace(block_size=16))
    request = SimpleNamespace(num_computed_tokens=start - 9, num_prompt_tokens=99, num_tokens=99)
    for computed in (((4, 5), {}), ((4,), {"num_external_computed_tokens": 5})):
        args, more = computed
        found = Scheduler._mamba_block_aligned_split(scheduler, request, count, *args, **more)
        assert found == (expected if ours else count)


@pytest.mark.parametrize(
    "start, count, shortened, expected",
    [
        (16, 40, 40, 40),  # enough is left
        (16, 48, 46, 32),  # ends at a boundary, with more left
        (48, 16, 14, 16),  # cannot: the drafter guesses
        (62, 2, 0, 2),
    ],
)
@pytest.mark.parametrize("hybrid", [True, False])
def test_no_chunk_is_shortened_to_nothing(monkeypatch, start, count, shortened, expected, hybrid):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_reserve_prefill_lookahead", lambda *arguments: shortened)
    scheduler_repairs.leave_no_chunk_empty()
    for name in ("LMCacheConnectorV1", "NixlConnector"):
        scheduler = scheduler_of(name, cache_config=SimpleNamespace(block_size=16))
        scheduler.need_mamba_block_aligned_split = hybrid
        found = Scheduler._reserve_prefill_lookahead(scheduler, None, start, count)
        ours = hybrid and name == "LMCacheConnectorV1"
        assert found == (expected if ours else shortened)


@pytest.mark.parametrize(
    "start, count, drafts, expected",
    [
        (16, 32, 1, 16),
        (16, 40, 1, 40),  # three columns
        (16, 24, 1, 16),  # media without room ended it inside a block
        (24, 40, 1, 8),
        (16, 16, 1, 16),
        (0, 32, 1, 32),  # no draft has a block yet
        (16, 32, 2, 32),
        (64, 35, 1, 35),  # the last one
    ],
)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_chunk_does_not_go_on_for_two_columns(
    monkeypatch, start, count, drafts, expected, checkpoints
):
    """A prompt of 99 tokens, blocks of 16."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_reserve_prefill_lookahead", lambda *arguments: arguments[-1])
    scheduler_repairs.part_chunks_of_two_blocks()
    request = SimpleNamespace(num_prompt_tokens=99, num_tokens=99)
    for name in ("LMCacheConnectorV1", "NixlConnector"):
        scheduler = scheduler_of(name, cache_config=SimpleNamespace(block_size=16))
        scheduler.num_spec_tokens = drafts
        scheduler.mamba_has_prefill_checkpoint_blocks = checkpoints
        found = Scheduler._reserve_prefill_lookahead(scheduler, request, start, count)
        ours = checkpoints and name == "LMCacheConnectorV1"
        assert found == (expected if ours else count)


@pytest.mark.parametrize("late, drafters", [(0, True), (2, True), (2, False)])
def test_a_boundary_that_was_reached_counts_until_its_state_is_published(
    monkeypatch, late, drafters
):
    """Only where vLLM publishes the last ``late`` tokens of a step with the next one.

    It does so with those of the drafter's groups.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager

    def original(self, request, num_computed_tokens):
        published.append((num_computed_tokens, request.shared_prefix_boundary))

    published: list[tuple[int, int]] = []
    monkeypatch.setattr(KVCacheCoordinator, "cache_blocks", original)
    scheduler_repairs.publish_where_steps_ended()
    attention, states = (object.__new__(each) for each in (FullAttentionManager, MambaManager))
    attention.use_eagle, states.use_eagle = True, drafters
    coordinator = SimpleNamespace(
        num_reprefillable_tokens=late, single_type_managers=(attention, states)
    )
    request = SimpleNamespace(num_computed_tokens=0, shared_prefix_boundary=32)
    for end, following in ((16, 32), (32, 64), (64, 64), (80, 96), (96, 0)):
        wanted = request.shared_prefix_boundary
        KVCacheCoordinator.cache_blocks(coordinator, request, end)
        assert request.shared_prefix_boundary == wanted
        request.num_computed_tokens, request.shared_prefix_boundary = end, following
    reached = [(16, 32), (32, 32), (64, 32 if late and drafters else 64), (80, 64), (96, 96)]
    assert published == reached


@pytest.mark.parametrize("retention, kept", [(None, 32), (0, None)])
def test_the_block_of_a_checkpoint_is_published_once(retention, kept):
    """It holds the state of 32 tokens and ends at 48, which vLLM publishes later."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=16)
    manager = MambaManager(
        dataclasses.replace(STATE_SPEC, block_size=16),
        pool,
        enable_caching=True,
        kv_cache_group_id=3,
        scheduler_block_size=16,
    )
    block, running = pool.get_new_blocks(2)
    manager.req_to_blocks["r"] = [pool.null_block, pool.null_block, block, running]
    manager._checkpoints["r"] = (32, 2)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=50, shared_prefix_boundary=0)
    request.block_hashes = [bytes([number]) * 32 for number in range(3)]
    offers = []
    for tokens in (47, 50):
        manager.cache_blocks(request, tokens, retention, replay_boundaries=(49,))
        offers += manager.take_pending_boundary_state_offloads()
        manager._checkpoints.clear()
        assert block.block_hash_num_tokens == kept
    assert offers == [("r", 3, block, 32)] * bool(kept)
