# SPDX-License-Identifier: Apache-2.0
"""Boundaries inside a block: what is stored there, asked for and loaded."""

import dataclasses

import pytest

from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.hit_records import load_keys, tail_keys
from lmcache_hybrid.scheduler.prompt import inner_hashes, prefix_of

from .helpers import PLAN, N, make_request, put
from .scheduler_rig import STATES, Rig, table

UNIT = N // 4
INSIDE = PLAN.with_unit(UNIT)


def rig() -> Rig:
    return Rig(plan=INSIDE, hash_block_size=UNIT)


def asked(tokens: int):
    return make_request(tokens=tokens, hash_block_size=UNIT)


def holds(one: Rig, request, end: int, without=()) -> None:
    """Let every rank hold the boundary ``end`` inside the first block, but for ``without``."""
    prefix = prefix_of(request, N, N // UNIT).with_inner(inner_hashes(request, (end,), INSIDE))
    keys = [key for key in tail_keys(prefix, end, INSIDE) if (key.kind, key.group) not in without]
    for store in one.ranks.stores:
        put(store, keys)


def test_what_vllm_hands_off_inside_a_block_is_stored_with_the_page_up_to_there():
    one, request, end = rig(), asked(2 * N - 1), N + 3 * UNIT
    assert one.match(request)[0] == 0
    one.scheduler.update_state_after_alloc(request, table(request), 0)
    assert one.forward(request, end).tails == ()
    offers = [(group, 50 + group, end) for group in STATES]
    save = one.forward(request, request.num_tokens - end, offers)
    assert [(e, a) for e, a, _ in save.tails] == [(end, (table(request)[2][1],))]
    pages = save.pages(INSIDE)
    assert {(key.kind, key.boundary) for key, _ in pages} == {(ATTENTION, end), (STATE, end)}
    assert {key.block_hash for key, _ in pages} == {bytes(request.block_hashes[6])}


def test_the_page_of_a_prompt_that_ends_with_its_block_is_a_record_of_its_own():
    """The whole page has another key, at the block's end, and comes with the last chunk."""
    one, request, end = rig(), asked(2 * N), N + 3 * UNIT
    one.match(request)
    one.scheduler.update_state_after_alloc(request, table(request), 0)
    one.forward(request, end)
    first = one.forward(request, UNIT - 1, [(group, 50 + group, end) for group in STATES])
    assert {key.boundary for key, _ in first.pages(INSIDE)} == {end}
    whole = one.forward(request, 1)
    assert {(key.kind, key.boundary) for key, _ in whole.pages(INSIDE)} == {(ATTENTION, 2 * N)}


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_request_ends_with_is_stored_unless_another_connector_may_hold_its_blocks(alone):
    """MultiConnector frees them at the first of two reports and fails at the second."""
    one = Rig(plan=INSIDE, hash_block_size=UNIT, alone=alone)
    request, end = asked(N + 3 * UNIT + 1), N + 3 * UNIT
    one.match(request)
    one.scheduler.update_state_after_alloc(request, table(request), 0)
    one.forward(request, request.num_tokens)
    offers = [(group, 50 + group, end) for group in STATES]
    assert one.scheduler.register_finished_partial_tail(request, table(request), offers) is alone
    one.scheduler.request_finished(request)
    metadata = one.step()
    assert [save.request_id for save in metadata.saves] == [request.request_id] * alone
    assert len(metadata.ended) == alone
    dropped = one.scheduler.counts.dropped_offers
    assert dropped == ({} if alone else {"beside_others": len(STATES)})


@pytest.mark.parametrize("end", [UNIT, 3 * UNIT])
def test_a_prompt_shorter_than_a_block_is_loaded(end):
    one, request = rig(), asked(N - 1)
    holds(one, request, end)
    load = one.admit(request)
    assert (load.start, load.boundary, load.tail) == (0, 0, end)
    assert [key.boundary for key, _ in load.pages(INSIDE)] == [end] * (1 + len(STATES))
    assert load.attention_blocks == ((table(request)[2][0],),)


@pytest.mark.parametrize("missing", [(ATTENTION, 2), *((STATE, group) for group in STATES)])
def test_every_group_must_have_the_boundary(missing):
    one, request = rig(), asked(N - 1)
    holds(one, request, 2 * UNIT, without=[missing])
    assert one.admit(request) is None


def test_the_last_token_is_computed():
    one, request = rig(), asked(2 * UNIT)
    holds(one, request, 2 * UNIT)
    assert one.admit(request) is None


# Of two ranks that share the blocks of attention: N tokens in one of theirs, half in a state's.
SHARED = dataclasses.replace(PLAN, dcp=2, split=tuple((g, 2) for g in STATES)).with_unit(N // 2)


def shared_table() -> tuple[list[int], ...]:
    """Blocks of 2 N tokens, by group."""
    return tuple([20, 21] if g == 2 else [100 * g + i for i in range(1, 5)] for g in range(4))


@pytest.mark.parametrize("end, entry", [(N // 2, 0), (N, 1), (N + N // 2, 2)])
def test_a_state_goes_to_its_own_block_inside_one_that_ranks_share(end, entry):
    one = Rig(plan=SHARED, hash_block_size=N // 2)
    request = make_request(tokens=end + 1, hash_block_size=N // 2)
    prefix = prefix_of(request, N, 2).with_inner(inner_hashes(request, (end,), SHARED))
    for store in one.ranks.stores:
        put(store, load_keys(prefix, 0, end // N, SHARED, end % N))
    load = one.admit(request, tables=shared_table())
    assert load.end(SHARED) == end
    assert load.state_blocks == tuple(shared_table()[group][entry] for group in STATES)
    assert load.attention_blocks == (tuple(shared_table()[2][: -(-end // N)]),)


def test_a_page_that_ranks_share_is_stored_up_to_a_state_inside():
    one, end = Rig(plan=SHARED, hash_block_size=N // 2), N + N // 2
    request = make_request(tokens=end + 3, hash_block_size=N // 2)
    one.match(request)
    one.scheduler.update_state_after_alloc(request, shared_table(), 0)
    offers = [(group, shared_table()[group][2], end) for group in STATES]
    save = one.forward(request, end, offers, shared_table())
    assert save.tails == ((end, (21,), tuple(block for _, block, _ in offers)),)
    assert save.attention == ((0, (20,)),)


def test_without_a_unit_nothing_is_asked_inside_a_block():
    one, request = Rig(hash_block_size=UNIT), asked(N - 1)
    holds(one, request, 2 * UNIT)
    assert one.admit(request) is None
