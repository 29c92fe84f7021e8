# SPDX-License-Identifier: Apache-2.0
"""A request that ends right at a boundary inside a block hands its state off only then."""

import pytest

from .offers import AT_THE_END, SHORT
from .program import TRUNKS, Run, Tally
from .setup import Setup
from .storage import N


@pytest.mark.parametrize("device", ["", "late", "early"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_what_an_aborted_request_left_is_hit(device, ranks, beside):
    run = Run(Setup(groups="sas", hash_size=N // 4, ranks=ranks, device=device), tally := Tally())
    (engine,) = run.engines
    prompt = TRUNKS[0][: N // 2 + 1]
    engine.add("first", prompt, 4)
    engine.step()
    assert engine.requests["first"].num_computed_tokens == N // 2
    held = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.abort("first")
    # The next request could take and write over them.
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == held
    if beside:
        engine.add("beside", TRUNKS[1][: 3 * N], 4)
    engine.drain()
    engine.reset_prefix_cache(False)
    engine.add("again", prompt, 4)
    run.play([])
    assert tally.events[AT_THE_END] == 1
    assert tally.events[SHORT] == 1 and tally.events["hit tokens"] == N // 2


def test_after_a_reset_of_the_store_nothing_of_it_is_saved():
    """Its blocks are given back all the same."""
    run = Run(Setup(groups="sa", hash_size=N // 4), tally := Tally())
    (engine,) = run.engines
    prompt = TRUNKS[0][: N // 2 + 1]
    engine.add("first", prompt, 4)
    engine.step()
    engine.abort("first")
    engine.clear_store()
    engine.drain()
    engine.add("again", prompt, 4)
    run.play([])
    assert not tally.events[AT_THE_END] and not tally.events[SHORT]


@pytest.mark.parametrize("groups", ["aw", "saw"])
def test_what_a_resumed_request_had_generated_is_not_stored(groups):
    """Its steps may end at boundaries past its prompt."""
    run = Run(Setup(groups=groups, batch=N // 2, chunk_ends=True, blocks=60), Tally())
    (engine,) = run.engines
    engine.add("r", TRUNKS[0][:N], 2 * N + 2)
    while engine.requests["r"].num_computed_tokens < 3 * N:
        engine.step()
    engine.reset_prefix_cache(True)
    run.play([])  # no save meets an error
    assert engine.requests["r"].num_preemptions == 1
    assert engine.ranks[0].connector.worker.counts.saved_attention == 1
