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
