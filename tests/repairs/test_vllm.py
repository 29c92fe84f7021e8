# SPDX-License-Identifier: Apache-2.0
"""vLLM without one of our repairs: its real scheduler, in the simulation, and its CPU kernels."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.model_executor.layers.mamba.kda_checkpoint import FlashKDAPrefillCheckpointExporter
from vllm.models.kimi_k3.nvidia import kda
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

import vllm_patch
from tests.sim.engine import SimEngine, Stuck, install
from tests.sim.model import WrongBytes
from tests.sim.program import TRUNKS, Run, Tally
from tests.sim.reset import replace_weights, reset_all
from tests.sim.setup import Setup, base_config
from tests.sim.shrunk import SHRUNK
from tests.sim.storage import N, Pool, close_storage
from tests.unit.helpers import STATE_SPEC, engine_config
from vllm_patch import (
    cpu,
    events,
    kimi_k3,
    look_ahead,
    partial_hits,
    scheduler_repairs,
    sessions,
    sleep,
)

from .repair import Repair, shows_bug_of, without

vllm_patch.register()

A, B, _ = TRUNKS


@pytest.fixture
def simulation(monkeypatch):
    install(monkeypatch)
    yield monkeypatch
    close_storage()


@contextmanager
def new_engine(**setup) -> Iterator[SimEngine]:
    pool = Pool()
    yield SimEngine(Setup(groups="sas", blocks=120, batch=200, **setup), pool)
    pool.reset()


def ask(engine: SimEngine, name: str, prompt: list[int]) -> tuple[int, int]:
    """(tokens from the store, tokens from vLLM's own cache)."""
    engine.add(name, prompt, 1)
    stats = engine.requests[name].prefill_stats
    engine.drain()
    return stats.num_external_cached_tokens, stats.num_local_cached_tokens


def fails_without(patch: pytest.MonkeyPatch, repair: Repair) -> bool:
    """Whether the program that the repair was found with fails."""
    (program,) = (each for each in SHRUNK if each.repair is repair)
    without(patch, repair)
    try:
        program.play()
    except program.error:
        return True
    return False


@shows_bug_of(scheduler_repairs.promote_loads_in_order)
def test_loads_of_different_priority_wait_for_each_other(simulation):
    return fails_without(simulation, scheduler_repairs.promote_loads_in_order)


@shows_bug_of(scheduler_repairs.free_failed_loads)
def test_two_failed_loads_wait_for_each_other(simulation):
    return fails_without(simulation, scheduler_repairs.free_failed_loads)


@shows_bug_of(scheduler_repairs.reserve_windows)
def test_a_load_reserves_nothing_for_its_windows(simulation):
    return fails_without(simulation, scheduler_repairs.reserve_windows)


@shows_bug_of(scheduler_repairs.unhash_uncomputed_blocks)
def test_a_block_that_was_never_computed_is_hit(simulation):
    return fails_without(simulation, scheduler_repairs.unhash_uncomputed_blocks)


@shows_bug_of(partial_hits.stop_at_the_next_boundary)
def test_a_state_gets_the_hash_of_a_later_token(simulation):
    return fails_without(simulation, partial_hits.stop_at_the_next_boundary)


@shows_bug_of(scheduler_repairs.skip_partial_publish_when_full)
def test_a_load_inside_a_block_needs_more_than_was_reserved(simulation):
    return fails_without(simulation, scheduler_repairs.skip_partial_publish_when_full)


@shows_bug_of(sessions.start_parts_over)
def test_a_part_goes_on_from_a_state_that_saw_its_last_token(simulation):
    """With asynchronous scheduling the next step has computed that token."""
    without(simulation, sessions.start_parts_over)
    run = Run(Setup(groups="sa", blocks=80, batch=20 * N, overlap=True), Tally())
    (engine,) = run.engines
    engine.sessions.begin("session", A[: 2 * N + 3], 20)
    stop = engine._truths["session"].token(2 * N + 6)
    engine.requests["session"].sampling_params.stop_token_ids.append(stop)
    while not engine.sessions.waits("session"):
        engine.step()
    engine.sessions.go_on("session", B[:N], 4)
    try:
        engine.drain()
    except WrongBytes:
        return True
    return False


@shows_bug_of(sessions.drop_output_of_preempted_sessions, fixed_in="0.33.0")
def test_a_part_ends_while_its_session_is_preempted(simulation):
    without(simulation, sessions.drop_output_of_preempted_sessions)
    run = Run(Setup(groups="sa", blocks=80, batch=20 * N, overlap=True), Tally())
    (engine,) = run.engines
    engine.sessions.begin("session", A[: 2 * N + 3], 20, stops=range(50))
    request = engine.requests["session"]
    while not request.num_output_placeholders:
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine._finish_step()
    queues = (*engine.scheduler.waiting, *engine.scheduler.kv_holding_waiting)
    return request not in queues


@shows_bug_of(look_ahead.let_hashes_look_ahead, since="0.33.0")
def test_beside_a_connector_hashes_do_not_look_ahead():
    config = Setup(drafts=1, mtp=True).vllm_config(base_config()[0])
    patched = VllmConfig.num_hash_lookahead_tokens.fget
    assert patched(config) == 1
    return inspect.unwrap(patched)(config) == 0


@shows_bug_of(sessions.forget_columns_of_parts)
def test_the_v1_runner_keeps_the_column_of_a_part_that_has_ended():
    columns = {"session": 5}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id="session")]
    inspect.unwrap(mamba_utils.cleanup_mamba_state_idx)(output, columns)
    return bool(columns)


