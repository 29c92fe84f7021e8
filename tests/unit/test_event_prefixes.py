# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are announced, from what ranks report."""

import random
import sys
from dataclasses import replace
from functools import partial

import pytest

from lmcache_hybrid.core.groups import Window
from lmcache_hybrid.protocol.record_reports import DISK, RAM, REMOTE, RankReport, RecordName
from lmcache_hybrid.scheduler import event_prefixes as module
from lmcache_hybrid.scheduler.event_prefixes import AnnouncedPrefixes

from .helpers import PLAN, WIDE, WINDOWS

(PAGES,) = PLAN.attention
STATES = PLAN.states
TAGS = b"t" * 16
# One that holds up to 60 blocks.
LONG = replace(WINDOWS, windows=(Window(1, 60),))


def block(at: int, branch: int = 0) -> bytes:
    return bytes([branch, at]) * 16


class Told:
    """A chain of learned blocks, ranks that report, and a consumer."""

    def __init__(self, plan=PLAN, ranks: int = 1, blocks: int = 4) -> None:
        self.plan, self.ranks = plan, ranks
        self.prefixes = AnnouncedPrefixes(plan, ranks)
        self.known: dict[tuple[bytes, int], int] = {}
        self.learn(blocks)

    def learn(self, blocks: int, branch: int = 0, root: int = 0) -> None:
        """Blocks ``root`` to ``blocks`` of a branch that leaves the trunk after ``root``."""
        parent = (block(root - 1), TAGS) if root else None
        for at in range(root, blocks):
            key = block(at, branch), TAGS
            self.prefixes.learn(key, parent, key[0])
            parent = key

    def report(self, *changes, rank: int = 0, serving: bool = True) -> "Told":
        """``changes``: (block hash, group, tier)."""
        named = tuple((RecordName(group, at, TAGS), tier) for at, group, tier in changes)
        self.prefixes.apply(RankReport(rank, 0, named, serving, False))
        return self

    def everywhere(self, *changes) -> "Told":
        for rank in range(self.ranks):
            self.report(*changes, rank=rank)
        return self

    def settle(self) -> list:
        """Let the consumer take the news; returns them, withdrawals with None."""
        removed, stored = self.prefixes.settle()
        for block, group, tier in removed:
            assert self.known.pop((block, group)) == tier
        for block, group, tier in stored:
            assert (block, group) not in self.known
            self.known[block, group] = tier
        self.prefixes.check_integrity()
        return [(b, g, None) for b, g, _ in removed] + [(b, g, t) for b, g, t in stored]

    @property
    def blocks(self) -> int:
        """How many are remembered."""
        return len(self.prefixes._nodes)

    def announced(self, group: int) -> list[int]:
        """Numbers of the trunk's blocks that are announced in a group."""
        self.settle()
        return sorted(at[1] for at, each in self.known if each == group and at[0] == 0)


def pages(last: int, tier=RAM, branch: int = 0, first: int = 0, groups=(PAGES,)) -> list:
    return [(block(at, branch), g, tier) for at in range(first, last) for g in groups]


def states(at: int, tier=RAM, branch: int = 0, groups=STATES) -> list:
    return [(block(at, branch), group, tier) for group in groups]


def test_a_boundary_is_announced_with_all_its_states_and_pages_only() -> None:
    told = Told()
    told.everywhere(*pages(4))
    assert told.settle() == []  # pages alone are no hit
    told.everywhere(*states(2)[:-1])
    assert told.settle() == []
    told.everywhere(states(2)[-1])
    # Pages up to the boundary, and states at it: the first blocks come first.
    news = told.settle()
    assert [(at[0], g) for at, g, _ in news if g == PAGES] == [(0, PAGES)] * 3
    assert [at for at, _, _ in news] == sorted(at for at, _, _ in news)
    assert told.announced(PAGES) == [0, 1, 2]
    assert all(told.announced(group) == [2] for group in STATES)


def test_a_state_without_its_pages_is_not_announced() -> None:
    told = Told()
    told.everywhere(*states(2), *pages(3, first=1))
    assert told.settle() == []
    told.everywhere(*pages(1))
    assert told.announced(PAGES) == [0, 1, 2]


