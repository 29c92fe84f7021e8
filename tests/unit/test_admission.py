# SPDX-License-Identifier: Apache-2.0
"""Which boundary a request is offered, and what it loads."""

import pytest
from vllm.v1.request import Request

from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.metadata import LoadSpec
from lmcache_hybrid.scheduler.prompt import prefix_of

from .helpers import PLAN, WIDE, WINDOWS, Later, N, Ranks, make_request, put
from .scheduler_rig import Rig, all_offers, attention_of, table
from .test_load_choices import Given


@pytest.mark.parametrize(
    "tokens, hit",
    [
        (N - 1, 0),
        (N, 0),  # its last token is computed: a state that has seen it is too deep
        (N + 1, 1),
        (3 * N - 1, 2),
        (3 * N, 2),
        (3 * N + 1, 3),
    ],
)
def test_a_hit_leaves_the_last_token_to_compute(tokens, hit):
    long = make_request("long", 4 * N)
    rig = Rig().holds(long, 4, 1, 2, 3, 4)
    assert rig.match(make_request(tokens=tokens)) == (hit * N, hit > 0)


def test_a_hit_goes_to_the_state_boundary():
    request = make_request(tokens=5 * N + 1)
    rig = Rig().holds(request, 5, 1, 3)
    assert rig.match(request) == (3 * N, True)
    counts = rig.scheduler.counts
    assert not counts.lookups, "reported before the end of the pass"
    rig.step()
    rig.step()
    assert counts.lookups == {"hit": 1}
    assert (counts.lost_hits, counts.lost_tokens) == (1, 2 * N)


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_must_hold_it(ranks):
    request = make_request(tokens=5 * N)
    rig = Rig(ranks).holds(request, 4, 1, 2, 4)
    last = rig.ranks.stores[-1]
    del last.records[load_keys(prefix_of(request, N, 1), 0, 4, PLAN)[-1]]
    assert rig.match(request) == (2 * N, True)


def test_waiting_requests_ask_once():
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request) == rig.match(request) == (3 * N, True)
    assert len(rig.ranks.questions) == 1
    other = make_request("miss", 5 * N)
    other_rig = Rig()
    assert other_rig.match(other) == other_rig.match(other) == (0, False)
    assert len(other_rig.ranks.questions) == 1


def test_less_in_the_local_cache_asks_again():
    """The claim starts at the old floor, so the blocks below it are not pinned."""
    request = make_request(tokens=4 * N)
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request, 2 * N) == (N, True)
    assert rig.match(request, N) == (2 * N, True)
    assert [q.floor for q in rig.ranks.questions] == [2, 1]


def test_more_in_the_local_cache_needs_no_new_question():
    request = make_request(tokens=4 * N)
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request, 0) == (3 * N, True)
    assert rig.match(request, 2 * N) == (N, True)
    rig.scheduler.update_state_after_alloc(request, table(request), N)
    (load,) = rig.step().loads
    assert (load.start, load.boundary) == (2, 3)


@pytest.mark.parametrize("computed", [3 * N, 4 * N])
def test_nothing_to_load_where_the_local_cache_is_as_deep(computed):
    request = make_request(tokens=5 * N)
    rig = Rig().holds(request, 4, 3)
    assert rig.match(request, computed) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    metadata = rig.step({"r": N}, {"r": table(request)})
    assert not metadata.loads
    assert rig.ranks.pins == 0


def test_a_claim_that_the_local_cache_overtook_is_dropped():
    request = make_request(tokens=5 * N)
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request, 0) == (3 * N, True)
    assert rig.match(request, 3 * N) == (0, False)
    assert rig.step().released == (("r", 1),)
    assert rig.ranks.pins == 0 and rig.ranks.num_claims == [0]


def test_a_claim_is_dropped_when_vllm_takes_none_of_it():
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request)[0]
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert rig.step().released == (("r", 1),)
    assert rig.ranks.pins == 0


@pytest.mark.parametrize("limit, hit", [(3 * N, 3 * N), (3 * N + 1, 0)])
def test_small_hits_are_not_worth_a_load(limit, hit):
    request = make_request()
    rig = Rig(min_retrieve_tokens=limit).holds(request, 3, 3)
    assert rig.match(request) == (hit, hit > 0)
    assert rig.step().released == (() if hit else (("r", 1),))


@pytest.mark.parametrize("unread", [False, True], ids=["short", "unread"])
@pytest.mark.parametrize(
    "held, stored", [((2, 5), []), ((2, 4), [5]), ((5,), [2]), ((4,), [2, 5])], ids=str
)
def test_what_is_found_and_not_loaded_is_stored_where_it_is_missing(held, stored, unread):
    """Of a hit that is too short, or must not be read, nor are its chunks' ends stored again."""
    request = make_request(tokens=5 * N + 1)
    request.skip_reading_prefix_cache = unread
    rig = Rig(min_retrieve_tokens=0 if unread else 9 * N).holds(request, 5, *held)
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    saves = [
        rig.forward(request, 2 * N, all_offers(2)),
        rig.forward(request, 3 * N + 1, all_offers(held[-1]) + all_offers(5)),
    ]
    assert [end for save in saves if save for end, _ in save.states] == stored
    assert not any(map(attention_of, saves))