@shows_bug_of(scheduler_repairs.publish_restored_states)
def test_a_restored_state_is_loaded_again(simulation):
    without(simulation, scheduler_repairs.publish_restored_states)
    with new_engine() as engine:
        ask(engine, "first", A[: 4 * N + 1])
        engine.reset_prefix_cache(False)
        assert ask(engine, "longer", A[: 10 * N]) == (4 * N, 0), "nothing is restored"
        found = ask(engine, "branch", A[: 4 * N] + B[: 4 * N])
    assert sum(found) == 4 * N
    return found == (4 * N, 0)


@shows_bug_of(scheduler_repairs.publish_where_steps_ended)
def test_a_state_is_published_where_the_next_step_ends(simulation):
    """Of several MTP modules: checkpoints are lost, or a restored state is loaded again."""
    without(simulation, scheduler_repairs.publish_where_steps_ended)
    simulation.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda self: True)
    shape = dict(drafts=3, mtp=True, marked=False, old_hashes=True)
    with new_engine(**shape, checkpoint=2 * N) as engine:
        ask(engine, "first", A[: 8 * N])
        engine.reset_prefix_cache(False)
        lost = ask(engine, "branch", A[: 4 * N] + B[: 4 * N]) != (4 * N, 0)
    with new_engine(**shape) as engine:
        ask(engine, "first", A[: 4 * N])
        engine.reset_prefix_cache(False)
        assert ask(engine, "longer", A[: 10 * N]) == (3 * N, 0), "nothing is restored"
        again = ask(engine, "branch", A[: 4 * N] + B[: 4 * N])
    assert sum(again) == 3 * N
    return lost or again == (3 * N, 0)


@shows_bug_of(scheduler_repairs.part_chunks_of_two_blocks)
def test_a_chunk_of_two_columns_writes_a_checkpoint_over_its_own_end(simulation):
    without(simulation, scheduler_repairs.part_chunks_of_two_blocks)
    run = Run(Setup(groups="sa", drafts=1, interior=1, batch=2 * N, blocks=80), Tally())
    (engine,) = run.engines
    engine.add("long", A[: 5 * N + 1], 2)
    try:
        engine.drain()
    except WrongBytes:
        return True
    return False


