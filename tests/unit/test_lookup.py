# SPDX-License-Identifier: Apache-2.0
"""What a rank answers from what its store holds, and the claims behind the answers."""

import math
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_hybrid.core.groups import GroupPlan, Window
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.hit_records import load_keys, used_keys
from lmcache_hybrid.protocol.lookup import MISS, UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.storage.rank_lookup import CANDIDATES, RankLookup
from tests.naive_store import NaiveStore

from .helpers import PLAN, PREFIX, WIDE, N, Ranks, fill, keys_of, make_prefix, put, question, reach


def one_rank(attention: int, states, plan=PLAN) -> Ranks:
    ranks = Ranks(1, plan)
    fill(ranks.stores[0], PREFIX, attention, states, plan)
    return ranks


def ask_one(ranks: Ranks, *args, **kwargs) -> LookupResult:
    return ranks.ask(question(*args, **kwargs))[0]


# One rank


@pytest.mark.parametrize(
    "attention, states, expected",
    [
        (0, (), (0, 0)),
        (4, (4,), (4, 4)),
        (4, (2, 3), (3, 4)),  # the states decide
        (2, (1, 4), (1, 2)),  # a state without its attention pages is no hit
        (0, (4,), (0, 0)),
        (5, (), (0, 5)),  # attention pages without a state are no hit
        (6, (1, 6), (6, 6)),
    ],
)
def test_a_hit_needs_attention_pages_and_states(attention, states, expected):
    assert reach(ask_one(one_rank(attention, states))) == expected


@pytest.mark.parametrize("missing", range(len(PLAN.states)))
def test_a_state_missing_for_one_group_lowers_to_the_next_complete_boundary(missing):
    ranks = one_rank(5, (2, 4))
    del ranks.stores[0].records[keys_of(PREFIX, 3, STATE)[missing]]
    assert reach(ask_one(ranks)) == (2, 5)


def test_a_gap_in_the_attention_pages_ends_the_prefix():
    ranks = one_rank(5, (2, 5))
    del ranks.stores[0].records[keys_of(PREFIX, 3, ATTENTION)[0]]
    assert reach(ask_one(ranks)) == (2, 3)


@pytest.mark.parametrize("group", range(len(WIDE.attention)))
def test_every_attention_group_must_have_its_pages(group):
    ranks = one_rank(5, (2, 5), WIDE)
    del ranks.stores[0].records[keys_of(PREFIX, 3, ATTENTION, WIDE)[group]]
    assert reach(ask_one(ranks)) == (2, 3)


@pytest.mark.parametrize(
    "limit, floor, boundary",
    [
        (6, 0, 5),
        (5, 0, 5),
        (4, 0, 3),
        (2, 0, 0),
        (6, 4, 5),
        (6, 5, 0),  # all of it is cached locally
        (4, 3, 0),
        (99, 0, 5),  # beyond the prompt
    ],
)
def test_a_hit_lies_above_the_floor_and_not_above_the_limit(limit, floor, boundary):
    ranks = one_rank(6, (3, 5))
    assert ask_one(ranks, limit, floor).boundary == boundary
    assert ranks.num_claims == [boundary > 0]


def test_another_prompt_or_other_tags_find_nothing():
    ranks = one_rank(6, (6,))
    assert ask_one(ranks, prefix=make_prefix(6, seed=1)) == MISS
    assert ask_one(ranks, prefix=make_prefix(6, tags=(("user", "a"),))) == MISS


def test_an_unreadable_store_is_a_miss():
    ranks = one_rank(6, (6,))
    ranks.stores[0].readable = lambda: False
    assert ask_one(ranks) == UNAVAILABLE
    assert ranks.pins == 0


def test_a_record_that_goes_away_before_the_claim_is_no_hit():
    ranks = one_rank(6, (2, 5))
    store = ranks.stores[0]
    claim = store.claim
    deep = keys_of(PREFIX, 4, STATE)[0]
    store.claim = lambda located: None if deep in located else claim(located)
    assert reach(ask_one(ranks)) == (2, 6)