@pytest.mark.parametrize("why", ["short", "unread", "slow", "loaded"])
def test_windows_that_were_found_are_not_stored_again(why):
    request = make_request(tokens=5 * N + 1)
    rig = Rig(
        plan=WINDOWS,
        policy=Given(None) if why == "slow" else None,
        min_retrieve_tokens=9 * N if why == "short" else 0,
    )
    put(rig.ranks.stores[0], load_keys(prefix_of(request, N, 1), 0, 5, WINDOWS))
    request.skip_reading_prefix_cache = why == "unread"
    if why == "loaded":
        rig.admit(request)
        rig.loaded(request)
        request.num_computed_tokens = 5 * N
        assert rig.forward(request, 1) is None
    else:
        assert rig.match(request) == (0, False)
        rig.scheduler.update_state_after_alloc(request, table(request), 0)
        assert rig.forward(request, 5 * N + 1) is None


@pytest.mark.parametrize(
    "limit, computed, hit", [(2 * N, 0, 2), (2 * N, N, 3), (3 * N - 1, 0, 2), (99 * N, 0, 4)]
)
def test_max_tokens_per_load(limit, computed, hit):
    request = make_request(tokens=4 * N + 1)
    rig = Rig(max_tokens_per_load=limit).holds(request, 4, 1, 2, 3, 4)
    assert rig.match(request, computed) == (hit * N - computed, True)


@pytest.mark.parametrize("held, stored", [(0, [0, 1, 2]), (2, [2]), (3, [])])
def test_a_request_that_must_not_read_stores_what_is_missing(held, stored):
    """Prompt log-probabilities and pooling need every token computed, and nothing stored twice."""
    request = make_request()
    request.skip_reading_prefix_cache = True
    rig = Rig()
    if held:
        rig.holds(request, held, held)
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    save = rig.forward(request, 2 * N, all_offers(2))
    last = rig.forward(request, N + 1, all_offers(3))
    assert attention_of(save) + attention_of(last) == stored
    states = [end for each in (save, last) if each for end, _ in each.states]
    assert states == [end for end in (2, 3) if end != held]
    rig.step()
    assert rig.ranks.pins == 0


def unread_and_late(held: int) -> tuple[Rig, Later, Request]:
    """A request of 3 N + 1 tokens that must not read, all but N + 2 computed, and unanswered."""
    later = Later()
    request = make_request(tokens=3 * N + 1)
    request.skip_reading_prefix_cache = True
    rig = Rig(Ranks(executor=later))
    if held:
        rig.holds(request, held, held)
    assert rig.match(request) == (0, False), "vLLM does not let it wait for the ranks"
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert rig.forward(request, 2 * N - 1) is None
    return rig, later, request


@pytest.mark.parametrize("held", [0, 2, 3])
def test_who_must_not_read_learns_late_what_is_stored(held):
    rig, later, request = unread_and_late(held)
    later.run()
    assert not any(question.claims for question in rig.ranks.questions)
    save = rig.forward(request, N + 2, all_offers(3))
    assert attention_of(save) == [0, 1, 2][held:]
    assert [end for end, _ in save.states] == [3] if held < 3 else save is None
    assert rig.ranks.pins == 0


@pytest.mark.parametrize("held", [0, 3])
def test_who_must_not_read_is_stored_by_its_last_chunk_whatever_is_answered(held):
    """It may end with that step: rather twice than not at all."""
    rig, later, request = unread_and_late(held)
    save = rig.forward(request, N + 2, all_offers(3))
    assert attention_of(save) == [0, 1, 2] and [end for end, _ in save.states] == [3]
    rig.scheduler.request_finished(request)
    later.run()
    assert rig.ranks.pins == 0


def test_a_request_that_neither_reads_nor_stores_is_not_looked_up():
    request = make_request(params={"lmcache.skip_save": True})
    request.skip_reading_prefix_cache = True
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request) == (0, False)
    assert not rig.ranks.questions


def test_a_rank_that_does_not_answer_is_a_miss_and_lets_go():
    request = make_request()
    rig = Rig(2).holds(request, 3, 3)
    rig.ranks.silent = True
    assert rig.match(request) == (0, False)
    rig.step()
    assert rig.ranks.pins == 0


def test_vllms_dummy_requests_are_left_alone():
    rig = Rig()
    assert rig.match(make_request("mock_req_1")) == (0, False)
    assert not rig.scheduler._trackers


def test_a_load_names_each_groups_blocks():
    request = make_request(tokens=4 * N)
    rig = Rig().holds(request, 3, 3)
    load = rig.admit(request, N)
    prefix = prefix_of(request, N, 1)
    assert load == LoadSpec(
        "r",
        load.prefix,
        start=1,
        boundary=3,
        attention_blocks=((302, 303),),
        state_blocks=(103, 203, 403),
    )
    assert load.prefix.hashes == prefix.hashes[:3]
    assert rig.ranks.stores[0].pins == dict.fromkeys(load_keys(prefix, 1, 3, PLAN), 1)
    assert rig.scheduler.counts.hit_tokens == {"naive": 2 * N}


