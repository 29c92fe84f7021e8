# SPDX-License-Identifier: Apache-2.0
"""What the acceptance test asks, and what fits."""

import random

import pytest

from lmcache_hybrid.tools.accept import prompts
from lmcache_hybrid.tools.accept.prompts import Limits, length_of, limits_of, plan_prompts

from .accept_engine import FACTS, ORDINARY


@pytest.mark.parametrize("size", [16, 400, 784, 8304])
def test_prompts_are_around_multiples_of_n_and_share_nothing(size: int) -> None:
    plan = plan_prompts(Limits(size, 20 * size, 100 * size), ORDINARY)
    assert not plan.left_out
    lengths = {case.name: [len(step) for step in case.steps] for case in plan.cases}
    assert lengths["N"] == [size] * 2 and lengths["N+1"] == [size + 1] * 2
    assert lengths["2N-1"] == [2 * size - 1] * 2 and lengths["2N"] == [2 * size] * 2
    assert lengths["2N+1"] == [2 * size + 1] * 2 and len(lengths["batch"]) == 4
    assert lengths["longest"] == [20 * size - prompts.ANSWER_TOKENS] * 2
    by_name = {case.name: case.steps for case in plan.cases}
    first, longer, again = by_name["extended"]
    assert longer[: len(first)] == first and again == longer
    # The longer one starts inside the second block and ends in the third: another boundary.
    assert (len(first) - 1) // size == 1 and (len(longer) - 1) // size == 2
    trunk, one, other, _ = by_name["branch"]
    assert one[: 2 * size] == other[: 2 * size] == trunk[: 2 * size]
    assert one[: 3 * size] != other[: 3 * size] and len(one) > 3 * size
    starts = [step[:size] for case in plan.cases for step in set(case.steps)]
    assert len(set(starts)) == len(starts) - 2 * 1 - 1  # of branch and extended
    assert plan == plan_prompts(Limits(size, 20 * size, 100 * size), ORDINARY)


@pytest.mark.parametrize("size", [16, 400, 784, 8304])
@pytest.mark.parametrize("blocks", [0.5, 1, 1.5, 2, 2.5, 3.5, 4, 8])
def test_prompts_fit_in_a_small_context(size: int, blocks: float) -> None:
    limits = Limits(size, int(size * blocks) + 1, int(size * blocks) + 1)
    plan = plan_prompts(limits, ORDINARY)
    for case in plan.cases:
        assert length_of(case) + prompts.ANSWER_TOKENS <= limits.longest
    names = {case.name for case in plan.cases} | set(plan.left_out)
    assert names >= {"N", "N+1", "2N-1", "2N", "2N+1", "extended", "branch", "chat", "batch"}
    assert bool(plan.cases) == (limits.longest >= size + prompts.ANSWER_TOKENS)


def test_limits_are_context_cache_pool_and_wish() -> None:
    assert limits_of(FACTS) == Limits(16, 512, (4000 // 2 - 12) * 16)
    assert limits_of(FACTS, longest=500).longest == 500
    assert limits_of(FACTS, longest=10).longest == 4 * 16
    small_cache = {**FACTS, "num_blocks": 60}
    assert limits_of(small_cache) == Limits(16, 18 * 16, 18 * 16)
    # Two of vLLM's blocks hold N tokens.
    assert limits_of({**small_cache, "paged_blocks": 2}) == Limits(16, 9 * 16, 9 * 16)
    small_pool = {**FACTS, "pool_bytes": 50_000}
    assert limits_of(small_pool).longest == 16 * 16
    assert limits_of({**FACTS, "max_model_len": 99_999, "num_blocks": 40_000}).longest == 16_384
    assert limits_of({**FACTS, "device_type": "cpu", "max_model_len": 99_999}).longest == 4096
    # Four blocks at least, however long they are.
    assert limits_of({**FACTS, "block_size": 8304, "max_model_len": 99_999}).longest == 4 * 8304


def test_checkpoints_take_room_too() -> None:
    # The pool holds half of 50 kB, less three boundaries' states, in blocks of 1 kB.
    small = {**FACTS, "pool_bytes": 50_000}
    assert limits_of(small).together == 16 * 16
    # A state of 3 kB with each block, or with every second one.
    assert limits_of({**small, "checkpoint_tokens": 16}).together == 4 * 16
    assert limits_of({**small, "checkpoint_tokens": 32}).together == 6 * 16
    cache = {**FACTS, "num_blocks": 104, "checkpoint_tokens": 16}
    assert limits_of(cache).together == 10 * 16


def test_ends_of_chunks_take_room_in_the_pool_only() -> None:
    small = {**FACTS, "pool_bytes": 50_000}
    # A chunk is what fits in a step, in whole blocks, and one block at least.
    for budget, checkpoint in ((1, 16), (16, 16), (31, 16), (47, 32)):
        room = limits_of({**small, "checkpoint_tokens": checkpoint})
        assert limits_of({**small, "chunk_budget": budget}) == room
    assert limits_of({**FACTS, "num_blocks": 104, "chunk_budget": 16}).together == 40 * 16


def test_another_prefix_leaves_the_rest_alone() -> None:
    ids = tuple(random.Random(0).choices(ORDINARY, k=100))
    other = prompts.other_prefix(ids, 64, ORDINARY)
    assert other[64:] == ids[64:] and other[:64] != ids[:64] and len(other) == 100