def test_load_keys_are_what_a_load_reads_and_no_more():
    keys = load_keys(PREFIX, 1, 3, WIDE)
    assert [(key.label, key.boundary) for key in keys] == [
        ("a0", 2 * N), ("a2", 2 * N), ("a0", 3 * N), ("a2", 3 * N), ("s1", 3 * N),
    ]  # fmt: skip
    assert [key.block_hash for key in keys] == [PREFIX.hashes[i] for i in (1, 1, 2, 2, 2)]


def test_what_a_lookup_found_is_marked_as_used_once_and_by_the_next_at_the_latest():
    ranks = one_rank(6, (2, 4))
    lookup, used = ranks.lookups[0], []
    ranks.stores[0].refresh = used.append
    lookup.answer(question(4))
    assert not used, "the scheduler waits for it"
    lookup.answer(question(2))
    assert used == [used_keys(PREFIX, (4,), PLAN)]
    for _ in range(2):
        lookup.refresh()
        assert used[1:] == [used_keys(PREFIX, (2,), PLAN)]


@pytest.mark.parametrize("floor, limit", [(0, 4), (4, 4)])
def test_a_state_behind_the_limit_is_marked_as_used_too(floor, limit):
    """Else it would be evicted first, as nobody saves it again."""
    ranks, used = one_rank(6, (4, 6)), []
    ranks.stores[0].refresh = used.append
    ranks.ask(msgspec.structs.replace(question(limit, floor), states_at=(6,)))
    assert used == [used_keys(PREFIX, (4, 6), PLAN)]


# Claims


@pytest.mark.parametrize("floor", [0, 2])
def test_an_answer_pins_exactly_what_its_load_reads(floor):
    ranks = one_rank(6, (4,))
    ask_one(ranks, floor=floor)
    assert ranks.stores[0].pins == dict.fromkeys(load_keys(PREFIX, floor, 4, PLAN), 1)


def test_drop_releases_the_claim():
    ranks = one_rank(6, (4,))
    ask_one(ranks)
    ranks.lookups[0].release("other")
    assert ranks.pins
    ranks.lookups[0].release("r")
    ranks.lookups[0].release("r")
    assert ranks.pins == 0 and ranks.num_claims == [0]


def test_the_next_question_replaces_the_claim():
    ranks = one_rank(6, (2, 4))
    ask_one(ranks, limit=4)
    ask_one(ranks, limit=3)
    assert ranks.stores[0].pins == dict.fromkeys(load_keys(PREFIX, 0, 2, PLAN), 1)
    ask_one(ranks, limit=0)
    assert ranks.pins == 0


@pytest.mark.parametrize("answered", [True, False])
def test_a_drop_releases_no_claim_of_a_later_question(answered):
    """One that is made while the drop comes neither."""
    ranks = one_rank(6, (4,))
    lookup, store = ranks.lookups[0], ranks.stores[0]
    if not answered:
        claim = store.claim

        def drop_then_claim(located):
            lookup.release("r", 1)
            return claim(located)

        store.claim = drop_then_claim
    later = msgspec.structs.replace(question(), number=2)
    assert lookup.answer(later).boundary == 4
    lookup.release("r", 1)
    assert ranks.pins and ranks.num_claims == [1]
    lookup.release("r", 2)
    assert ranks.pins == 0 and ranks.num_claims == [0]


def test_a_taken_claim_belongs_to_the_taker():
    ranks = one_rank(6, (4,))
    ask_one(ranks)
    claim = ranks.lookups[0].take_claim("r")
    assert ranks.lookups[0].take_claim("r") is None
    ranks.lookups[0].release("r")
    assert ranks.pins == len(claim.keys)
    claim.release()
    claim.release()
    assert ranks.pins == 0


def test_requests_pin_independently():
    ranks = one_rank(6, (4,))
    ask_one(ranks, request_id="a")
    ask_one(ranks, request_id="b")
    ranks.lookups[0].release("a")
    assert ranks.stores[0].pins == dict.fromkeys(load_keys(PREFIX, 0, 4, PLAN), 1)


actions = st.tuples(
    st.sampled_from(["ask", "drop", "take", "lose"]), st.sampled_from("abc"), st.integers(0, 6)
)