def test_several_attention_groups():
    request = make_request(tokens=2 * N + 1)
    rig = Rig(plan=WIDE).holds(request, 2, 2)
    load = rig.admit(request, tables=([1, 2, 3], [0, 9], [4, 5, 6]))
    assert load.attention_blocks == ((1, 2), (4, 5)) and load.state_blocks == (9,)
    save = rig.forward(request, 2 * N + 1, tables=([1, 2, 3], [0, 9], [4, 5, 6]))
    assert save is None  # all of it is in the store


@pytest.mark.parametrize(
    "states, expected",
    [
        ([0, 0, 14], 14),  # earlier entries of a state table are null
        ([0, 0, 14, 15, 16], 14),  # later ones are running or speculative blocks
        ([0, 0], 0),  # the worker refuses block 0
        ([], 0),
        ([7, 8, 0], 0),
    ],
)
def test_the_state_block_is_the_entry_of_the_boundary(states, expected):
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    load = rig.admit(request, tables=(states, [0, 0, 24], [1, 2, 3], [0, 0, 34]))
    assert load.state_blocks == (expected, 24, 34)


def test_a_load_goes_out_once():
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    assert rig.admit(request)
    assert not rig.step().loads


def test_a_failed_load_is_not_promised_again_and_all_is_stored_anew():
    """Else vLLM comes back to the lookup for ever."""
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request, failed=True)
    questions = len(rig.ranks.questions)
    assert rig.match(request) == (0, False)
    assert len(rig.ranks.questions) == questions
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    save = rig.forward(request, 3 * N + 1, all_offers(3))
    assert attention_of(save) == [0, 1, 2]
    assert [end for end, _ in save.states] == [3]
    assert rig.scheduler.counts.failed_loads == 1
    assert rig.ranks.pins == 0


def test_after_a_good_load_only_what_is_new_is_stored():
    """vLLM offers the restored boundary again in the step after its load."""
    request = make_request(tokens=5 * N)
    rig = Rig().holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request)
    request.num_computed_tokens = 3 * N
    save = rig.forward(request, 2 * N, all_offers(3) + all_offers(5))
    assert attention_of(save) == [3, 4]
    assert [end for end, _ in save.states] == [5]


@pytest.mark.parametrize("stored, saved", [(2, []), (1, [3]), (0, [3])])
@pytest.mark.parametrize("tokens", [0, 2 * N])
def test_the_last_state_of_a_prompt_of_whole_blocks_is_stored_once(stored, saved, tokens):
    """No hit ends there, as the last token is computed; it counts if every rank has it.

    Args:
        stored: ranks that have it.
        tokens: in vLLM's own cache.
    """
    request = make_request(tokens=3 * N)
    rig = Rig(2).holds(request, 3, 2, 3)
    for store in rig.ranks.stores[stored:]:
        del store.records[load_keys(prefix_of(request, N, 1), 0, 3, PLAN)[-1]]
    if rig.admit(request, tokens):
        rig.loaded(request)
    request.num_computed_tokens = 2 * N
    save = rig.forward(request, N, all_offers(3))
    assert [end for end, _ in save.states] == saved if save else not saved
    assert not attention_of(save)


def test_of_a_prompt_of_one_block_nothing_is_stored_twice():
    request = make_request(tokens=N)
    rig = Rig().holds(request, 1, 1)
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert rig.forward(request, N, all_offers(1)) is None


def test_who_stores_nothing_does_not_ask_what_is_stored():
    request = make_request(tokens=3 * N, params={"lmcache.skip_save": True})
    rig = Rig().holds(request, 3, 2, 3)
    assert rig.match(request) == (2 * N, True)
    assert [question.states_at for question in rig.ranks.questions] == [()]


def test_a_preempted_request_is_looked_up_again():
    request = make_request()
    rig = Rig()
    rig.prefill(request)
    rig.holds(request, 3, 3)
    request.num_computed_tokens = 0
    assert rig.match(request) == (3 * N, True)


def test_what_a_failed_save_left_out_is_stored_after_a_preemption():
    """The workers report no failed save; what they hold at the next admission is the truth."""
    request = make_request(tokens=4 * N)
    rig = Rig()
    assert attention_of(rig.prefill(request)) == [0, 1, 2, 3]
    rig.holds(request, 2)  # and no more of it
    request.num_computed_tokens = 0
    assert attention_of(rig.prefill(request)) == [2, 3]


def test_a_failed_save_of_a_state_is_made_up_for_after_a_preemption():
    request = make_request(tokens=4 * N)
    rig = Rig()
    rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert rig.forward(request, 4 * N, all_offers(3)).states
    rig.holds(request, 4)  # the pages came through
    request.num_computed_tokens = 0
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert [end for end, _ in rig.forward(request, 4 * N, all_offers(3)).states] == [3]


def test_without_an_answer_what_was_saved_counts_after_a_preemption():
    request = make_request(tokens=4 * N)
    rig = Rig()
    rig.prefill(request)
    rig.ranks.silent = True
    request.num_computed_tokens = 0
    assert rig.prefill(request) is None
