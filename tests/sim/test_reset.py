# SPDX-License-Identifier: Apache-2.0
"""After a reset nothing stored before is served, in whatever state a request is."""

from contextlib import nullcontext

import pytest
from vllm.v1.core.sched.interface import PauseState

from .engine import SimEngine
from .reset import reload_weights, replace_weights, reset_all
from .setup import Setup
from .storage import N, Pool
from .warm import PROMPT, hits, wait_for_load


def test_the_old_weights_records_are_not_found(engine):
    reload_weights(engine)
    engine.add("again", PROMPT, 2)
    engine.drain()
    assert hits(engine) == 0
    engine.reset_prefix_cache(False)
    engine.add("new", PROMPT, 2)
    engine.drain()
    assert hits(engine) == 1, "what the new weights computed is stored"


def test_a_promise_made_before_is_not_kept(engine):
    """A request that was answered and has no blocks yet."""
    engine.add("again", PROMPT, 2)
    tokens, _ = engine.hybrid.get_num_new_matched_tokens(engine.requests["again"], 0)
    assert tokens == 4 * N
    reload_weights(engine)
    engine.drain()
    assert engine.events["loads"] == 0


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("how_far", ["not begun", "copied", "queued", "reported"])
def test_a_load_under_way_is_computed_instead(engine, how_far, running, monkeypatch):
    wait_for_load(engine, "again")
    if how_far != "not begun":
        engine.holding = False
        engine.load()
    if how_far == "queued":
        # The ranks have reported it, the scheduler takes it up after the reset.
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_finish_step", lambda: None)
            engine.step()
        assert engine._queue
    if how_far == "reported":
        engine.step()
    while how_far != "queued" and engine._queue:
        engine._finish_step()
    # vLLM's own cache holds nothing but the load's blocks, which have no hash yet. A load in flight
    # cannot give them back.
    while running and engine._queue:
        engine._finish_step()
    ended = "again" in engine.scheduler.finished_recving_kv_req_ids
    assert not (ended and how_far in ("not begun", "copied"))
    assert reset_all(engine, running) == ended
    replace_weights(engine)
    engine.holding = False
    engine.drain()
    assert engine.requests["again"].is_finished()


def test_blocks_that_outlived_a_failed_reset_are_not_stored(engine):
    """Not even when the user goes on with a reset of vLLM's own cache alone."""
    assert reset_all(engine)
    engine.add("running", PROMPT, 30)
    while engine.requests["running"].num_output_tokens < 2:
        engine.step()
    assert not reset_all(engine, running=False), "the request that runs holds blocks"
    engine.add("second", [*PROMPT, 1, 2, 3], 2)  # hits what vLLM still has
    engine.drain()
    for name in ("third", "fourth"):
        engine.reset_prefix_cache(False)
        engine.add(name, list(PROMPT), 2)
        engine.drain()
    assert hits(engine) == 0
    assert reset_all(engine)
    for name in ("fifth", "sixth"):
        engine.reset_prefix_cache(False)
        engine.add(name, list(PROMPT), 2)
        engine.drain()
    assert hits(engine) == 1, "nothing is stored after a reset that succeeded"


def test_a_reset_that_a_rank_does_not_answer_ends_all_hits(engine):
    engine.silent = "lost"
    assert not reset_all(engine)
    replace_weights(engine)
    engine.heal()
    for name in ("again", "once more"):
        engine.reset_prefix_cache(False)
        engine.add(name, PROMPT, 2)
        engine.drain()
    assert hits(engine) == 0
    assert reset_all(engine)
    for name in ("third", "fourth"):
        engine.reset_prefix_cache(False)
        engine.add(name, PROMPT, 2)
        engine.drain()
    assert hits(engine) == 1


@pytest.mark.parametrize("paused", [False, True])
def test_beside_a_running_request_only_a_paused_engine_is_reset(paused):
    """As the messages and docs/reliability.md say.

    With steps in flight vLLM cannot free what runs, and everything is computed until a reset
    succeeds.
    """
    engine = SimEngine(Setup(groups="sa", answers=0, batch=N, overlap=True, runner="v2"), Pool())
    engine.add("running", PROMPT, 8)
    engine.step()
    engine.step()
    assert engine.scheduler.defer_block_free and engine._queue
    if paused:  # POST /pause?mode=keep
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        engine.step()
    with nullcontext() if paused else pytest.raises(RuntimeError):
        assert engine.scheduler.reset_prefix_cache(True, reset_connector=True)
    assert engine.hybrid.closed is not paused
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    engine.add("again", PROMPT, 2)
    engine.drain()
    assert engine.hybrid.counts.lookups["miss"] == (2 if paused else 1)