@given(st.lists(actions, max_size=30))
def test_no_pin_outlives_its_request(steps):
    ranks = one_rank(6, (1, 3, 4, 6))
    lookup, store = ranks.lookups[0], ranks.stores[0]
    taken = []
    for action, request_id, number in steps:
        if action == "ask":
            lookup.answer(question(number, number // 3, request_id=request_id))
        elif action == "drop":
            lookup.release(request_id)
        elif action == "take":
            taken.append(lookup.take_claim(request_id))
        elif number:
            store.records.pop(keys_of(PREFIX, number - 1, STATE)[0], None)
        lookup.check_integrity()
    assert len(lookup._claims) <= 3
    for claim in filter(None, taken):
        claim.release()
    for request_id in "abc":
        lookup.release(request_id)
    assert not store.pins and not lookup._claims


def release(lookup: RankLookup) -> None:
    lookup._claims["r"][1].release()


def share(lookup: RankLookup) -> None:
    lookup._claims["other"] = lookup._claims["r"]


def answer_later_question(lookup: RankLookup) -> None:
    lookup._answering = "r", 1


@pytest.mark.parametrize("wrong", [release, share, answer_later_question])
def test_check_integrity_finds_claims_that_are_filed_wrongly(wrong):
    ranks = one_rank(6, (4,))
    ask_one(ranks)
    ranks.lookups[0].check_integrity()
    wrong(ranks.lookups[0])
    with pytest.raises(AssertionError):
        ranks.lookups[0].check_integrity()


# Questions to the store

# An attention group, states, and windows of two, three and no blocks.
MIXED = GroupPlan(N, (0,), (1,), (Window(2, 2), Window(3, 3), Window(4, 0)))


def asked_of(store) -> list[int]:
    """How many keys each question to this store had, from now on."""
    locate, sizes = store.locate, []

    def counted(keys, deadline=math.inf):
        sizes.append(len(keys))
        return locate(keys, deadline)

    store.locate = counted
    return sizes


@pytest.mark.parametrize("hit, questions", [(163, 1), (162, 2), (1, 2), (0, 2)])
def test_a_lookup_asks_two_questions_at_most(hit, questions):
    """128k tokens of blocks of 784; there were 163 questions where only the first state is."""
    prefix = make_prefix(163)
    ranks = Ranks(1)
    fill(ranks.stores[0], prefix, 163, {hit} - {0})
    asked = asked_of(ranks.stores[0])
    assert ranks.ask(question(163, prefix=prefix))[0].boundary == hit
    assert len(asked) == questions


def test_a_lookup_without_pages_asks_one_question():
    ranks = one_rank(0, (4,))
    asked = asked_of(ranks.stores[0])
    assert reach(ask_one(ranks)) == (0, 0)
    assert asked == [6 + len(PLAN.states)]  # those of the deepest boundary with the pages


def test_claims_that_fail_need_no_further_question():
    """Records that are evicted between question and claim: the next boundary is tried."""
    ranks = one_rank(6, (2, 4, 5))
    store = ranks.stores[0]
    asked, claim, tried = asked_of(store), store.claim, []

    def evicting(located):
        tried.append(max(key.boundary for key in located) // N)
        return claim(located) if len(tried) == 3 else None

    store.claim = evicting
    assert ask_one(ranks).boundary == 2
    assert tried == [5, 4, 2] and len(asked) == 2


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 8), st.integers(0, 9), st.sampled_from([1, 2, 3, 4, CANDIDATES]))
def test_a_hit_is_the_deepest_boundary_with_all_that_a_load_reads(data, floor, limit, batch):
    prefix, store = make_prefix(8), NaiveStore()
    every = dict.fromkeys(key for end in range(1, 9) for key in load_keys(prefix, 0, end, MIXED))
    missing = data.draw(st.sets(st.sampled_from(list(every)), max_size=6))
    put(store, [key for key in every if key not in missing])
    asked = asked_of(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmcache_hybrid.storage.rank_lookup.CANDIDATES", batch)
        answer = RankLookup(MIXED, store).answer(LookupRequest("r", prefix, limit, floor))
    whole = [
        end
        for end in range(floor + 1, min(limit, 8) + 1)
        if missing.isdisjoint(load_keys(prefix, floor, end, MIXED))
        and missing.isdisjoint(load_keys(prefix, 0, end, MIXED)[:end])
    ]
    assert answer.boundary == max(whole, default=0)
    assert len(asked) <= 2 or batch < CANDIDATES
    claimed = load_keys(prefix, floor, max(whole), MIXED) if whole else []
    assert store.pins == dict.fromkeys(claimed, 1)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 5), st.integers(0, 6), st.sets(st.integers(1, 6)))
