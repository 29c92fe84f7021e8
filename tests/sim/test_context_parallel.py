# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: each rank has a part of every attention block's tokens."""

import os

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from .engine import SimEngine
from .offers import LOADS, note_offers
from .program import SPREAD, TRUNKS, Run, Tally, programs
from .setup import Setup
from .storage import N, Pool
from .test_block_sizes import hits


@pytest.mark.parametrize("device", ["", "late"])
@pytest.mark.parametrize("hash_size", [N, N // 4])
@pytest.mark.parametrize("tokens", [2 * N, 4 * N, 5 * N + 3, 7 * N + 3])
@pytest.mark.parametrize("dcp, ranks, interleave", [(2, 2, 1), (2, 4, N), (4, 4, 2), (3, 3, 1)])
def test_hits_end_at_the_last_multiple_of_a_states_block(
    dcp, ranks, interleave, tokens, hash_size, device
):
    """Each step checks that each rank's part of each page is of the right tokens."""
    pool = Pool()
    setup = Setup(
        groups="sas",
        ranks=ranks,
        dcp=dcp,
        interleave=interleave,
        blocks=60,
        batch=8 * N,
        hash_size=hash_size,
        device=device,
    )
    engine = note_offers(SimEngine(setup, pool))
    assert (engine.plan.block_size, engine.plan.unit) == (setup.common, hash_size)
    assert setup.common == dcp * N
    for name in ("first", "again"):
        engine.add(name, TRUNKS[0][:tokens], 5)
        engine.drain()
        engine.reset_prefix_cache(False)
    deepest = (tokens - 1) // hash_size * hash_size
    assert hits(engine) == 1 and engine.hybrid.counts.hit_tokens.total() == deepest
    assert engine.events[LOADS] == (deepest % (dcp * N) > 0)
    # A rank's page has N tokens of 8 bytes; a state has 16.
    pages = -(-deepest // (dcp * N))
    for rank in engine.ranks:
        assert rank.connector.worker.counts.loaded_bytes == pages * N * 8 + 2 * 16
    engine.check_empty()
    pool.close()


def test_a_hit_continues_what_vllm_has_inside_a_block():
    """3 N tokens are local, 2 N of them in whole blocks: from there on 5 N are loaded."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sa", ranks=2, dcp=2, blocks=60), pool)
    prompt = TRUNKS[0][: 7 * N + 3]
    for name, tokens, reset in (("long", prompt, True), ("short", prompt[: 3 * N + 1], False)):
        engine.add(name, tokens, 2)
        engine.drain()
        if reset:
            engine.reset_prefix_cache(False)
    engine.add("again", prompt, 2)
    engine.drain()
    assert hits(engine) == 1 and engine.hybrid.counts.hit_tokens.total() == 5 * N
    engine.check_empty()
    pool.close()


@pytest.mark.parametrize("hash_size", [N, N // 4])
def test_a_prompt_that_branches_off_hits_where_a_chunk_ended_inside_a_block(hash_size):
    """Chunks end at 3, 6, 9 and 12 N, blocks at multiples of 2 N."""
    pool = Pool()
    setup = Setup(
        groups="sa", ranks=2, dcp=2, blocks=60, batch=3 * N, hash_size=hash_size, chunk_ends=True
    )
    engine = SimEngine(setup, pool)
    engine.add("first", TRUNKS[0][: 13 * N + 3], 2)
    engine.drain()
    engine.reset_prefix_cache(False)
    engine.add("other", [*TRUNKS[0][: 10 * N + 1], *TRUNKS[1][: 2 * N]], 2)
    engine.drain()
    assert hits(engine) == 1 and engine.hybrid.counts.hit_tokens.total() == 9 * N
    engine.check_empty()
    pool.close()


def test_random_programs_see_no_wrong_bytes():
    """Those of test_simulation in which ranks share blocks."""
    tally = Tally()

    given = os.environ.get("SIM_SEED", "7")  # "random" is for test_simulation, which names it

    @hypothesis.seed(int(given) if given.isdecimal() else 7)
    @hypothesis.settings(
        max_examples=int(os.environ.get("SIM_PROGRAMS", 40)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @hypothesis.given(programs.filter(lambda program: program[0].dcp > 1))
    def play(program):
        setup, operations = program
        Run(setup, tally).play(operations)

    play()
    print(tally.steps, tally.events)
    assert tally.events[SPREAD] > 0 and tally.events[LOADS] > 0