def test_nothing_is_announced_before_every_rank_holds_it() -> None:
    told = Told(ranks=2)
    told.report(*pages(3), *states(2), rank=0)
    told.report(*pages(3), *states(2)[1:], rank=1)
    assert told.settle() == []
    told.report(states(2)[0], rank=1)
    assert told.announced(PAGES) == [0, 1, 2]
    told.report((block(1), PAGES, None), rank=1)
    assert told.announced(PAGES) == [] and not told.known


def test_an_evicted_state_withdraws_pages_that_only_it_needs() -> None:
    told = Told()
    told.everywhere(*pages(4), *states(1), *states(3)).settle()
    told.everywhere((block(3), STATES[0], None))
    news = told.settle()
    # The deepest first; the other states of the boundary are of no use either.
    assert {at for at, _, _ in news} == {block(3), block(2)}
    assert [at for at, _, _ in news] == sorted((at for at, _, _ in news), reverse=True)
    assert told.announced(PAGES) == [0, 1] and told.announced(STATES[0]) == [1]
    told.everywhere((block(3), STATES[0], RAM))
    assert told.announced(STATES[1]) == [1, 3]


def test_an_evicted_page_withdraws_every_boundary_behind_it_on_all_branches() -> None:
    told = Told()
    told.learn(4, branch=1, root=2)
    told.everywhere(*pages(4), *pages(4, branch=1, first=2), *states(0))
    told.everywhere(*states(3), *states(3, branch=1))
    assert len({at for at, group in told.known if group == STATES[0]}) == 0
    told.settle()
    assert len({at for at, group in told.known if group == STATES[0]}) == 3
    told.everywhere((block(1), PAGES, None))
    assert told.announced(PAGES) == [0] and told.announced(STATES[0]) == [0]
    assert {at for at, _ in told.known} == {block(0)}


def test_the_slowest_rank_decides_on_the_tier() -> None:
    told = Told(ranks=2)
    told.everywhere(*pages(1), *states(0)).settle()
    assert set(told.known.values()) == {RAM}
    told.report((block(0), PAGES, DISK), rank=1)
    assert told.settle() == [(block(0), PAGES, None), (block(0), PAGES, DISK)]
    told.report((block(0), PAGES, REMOTE), rank=0)
    assert told.settle()[-1] == (block(0), PAGES, REMOTE)


def test_all_attention_groups_count() -> None:
    told = Told(WIDE)
    told.everywhere(*pages(2, groups=(0,)), (block(1), 1, RAM))
    assert told.settle() == []
    told.everywhere(*pages(2, groups=(2,)))
    assert told.announced(0) == told.announced(2) == [0, 1]


def test_a_boundary_needs_the_last_pages_of_its_windows() -> None:
    told = Told(WINDOWS)  # a window of two blocks
    told.everywhere(*pages(4, groups=(0,)), (block(3), 1, RAM))
    assert told.settle() == []
    told.everywhere((block(2), 1, RAM))
    assert told.announced(0) == [0, 1, 2, 3] and told.announced(1) == [2, 3]
    told.everywhere((block(2), 1, None))
    assert told.announced(0) == []


def test_what_was_found_at_the_start_is_announced_once_it_is_learned() -> None:
    told = Told(blocks=0)
    told.everywhere(*pages(2), *states(1))
    assert told.settle() == []  # nobody knows yet which block comes after which
    told.learn(2)
    assert told.announced(PAGES) == [0, 1]


def test_a_rank_that_loads_nothing_withdraws_all_until_it_does_again() -> None:
    told = Told(ranks=2)
    told.everywhere(*pages(2), *states(1)).settle()
    told.report(rank=1, serving=False).settle()
    assert told.known == {}
    told.report((block(0), PAGES, DISK), rank=0).settle()
    assert told.known == {}
    told.report(rank=1).settle()
    assert told.known[block(0), PAGES] == DISK and told.announced(STATES[0]) == [1]


def test_everything_is_said_again_to_consumers_that_forgot() -> None:
    told = Told()
    told.everywhere(*pages(2), *states(1)).settle()
    before, told.known = told.known, {}
    told.prefixes.unsay()
    told.settle()
    assert told.known == before


def test_a_reset_withdraws_and_forgets_all() -> None:
    told = Told()
    told.everywhere(*pages(4), *states(3)).settle()
    told.prefixes.forget()
    told.settle()
    assert told.known == {} and told.blocks == 0