@shows_bug_of(scheduler_repairs.publish_checkpoints_once, since="0.33.0")
def test_a_checkpoint_is_published_as_the_state_at_its_blocks_end(simulation):
    """Of several MTP modules, where the hash of that end is known a step later."""
    without(simulation, scheduler_repairs.publish_checkpoints_once)
    simulation.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda self: True)
    shape = dict(batch=20 * N, drafts=2, mtp=True, interior=1, runner="v2", overlap=True)
    run = Run(Setup(**shape, blocks=80), Tally())
    (engine,) = run.engines
    engine.add("first", A[: 5 * N + 1], 8)
    engine.drain()
    engine.add("turn", [*engine.requests["first"].all_token_ids, *B[:N]], 3)
    try:
        engine.drain()
    except WrongBytes:
        return True
    return False


@shows_bug_of(scheduler_repairs.leave_no_chunk_empty)
def test_a_prompt_of_whole_blocks_and_a_few_tokens_is_never_finished(simulation):
    without(simulation, scheduler_repairs.leave_no_chunk_empty)
    simulation.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda self: True)
    run = Run(Setup(groups="sa", blocks=80, batch=N, drafts=3, mtp=True, runner="v2"), Tally())
    (engine,) = run.engines
    engine.add("r", A[: 4 * N + 1], 3)
    try:
        engine.drain()
    except Stuck:
        return True
    return False


