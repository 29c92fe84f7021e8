# SPDX-License-Identifier: Apache-2.0
"""Of requests with one prefix that arrive together, one computes it."""

from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from .engine import SimEngine
from .program import TRUNKS, Run, Tally
from .setup import Setup
from .storage import N

# What follows is longer than a block: the last boundary of a prompt is none of the others.
SHARED, REST = 8 * N, 2 * N + 7
WHOLE = SHARED + REST
ENGINES = [(runner, overlap) for runner in ("v1", "v2") for overlap in (False, True)]


def run_of(**setup) -> Run:
    # vLLM asks for those that wait as long as a step has room, too little for a block though.
    shape = dict(groups="sa", blocks=120, batch=2 * N + 3, share=True)
    return Run(Setup(**{**shape, **setup}), Tally())


def add(engine: SimEngine, number: int, shared: int = SHARED) -> Callable[[], int]:
    """A request with that part of one prefix. Gives how many of its tokens no cache had."""
    prompt = TRUNKS[0][:shared] + TRUNKS[1][number * 50 : number * 50 + REST]
    engine.add(f"r{number}", prompt, 3)
    stats = engine.requests[f"r{number}"].prefill_stats
    return lambda: len(prompt) - stats.num_local_cached_tokens - stats.num_external_cached_tokens


def computed(engine: SimEngine, count: int) -> list[int]:
    """Of requests that arrive together, until they have ended."""
    added = [add(engine, number) for number in range(count)]
    engine.drain()
    return [tokens() for tokens in added]


def preempt(engine: SimEngine, request) -> None:
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)


@pytest.mark.parametrize("runner, overlap", ENGINES)
def test_one_of_four_computes_what_they_share(runner, overlap):
    run = run_of(runner=runner, overlap=overlap)
    (engine,) = run.engines
    assert computed(engine, 4) == [WHOLE, REST, REST, REST]
    counts = engine.hybrid.counts
    assert counts.shared_prefills == 3 and counts.shared_prefill_tokens == 3 * SHARED
    saved = engine.ranks[0].connector.worker.counts.saved_attention
    assert saved == SHARED // N + 4 * (REST // N), "each page once"
    run.play([])


def test_without_the_option_each_computes_it():
    run = run_of(share=False)
    (engine,) = run.engines
    assert min(computed(engine, 2)) > SHARED / 2
    assert not engine.hybrid.counts.shared_prefills
    run.play([])


def test_nobody_waits_for_what_is_about_to_be_computed():
    """Where the next step ends is settled by then."""
    run = run_of(batch=SHARED + 3 * N)
    (engine,) = run.engines
    assert computed(engine, 2) == [WHOLE, WHOLE]
    run.play([])


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_who_waits_goes_on_when_the_other_one_does_not(how):
    run = run_of()
    (engine,) = run.engines
    first, second, third = (add(engine, number) for number in range(3))
    engine.step()
    leader = engine.requests["r0"]
    assert leader.status == RequestStatus.RUNNING
    assert engine.requests["r1"].status == RequestStatus.WAITING
    if how == "abort":
        engine.abort("r0")
    else:
        preempt(engine, leader)
    engine.drain()
    assert second() <= WHOLE and third() == REST
    run.play([])


def test_what_vllm_has_lost_meanwhile_comes_from_the_store():
    run = run_of()
    (engine,) = run.engines
    add(engine, 0), (second := add(engine, 1))
    leader = engine.requests["r0"]
    while leader.num_computed_tokens < SHARED:
        engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if not block.is_null})
    engine.drain()
    assert second() == REST
    assert engine.hybrid.counts.hit_tokens.total() == SHARED
    run.play([])


def test_prompts_that_part_early_are_each_computed():
    run = run_of()
    (engine,) = run.engines
    added = [add(engine, 0), add(engine, 1, N)]
    engine.drain()
    assert [tokens() for tokens in added] == [WHOLE, N + REST]
    run.play([])


def test_a_request_that_may_not_read_the_cache_waits_for_none():
    run = run_of()
    (engine,) = run.engines
    add(engine, 0), (second := add(engine, 1))
    engine.requests["r1"].skip_reading_prefix_cache = True
    engine.step()
    assert not engine.hybrid.prefills._waits
    engine.drain()
    assert second() == WHOLE
    run.play([])


def test_who_waits_for_a_request_that_was_preempted_waits_anew():
    run = run_of()
    (engine,) = run.engines
    add(engine, 0), (second := add(engine, 1))
    engine.step()
    engine.step()
    leader = engine.requests["r0"]
    preempt(engine, leader)
    engine.step()  # vLLM takes it up again before it asks for the other one
    assert leader.status == RequestStatus.RUNNING
    engine.drain()
    assert second() == REST
    run.play([])


def test_what_its_leader_did_not_store_is_stored():
    run = run_of()
    (engine,) = run.engines
    add(engine, 0), (second := add(engine, 1))
    engine.step()
    engine.hybrid.give_up("r0")
    engine.drain()
    assert second() == REST
    engine.reset_prefix_cache(False)
    engine.add("again", list(engine.requests["r1"].prompt_token_ids), 1)
    stats = engine.requests["again"].prefill_stats
    engine.drain()
    assert stats.num_external_cached_tokens == (SHARED + REST) // N * N
    run.play([])


def test_a_leader_all_of_whose_pages_are_stored_is_watched_again():
    """Its state has gone from the store, so that it computes them."""
    run = run_of(blocks=200)
    (engine,) = run.engines
    prompt = TRUNKS[0][: 12 * N]
    engine.add("first", prompt, 1)
    engine.drain()
    shortest = min(len(memory.byte_array) for _, memory in run.pool.records)
    for key, memory in run.pool.records:
        if len(memory.byte_array) == shortest:
            run.pool._backend.remove(key)
    engine.reset_prefix_cache(False)
    engine.add("leader", prompt, 2)
    engine.add("follower", prompt[:SHARED] + TRUNKS[1][:N], 2)
    engine.drain()
    assert engine.hybrid.counts.shared_prefills == 1
    run.play([])