def test_blocks_that_nobody_holds_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT_UNHELD", 8)
    told = Told(blocks=2)
    told.everywhere(*pages(2), *states(1)).settle()
    for branch in range(1, 20):
        told.learn(3, branch, root=2)
    told.settle()
    assert told.blocks == 2 + 8
    told.everywhere(*pages(2, tier=None), *states(1, tier=None)).settle()
    assert told.blocks == 2 + 8  # the branches build on them
    told.everywhere((block(2, 19), PAGES, RAM), (block(2, 19), PAGES, None)).settle()
    assert told.blocks == 2 + 7


def test_what_a_prompt_builds_on_stays_while_it_is_learned(monkeypatch) -> None:
    """Boundaries inside blocks: nothing builds yet on the block before the second one."""
    monkeypatch.setattr(module, "KEPT_UNHELD", 2)
    told = Told(blocks=1)
    told.learn(1, branch=1)
    oldest = block(0), TAGS
    told.prefixes.learn((b"inside the first block", TAGS), None, "first")
    told.prefixes.learn((b"inside the second block", TAGS), oldest, "second")
    told.settle()
    assert told.prefixes.knows(oldest), "a block that something builds on"
    assert told.blocks == 3


@pytest.mark.parametrize("plan", [PLAN, WIDE, WINDOWS], ids=["states", "wide", "windows"])
def test_what_is_announced_is_what_a_lookup_would_find(plan) -> None:
    """Random reports of two ranks against the rule, block by block."""
    rng, told = random.Random(4), Told(plan, ranks=2, blocks=5)
    told.learn(5, branch=1, root=2)
    places = [(0, at) for at in range(5)] + [(1, at) for at in range(2, 5)]
    held: list[set] = [set(), set()]
    for _ in range(3000):
        rank, (branch, at) = rng.randrange(2), rng.choice(places)
        group, tier = rng.choice(plan.groups), rng.choice((RAM, RAM, RAM, None))
        change = (block(at, branch), group)
        (held[rank].add if tier is not None else held[rank].discard)(change)
        told.report((*change, tier), rank=rank)
        if rng.random() < 0.3:
            told.settle()
            both = held[0] & held[1]
            boundaries = expected(both, plan, places)
            assert expected(set(told.known), plan, places) == boundaries
            assert set(told.known) <= both
            # A consumer that looks at one group of states only is right, too.
            ends = {block(at, branch) for branch, at in boundaries}
            assert all(at in ends for at, group in told.known if group in plan.states)


def lines_of(function) -> int:
    """How many lines of event_prefixes.py run: the work, whatever the machine."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("order", ["first", "last", "any"])
@pytest.mark.parametrize("plan", [PLAN, LONG], ids=["states", "windows"])
def test_the_work_grows_with_the_blocks_and_not_with_their_square(plan, order) -> None:
    """Of a prompt with a boundary at each block, told at once or block by block, and then gone."""

    def work(blocks: int, each: int) -> int:
        told = Told(plan, blocks=blocks)
        places = list(range(blocks))
        if order == "any":
            random.Random(1).shuffle(places)
        elif order == "last":
            places.reverse()

        def step(at: int, tier) -> None:
            for place in places[at : at + each]:
                told.everywhere(*((block(place), group, tier) for group in plan.groups))
            told.prefixes.settle()

        total = sum(lines_of(partial(step, at, RAM)) for at in range(0, blocks, each))
        told.prefixes.check_integrity()
        assert sum(node.ready for node in told.prefixes._nodes.values()) == blocks
        return total + (lines_of(partial(step, 0, None)) if each == blocks else 0)

    assert work(240, each=240) < 2.5 * work(120, each=120)
    if order == "first":  # as a prompt is computed
        assert work(240, each=4) < 2.5 * work(120, each=4)


def chain(branch: int, at: int) -> list[bytes]:
    return [block(i, branch if i >= 2 else 0) for i in range(at + 1)]


def expected(held: set, plan, places) -> set:
    """Boundaries that hit where ``held`` is all there is, by vLLM's rule."""

    def hit(branch: int, at: int) -> bool:
        blocks = chain(branch, at)
        return (
            all((each, g) in held for each in blocks for g in plan.attention)
            and all((blocks[-1], g) in held for g in plan.states)
            and all((e, w.group) in held for w in plan.windows for e in blocks[-w.blocks :])
        )

    return {place for place in places if hit(*place)}
