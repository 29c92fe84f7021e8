# SPDX-License-Identifier: Apache-2.0
"""What a step stores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_hybrid.scheduler.prompt import prefix_of

from .helpers import N, make_request
from .scheduler_rig import STATES, Rig, all_offers, attention_of, table


def test_a_prefill_stores_whole_blocks_and_offered_states():
    request = make_request(tokens=3 * N + 5)
    save = Rig().prefill(request)
    assert save.states == ()
    rig = Rig()
    rig.match(request)
    request.num_computed_tokens = 0
    save = rig.forward(request, 3 * N + 5, all_offers(3))
    assert save.request_id == "r" and save.prefix == prefix_of(request, N, 1)
    assert save.attention == ((0, (301,)), (1, (302,)), (2, (303,)))
    assert save.states == ((3, (50, 51, 53)),)  # in the plan's order


@settings(max_examples=50)
@given(st.data(), st.integers(1, 6 * N))
def test_chunked_prefill_stores_every_whole_block_once(data, tokens):
    request = make_request(tokens=tokens)
    rig = Rig()
    rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    stored = []
    while request.num_computed_tokens < tokens:
        chunk = data.draw(st.integers(1, tokens - request.num_computed_tokens))
        new = attention_of(rig.forward(request, chunk))
        assert all((block + 1) * N <= request.num_computed_tokens for block in new)
        stored += new
    assert stored == list(range(tokens // N))
    assert not rig.forward(request, 1)


def test_generated_tokens_are_not_stored():
    request = make_request(tokens=N + 1)
    rig = Rig()
    rig.prefill(request)
    request.append_output_token_ids(list(range(2 * N)))
    assert rig.forward(request, 2 * N, all_offers(2) + all_offers(3)) is None
    assert not rig.scheduler.counts.dropped_offers  # nobody wanted them


def test_what_the_store_has_is_not_stored_again():
    request = make_request(tokens=4 * N + 1)
    rig = Rig().holds(request, 2)  # attention pages, no state: no hit
    assert attention_of(rig.prefill(request)) == [2, 3]


@pytest.mark.parametrize(
    "offers, stored, dropped",
    [
        ([(g, 0, 2 * N) for g in STATES], [], {"unusable": 3}),  # the null block
        (
            [(0, 50, 2 * N), (1, 0, 2 * N), (3, 53, 2 * N)],
            [],
            {"unusable": 1, "incomplete": 2},
        ),
        ([(g, 50, 2 * N - 1) for g in STATES], [], {"unusable": 3}),  # no block boundary
        ([(g, 50, 0) for g in STATES], [], {"unusable": 3}),
        (all_offers(2, groups=(0, 3)), [], {"incomplete": 2}),  # group 1 is missing
        (all_offers(3), [], {"unusable": 3}),  # past what this step computes
        ([(g, 50, 4 * N) for g in STATES], [], {}),  # past the prompt: nobody wants it
        (all_offers(2) + all_offers(2), [2], {}),
    ],
)
def test_offers_that_are_dropped(offers, stored, dropped):
    request = make_request(tokens=3 * N + 1)
    rig = Rig()
    rig.match(request)
    save = rig.forward(request, 2 * N + 3, offers)
    assert attention_of(save) == [0, 1]
    assert [end for end, _ in save.states] == stored
    assert rig.scheduler.counts.dropped_offers == dropped


def test_a_boundary_is_stored_once():
    request = make_request(tokens=3 * N)
    rig = Rig()
    rig.match(request)
    assert rig.forward(request, 2 * N, all_offers(2)).states
    save = rig.forward(request, N, all_offers(2) + all_offers(3))
    assert [end for end, _ in save.states] == [3]
    assert not rig.scheduler.counts.dropped_offers  # offered again is no loss
    rig.forward(request, N, [(g, 50, 2 * N + 1) for g in STATES])  # another state than that one
    assert rig.scheduler.counts.dropped_offers == {"unusable": len(STATES)}


def test_a_state_alone_is_stored_after_its_attention_pages():
    request = make_request(tokens=3 * N)
    rig = Rig()
    rig.prefill(request)
    save = rig.forward(request, 1, all_offers(3))
    assert save.attention == () and [end for end, _ in save.states] == [3]


@pytest.mark.parametrize("gone", ["finished", "preempted", "never seen"])
def test_offers_of_requests_that_do_not_run_are_dropped(gone):
    """Their blocks may hold another request's state by now."""
    request = make_request(tokens=3 * N)
    rig = Rig()
    if gone != "never seen":
        rig.match(request)
    if gone == "finished":
        rig.scheduler.request_finished(request)
    other = make_request("other", N)
    metadata = rig.step(
        {"other": N}, {"other": table(other), "r": table(request)}, {"r": all_offers(1)}
    )
    assert not metadata.saves
    assert rig.scheduler.counts.dropped_offers == {"not_running": len(STATES)}


def test_requests_of_one_step_keep_apart():
    one, two = make_request("one", 2 * N), make_request("two", list(range(5, 5 + 2 * N)))
    rig = Rig()
    for request in (one, two):
        rig.match(request)
    tables = {"one": table(one), "two": tuple([b + 50 for b in ids] for ids in table(two))}
    saves = rig.step({"one": 2 * N, "two": N}, tables, {"two": all_offers(1)}, (one, two)).saves
    by_id = {save.request_id: save for save in saves}
    assert by_id["one"].attention == ((0, (301,)), (1, (302,))) and not by_id["one"].states
    assert by_id["two"].attention == ((0, (351,)),) and len(by_id["two"].states) == 1
    assert not set(by_id["one"].prefix.hashes) & set(by_id["two"].prefix.hashes)


@pytest.mark.parametrize(
    "options, request_args, saved",
    [
        ({}, {}, True),
        ({"save": False}, {}, False),  # kv_consumer
        ({"priority_limit": 2}, {"priority": 2}, True),
        ({"priority_limit": 2}, {"priority": 3}, False),
        ({"priority_limit": 0}, {"priority": 1}, False),
        ({}, {"priority": 3}, True),
        ({}, {"params": {"lmcache.skip_save": True}}, False),
        ({}, {"params": {"lmcache.skip_save": False}}, True),
    ],
)
def test_who_stores(options, request_args, saved):
    request = make_request(tokens=2 * N + 1, **request_args)
    rig = Rig(**options)
    rig.match(request)
    save = rig.forward(request, 2 * N + 1, all_offers(2))
    assert (save is not None) == saved
    # All of them load.
    again = make_request("again", 2 * N + 1, **request_args)
    assert Rig(**options).holds(again, 2, 2).match(again) == (2 * N, True)
