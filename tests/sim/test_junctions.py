# SPDX-License-Identifier: Apache-2.0
"""Junctions inside a block (``enable_mamba_shared_prefix_checkpoint``) are stored and hit."""

import pytest

from .offers import INSIDE, JUNCTION
from .program import TRUNKS, Run, Tally
from .setup import Setup
from .storage import N

# vLLM drops the last hash of a match beside a drafter: the junction lies half a block before.
BRANCH = 5 * N


def play(device: str, **setup) -> Tally:
    """Three prompts that part inside a block, then the last once more from the store."""
    shape = dict(groups="sas", blocks=80, batch=20 * N, hash_size=N // 2, drafts=1, mtp=True)
    shape["old_hashes"] = True
    run = Run(Setup(**{**shape, "device": device, **setup}), tally := Tally())
    (engine,) = run.engines
    prompts = [TRUNKS[0][: BRANCH + 3] + TRUNKS[i][200 : 200 + 5 * N + 1] for i in range(3)]
    for number, prompt in enumerate((*prompts, prompts[-1])):
        if number == len(prompts):
            engine.reset_prefix_cache(False)
        engine.add(f"r{number}", prompt, 3)
        engine.drain()
        if number < len(prompts) - 1:
            # What the store knows of the prompts reaches to a block's end, and goes before.
            engine.clear_store()
    run.play([])
    return tally


@pytest.mark.parametrize("device", ["", "late"])
@pytest.mark.parametrize("interior", [0, 1])
def test_a_state_inside_a_block_is_stored(device, interior):
    tally = play(device, junctions=True, interior=interior)
    assert tally.events[JUNCTION] and tally.events[INSIDE]
    assert not tally.events["offers dropped"]
    assert tally.events["hits"]


def test_without_the_option_no_junction_lies_inside_a_block():
    """So the other test sees what it says."""
    tally = play("", junctions=False)
    assert tally.events["states saved"] and not tally.events[JUNCTION]


@pytest.mark.parametrize("groups, drafts", [("sa", 0), ("sas", 0), ("sa", 1), ("ds", 1)])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_block_that_another_request_computes_now_is_not_copied(groups, drafts, runner):
    """Only the state of the first tokens is cached when two longer prompts arrive together."""
    shape = dict(groups=groups, hash_size=N // 4, drafts=drafts, mtp=drafts > 0, runner=runner)
    run = Run(Setup(**shape, blocks=80, batch=20 * N, junctions=drafts > 0), Tally())
    (engine,) = run.engines
    engine.add("short", TRUNKS[0][: N // 4 + 1] + TRUNKS[1][: 2 * drafts], 3)
    engine.drain()
    engine.clear_store()
    for number in range(3):
        engine.add(f"r{number}", TRUNKS[0][: 4 * N + 1], 3)
    engine.step()
    assert [bool(engine.requests[f"r{i}"].num_computed_tokens) for i in range(3)] == [1, 0, 0]
    run.play([])


def test_a_block_that_another_request_goes_on_in_is_copied():
    run = Run(Setup(groups="sa", blocks=80, batch=20 * N, hash_size=N // 2), Tally())
    (engine,) = run.engines
    engine.add("short", TRUNKS[0][: N // 2 + 1], 4)
    engine.step()
    engine.step()  # keeps the state for others
    engine.add("long", TRUNKS[0][: 4 * N + 1], 3)
    engine.step()
    assert engine.requests["long"].num_computed_tokens
    assert not engine.requests["short"].is_finished()
    run.play([])
