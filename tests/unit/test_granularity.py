# SPDX-License-Identifier: Apache-2.0
"""What hits at boundaries leave out is counted, and who needs a finer unit is told once."""

from dataclasses import replace

import pytest

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan, Window, suggested_unit
from lmcache_hybrid.scheduler import unit_advice
from lmcache_hybrid.scheduler.unit_advice import ShortPromptAdvice

from .helpers import PLAN, N, make_request
from .scheduler_rig import Rig


@pytest.mark.parametrize(
    "block_size, wanted, unit",
    [
        (784, 64, 112),
        (544, 64, 32),
        (8304, 64, 48),
        (384, 64, 64),
        (128, 64, 64),
        (32, 64, 16),
        (16, 64, 0),
        (784, 16, 16),
    ],
)
def test_the_suggested_unit_is_a_divisor_near_64(block_size, wanted, unit):
    assert suggested_unit(block_size, wanted) == unit
    assert not unit or block_size % unit == 0


@pytest.mark.parametrize("unit", [N, N // 4])
def test_tokens_past_the_last_boundary_are_counted(unit):
    one = Rig(plan=PLAN.with_unit(unit), hash_block_size=unit)
    lengths = (1, unit, unit + 1, N - 1, N, N + 1, 2 * N + 3)
    for number, tokens in enumerate(lengths):
        one.match(make_request(f"r{number}", tokens=tokens, hash_block_size=unit))
    lost = sum((tokens - 1) % unit for tokens in lengths)
    assert one.scheduler.counts.granularity_tokens == lost > 0


def test_a_request_counts_once():
    one, request = Rig(), make_request(tokens=N)
    one.match(request)
    one.match(request)
    assert one.scheduler.counts.granularity_tokens == N - 1


BLOCKS = GroupPlan(block_size=384, attention=(1,), states=(0,))
WINDOWS = GroupPlan(384, attention=(1,), states=(), windows=(Window(0, 2),))


@pytest.mark.parametrize(
    "plan, short, lines",
    [
        (BLOCKS, 3, 1),
        (BLOCKS, 2, 0),
        (BLOCKS.with_unit(64), 3, 0),
        (WINDOWS, 3, 0),
        (replace(BLOCKS, windows=WINDOWS.windows), 3, 0),
        (replace(BLOCKS, split=((0, 3),)), 3, 0),
    ],
)
def test_who_needs_a_unit_is_told_once(plan, short, lines, monkeypatch):
    """``short`` of 5 requests are shorter than a block."""
    said = []
    monkeypatch.setattr(unit_advice.logger, "info", lambda text, *args: said.append(text % args))
    one = ShortPromptAdvice(plan, Ledger("scheduler", SchedulerCounts()))
    for number in range(3 * unit_advice.REQUESTS):
        one.add(make_request(tokens=384 if number % 5 < short else 385))
    assert len(said) == lines
    if lines:
        assert said[0] == (
            "60 of 100 requests were shorter than a block of 384 tokens, which LMCache cannot "
            "restore; --prefix-match-unit 64 would let them hit."
        )