def test_a_lookup_says_which_states_are_stored(data, floor, limit, asked_for):
    """Each with all its window pages, in the same calls, whether or not a hit may end there."""
    prefix, store = make_prefix(6), NaiveStore()
    every = dict.fromkeys(key for end in range(1, 7) for key in load_keys(prefix, 0, end, MIXED))
    missing = data.draw(st.sets(st.sampled_from(list(every)), max_size=6))
    put(store, [key for key in every if key not in missing])
    asked, wanted = asked_of(store), tuple(sorted(asked_for))
    answer = RankLookup(MIXED, store).answer(
        LookupRequest("r", prefix, limit, floor, states_at=wanted)
    )
    pages = len(MIXED.attention)
    assert answer.states == tuple(
        end for end in wanted if missing.isdisjoint(load_keys(prefix, 0, end, MIXED)[end * pages :])
    )
    assert len(asked) <= 2


def test_a_state_that_goes_away_before_the_claim_does_not_count_as_stored():
    ranks = one_rank(6, (2, 5))
    store, claim = ranks.stores[0], ranks.stores[0].claim
    gone = keys_of(PREFIX, 4, STATE)[0]
    store.claim = lambda located: None if gone in located else claim(located)
    answer = ranks.ask(msgspec.structs.replace(question(), states_at=(2, 5)))[0]
    assert (answer.boundary, answer.states) == (2, (2,))


# With boundaries inside a block, which no model with windows has.
INSIDE = GroupPlan(N, (0,), (1, 2), unit=N // 4)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 4 * 4 + 3))
def test_a_hit_inside_a_block_is_the_deepest_with_all_that_a_load_reads(data, floor, units):
    unit, limit = INSIDE.unit, units * INSIDE.unit
    inner = {end: b"%d" % end for end in range(unit, 5 * N, unit) if end % N}
    prefix, store = make_prefix(4).with_inner(inner), NaiveStore()

    def needs(end: int) -> list[RecordKey]:
        """Of a hit, with the pages below the floor, which vLLM has and may be stored or not."""
        return load_keys(prefix, 0, end // N, INSIDE, end % N)

    every = dict.fromkeys(key for end in range(unit, limit + 1, unit) for key in needs(end))
    put(store, data.draw(st.sets(st.sampled_from(list(every)))))
    held = data.draw(st.sampled_from([0, *range(unit, limit + 1, unit)]))
    put(store, needs(held) if held else ())
    asked = asked_of(store)
    request = LookupRequest("r", prefix, limit // N, floor, limit_tail=limit % N)
    answer = RankLookup(INSIDE, store).answer(request)
    ends = range(floor * N + unit, limit + 1, unit)
    hits = [end for end in ends if all(key in store.records for key in needs(end))]
    assert answer.boundary * N + answer.tail == max(hits, default=0)
    deepest = limit // N * N
    third = any(end % N for end in ends if end < deepest and needs(end)[-2] in store.records)
    assert len(asked) <= 2 + third


@pytest.mark.parametrize("late", [1, 2])
def test_a_lookup_that_runs_out_of_time_claims_nothing(late, monkeypatch):
    """Looked at before every question to the store and before every claim."""
    ranks = one_rank(6, (2,))
    store, now = ranks.stores[0], time.monotonic()
    asked = asked_of(store)
    monkeypatch.setattr(time, "monotonic", lambda: now + (len(asked) >= late))
    timed = msgspec.structs.replace(question(), deadline=now + 0.5)
    assert ranks.ask(timed) == [UNAVAILABLE], "what is stored is not known"
    assert len(asked) == late and not ranks.pins


def test_a_lookup_ends_when_its_request_is_dropped():
    ranks = one_rank(6, (2,))
    lookup, locate = ranks.lookups[0], ranks.stores[0].locate
    asked = []

    def drop_then_locate(keys, deadline):
        asked.append(keys)
        lookup.release("r")
        return locate(keys, deadline)

    ranks.stores[0].locate = drop_then_locate
    assert ask_one(ranks) == UNAVAILABLE
    assert len(asked) == 1 and not ranks.pins
