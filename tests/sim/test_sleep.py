# SPDX-License-Identifier: Apache-2.0
"""No copy touches the KV cache while its memory is freed, and all goes on after it."""

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from .asleep import MODES, free, sleep, wake
from .device import HostAccess
from .engine import SimEngine
from .warm import PROMPT, hits, wait_for_load


def ask(engine: SimEngine, *names: str) -> None:
    for name in names:
        engine.reset_prefix_cache(False)
        engine.add(name, list(PROMPT), 2)
        engine.drain()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_requests_of_before_and_after_get_right_answers(engine, mode, level):
    engine.add("running", list(PROMPT), 30)
    while engine.requests["running"].num_output_tokens < 2:
        engine.load()
        engine.step()
    before = hits(engine)
    assert sleep(engine, mode)
    wake(engine, level)
    engine.drain()
    assert engine.requests["running"].is_finished()
    ask(engine, "again")
    # A request that was kept is computed anew after the sleep, and stored.
    known = before + (mode == "keep")
    assert hits(engine) == known, "a reset comes with the sleep"
    ask(engine, "once more")
    assert hits(engine) == known + 1, "nothing is stored after the sleep"


@pytest.mark.parametrize("mode", ["abort", "wait"])
@pytest.mark.parametrize("begun", [False, True])
def test_loads_under_way_end_before_vllm_sleeps(engine, mode, begun):
    wait_for_load(engine, "again")
    if begun:
        engine.begin_load(0)
    assert sleep(engine, mode)
    engine.holding = False
    wake(engine, 1)
    engine.drain()
    assert engine.requests["again"].is_finished()


@pytest.mark.parametrize("begun", [False, True])
def test_a_pause_that_keeps_requests_waits_for_loads(engine, begun):
    """Else vLLM's reset fails, and as no step is made any more, so does each retry."""
    wait_for_load(engine, "again")
    if begun:
        engine.begin_load(0)
    assert sleep(engine, "keep")
    assert not engine.requests["again"].is_finished()
    engine.holding = False
    wake(engine, 1)
    engine.drain()
    assert engine.requests["again"].status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.events["loads"] == 1, "what was loaded before the sleep is computed"
    known = hits(engine)
    ask(engine, "third", "fourth")
    assert hits(engine) == known + 2, "what is computed after it is not stored"


def test_a_load_that_fails_in_a_pause_that_drains_is_computed_in_it(engine):
    """vLLM neither runs nor counts other waiting requests then."""
    wait_for_load(engine, "again")
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for rank in engine.ranks:
        rank.connector.worker.loads._asleep = True
    engine.drain()
    assert engine.requests["again"].is_finished()
    assert engine.events["failed loads"] == 1
    for rank in engine.ranks:
        rank.connector.worker.loads.resume()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


@pytest.mark.parametrize("begun", [False, True])
def test_a_load_that_nobody_waited_for_ends_with_the_memory(engine, begun):
    """Not by vLLM's order of calls; the rank alone sees to it."""
    wait_for_load(engine, "again")
    while engine._queue:
        engine._finish_step()
    if begun and engine.setup.device:
        engine.begin_load(0)
    engine.holding = False
    free(engine)
    wake(engine, 1)
    engine.drain()
    assert engine.requests["again"].is_finished()
    assert engine.events["failed loads"] == 1


def test_what_was_saved_before_the_sleep_is_stored(engine):
    """vLLM has waited for the device by then; what the host still does is waited for here."""
    engine.add("running", [1, *PROMPT], 2)
    while engine.requests["running"].num_output_tokens < 1:
        engine.step()
    free(engine)
    workers = [rank.connector.worker for rank in engine.ranks]
    assert all(worker.counts.saved_states for worker in workers)
    wake(engine, 1)
    engine.abort("running")


def test_a_copy_of_freed_memory_is_noticed(engine):
    """Of the simulation itself."""
    device = engine.ranks[0].device
    if device is None or device.mode != "late":
        return
    pages = engine.ranks[0].connector.worker.pages[0]
    host = pages.rows[0].memory[1].clone()
    pages.rows[0][1].copy_(host, non_blocking=True)
    device.freed = True
    with pytest.raises(HostAccess):
        device.drain()
        device.check()
    device.errors.clear()
    with pytest.raises(HostAccess):
        pages.rows[0][1].copy_(host, non_blocking=True)
    device.freed = False
