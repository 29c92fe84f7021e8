# SPDX-License-Identifier: Apache-2.0
"""The boundary on which all ranks agree, and the rounds of questions that it takes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_hybrid.protocol.agreement import agree
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest, LookupResult

from .helpers import PLAN, PREFIX, Ranks, fill, make_prefix, question, reach


def content(blocks: int = 6):
    return st.tuples(st.integers(0, blocks), st.sets(st.integers(1, blocks)))


def ranks_with(contents) -> Ranks:
    ranks = Ranks(len(contents))
    for store, (attention, states) in zip(ranks.stores, contents):
        fill(store, PREFIX, attention, states)
    return ranks


@settings(max_examples=300)
@given(st.lists(content(), min_size=1, max_size=4), st.integers(0, 7), st.integers(0, 6))
def test_agree_is_the_deepest_common_boundary(contents, limit, floor):
    ranks = ranks_with(contents)
    answer = agree(ranks.ask, question(limit, floor))
    common = [
        end
        for end in range(floor + 1, min(limit, 6) + 1)
        if all(end <= attention and end in states for attention, states in contents)
    ]
    deepest = max(common, default=0)
    assert answer.boundary == deepest
    expected = 0 if limit == 0 else min(attention for attention, _ in contents)
    assert answer.attention == expected, "counted past the limit: what is stored stays stored"
    claimed = load_keys(PREFIX, floor, deepest, PLAN) if deepest else []
    for store, lookup in zip(ranks.stores, ranks.lookups):
        assert store.pins == dict.fromkeys(claimed, 1)
        assert len(lookup._claims) == bool(deepest)


@pytest.mark.parametrize(
    "contents, boundary, trips",
    [
        ([(4, {4})], 4, 1),
        ([(4, {4})] * 4, 4, 1),
        ([(4, {2, 4}), (5, {2, 4, 5})], 4, 2),
        ([(6, {2, 4, 6}), (6, {2, 5}), (6, {2, 6})], 2, 3),
        ([(0, set()), (0, set())], 0, 1),
        ([(6, {6}), (0, set())], 0, 2),  # the second makes the first rank let go
    ],
)
def test_each_boundary_that_a_rank_lacks_takes_one_more_round_trip(contents, boundary, trips):
    ranks = ranks_with(contents)
    assert agree(ranks.ask, question()).boundary == boundary
    assert len(ranks.questions) == trips


def test_the_attention_prefix_is_the_shortest_of_all_ranks():
    ranks = ranks_with([(5, {2}), (3, {2})])
    assert reach(agree(ranks.ask, question())) == (2, 3)


@pytest.mark.parametrize(
    "contents, limit, boundary, states",
    [
        ([(6, {2, 4, 6}), (6, {2, 5, 6})], 4, 2, (6,)),
        ([(6, {2, 4, 6}), (6, {2, 5})], 4, 2, ()),
        ([(6, {4, 6}), (0, {6})], 4, 0, (6,)),
        ([(6, {6})], 0, 0, (6,)),
    ],
)
def test_a_state_that_one_rank_lacks_does_not_count_as_stored(contents, limit, boundary, states):
    ranks = ranks_with(contents)
    asked = msgspec.structs.replace(question(limit), states_at=(4, 5, 6))
    answer = agree(ranks.ask, asked)
    assert (answer.boundary, answer.states) == (boundary, states)
    assert ranks.num_claims == [boundary > 0] * len(contents)


def test_a_rank_that_does_not_answer_is_a_miss():
    ranks = ranks_with([(6, {6})] * 2)
    ranks.silent = True
    assert agree(ranks.ask, question()) == UNAVAILABLE
    assert len(ranks.questions) == 1


def test_a_rank_that_falls_silent_between_rounds_is_a_miss():
    ranks = ranks_with([(6, {6, 2}), (6, {5, 2})])

    def ask(q: LookupRequest) -> list[LookupResult]:
        ranks.silent = bool(ranks.questions)
        return ranks.ask(q)

    assert agree(ask, question()) == UNAVAILABLE


def test_messages_survive_the_wire():
    asked = question(prefix=make_prefix(2, tags=(("user", "a"),)))
    raw = msgspec.msgpack.encode(asked)
    assert msgspec.msgpack.decode(raw, type=LookupRequest) == asked
    for answer in (LookupResult(3, 4, (("here", 2), ("there", 1)), states=(5,)), UNAVAILABLE):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=LookupResult) == answer