@shows_bug_of(partial_hits.publish_no_state_late)
def test_a_running_state_is_published_as_that_of_an_earlier_token(simulation):
    """Of several MTP modules, where a step has one token of a prompt."""
    without(simulation, partial_hits.publish_no_state_late)
    simulation.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda self: True)
    shape = dict(batch=4, hash_size=N // 2, drafts=2, mtp=True, runner="v2", marked=False)
    run = Run(Setup(**shape, old_hashes=True), Tally())
    (engine,) = run.engines
    for name in ("first", "second"):
        engine.add(name, A[: N + 2], 8)
    try:
        engine.drain()
    except WrongBytes:
        return True
    return False


@shows_bug_of(partial_hits.copy_what_is_computed)
def test_a_block_is_copied_before_it_is_computed(simulation):
    without(simulation, partial_hits.copy_what_is_computed)
    with new_engine(hash_size=N // 2) as engine:
        ask(engine, "short", A[: N // 2 + 1])
        engine.clear_store()
        for name in ("first", "second"):
            engine.add(name, A[: 4 * N + 1], 1)
        try:
            engine.drain()
        except WrongBytes:
            return True
    return False


@shows_bug_of(scheduler_repairs.finish_resets)
def test_a_reset_leaves_something_behind(simulation):
    """The repair can go when neither does."""
    without(simulation, scheduler_repairs.finish_resets)
    with new_engine() as engine:
        load = load_survives_reset(engine)
    with new_engine() as engine:
        return block_survives_reset(engine) or load


@shows_bug_of(events.announce_what_stays)
def test_a_reset_of_its_own_cache_speaks_for_the_connector(simulation):
    """The repair can go when the event says what was cleared, or the connector is told."""
    without(simulation, events.announce_what_stays)
    with new_engine() as engine:
        connector = engine.scheduler.connector = MagicMock(wraps=engine.scheduler.connector)
        assert engine.scheduler.reset_prefix_cache()
    return not AllBlocksCleared.__struct_fields__ and not connector.mock_calls


def load_survives_reset(engine: SimEngine) -> bool:
    """Whether a load that a reset finds brings what the old weights left."""
    ask(engine, "first", A[: 4 * N + 1])
    engine.reset_prefix_cache(False)
    engine.holding = True
    engine.add("loading", A[: 4 * N + 1], 1)
    while not engine.scheduler.kv_holding_waiting:
        engine.step()
    reset_all(engine)
    replace_weights(engine)
    engine.holding = False
    try:
        engine.drain()
    except WrongBytes:
        return True
    return False


def block_survives_reset(engine: SimEngine) -> bool:
    """Whether blocks that a failed reset left in vLLM's own cache are stored anew."""
    engine.add("running", A[: 4 * N + 1], 30)
    while engine.requests["running"].num_output_tokens < 2:
        engine.step()
    assert not reset_all(engine, running=False), "it preempts now: is anything left?"
    ask(engine, "beside", [*A[: 4 * N + 1], 1, 2, 3])
    engine.reset_prefix_cache(False)
    ask(engine, "second", A[: 4 * N + 1])
    engine.reset_prefix_cache(False)
    return ask(engine, "third", A[: 4 * N + 1]) != (0, 0)


@shows_bug_of(cpu.keep_cpu_block_size, fixed_in="0.33.0")
def test_the_handshake_resets_the_block_size(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform.check_and_update_config, "__wrapped__"):  # else vLLM is left alone
        without(monkeypatch, cpu.keep_cpu_block_size)
    config = engine_config("qwen3_next")
    config.cache_config.block_size = 384
    config.cache_config.num_gpu_blocks = 100
    config.__post_init__()  # as EngineCore does after its handshake
    return config.cache_config.block_size != 384


@shows_bug_of(cpu.no_cpu_prefill_checkpoints)
def test_mamba2_on_cpu_has_no_state_of_a_checkpoint(monkeypatch):
    without(monkeypatch, cpu.no_cpu_prefill_checkpoints)
    return announces_checkpoints(monkeypatch) and intermediate_states(chunks=2) < 2


def announces_checkpoints(patch: pytest.MonkeyPatch) -> bool:
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    patch.setattr(MambaBase, "get_kv_cache_spec", lambda self, config: STATE_SPEC)
    spec = MambaMixer2.get_kv_cache_spec(MambaMixer2.__new__(MambaMixer2), None)
    return spec.num_prefill_checkpoint_blocks > 0


def intermediate_states(chunks: int) -> int:
    """How many states the kernel returns for one prompt that it computes in so many chunks."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    size = 4
    tokens = chunks * size
    x, b = torch.zeros(tokens, 2, 4), torch.zeros(tokens, 1, 16)
    states = mamba_chunk_scan_combined_varlen(
        x,
        torch.zeros(tokens, 2),
        -torch.ones(2),
        b,
        b,
        chunk_size=size,
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        cu_chunk_seqlens=torch.arange(0, tokens + 1, size, dtype=torch.int32),
        last_chunk_indices=torch.tensor([chunks - 1]),
        seq_idx=torch.zeros(chunks, dtype=torch.int32),
        out=torch.empty_like(x),
        return_intermediate_states=True,
    )
    return len(states)


@shows_bug_of(sleep.tell_of_freed_pages, fixed_in="0.33.0")
def test_a_sleep_frees_pages_that_a_connector_still_uses(monkeypatch):
    """The accelerator and the allocator are stand-ins: there is none to free memory of."""
    told = []
    agent = SimpleNamespace(unregister_kv_caches=lambda: told.append("connector"))
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", agent)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    worker = Worker.__new__(Worker)
    worker._sleep_mode_backend = SimpleNamespace(suspend=lambda level: told.append("freed"))
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False)
    )
    inspect.unwrap(Worker.sleep)(worker)
    assert "freed" in told
    return told.index("freed") == 0


@shows_bug_of(kimi_k3.write_windows_as_they_are_read)
def test_a_checkpoint_of_kimi_k3_fills_the_room_for_drafts():
    """Seen in its source: the kernels need a GPU."""
    layer = nn.Module()
    layer.conv_size, layer._checkpoint_exporter = 4, FlashKDAPrefillCheckpointExporter()
    kimi_k3.write_windows_as_they_are_read(nn.Sequential(layer, nn.Linear(1, 1)))
    assert layer._checkpoint_exporter == FlashKDAPrefillCheckpointExporter(state_len=3)
    source = Path(kda.__file__).read_text()
    assert "FlashKDAPrefillCheckpointExporter(" in source
    return "FlashKDAPrefillCheckpointExporter()" in source


@shows_bug_of(partial_hits.copy_whole_pages)
def test_a_copy_on_write_leaves_out_the_end_of_an_attention_page():
    pages = torch.zeros(2, 3, 48, dtype=torch.int8)  # [slot, block, byte], in one buffer
    pages[:, 1] = 1
    state, attention = pages[0, :, None, None, :30], pages[0].view(torch.bfloat16)
    vllms = inspect.unwrap(copy_kv_cache_blocks_inplace)
    vllms([state, attention], 3, [(1, 2)])
    return not torch.equal(pages[0, 1], pages[0, 2])
