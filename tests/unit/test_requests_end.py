# SPDX-License-Identifier: Apache-2.0
"""Nothing of a request outlives it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from lmcache_hybrid.protocol.failed_loads import SlowLoads
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.scheduler.step_ends import Drafter
from lmcache_hybrid.scheduler.waits import IdleSteps

from .helpers import WINDOWS, Later, N, Ranks, make_output, make_request
from .scheduler_rig import Rig, all_offers, attention_of, table


@pytest.mark.parametrize("when", ["matched", "allocated", "loading", "loaded", "prefilled"])
def test_nothing_is_tracked_after_the_end(when):
    request = make_request()
    rig = Rig(2).holds(request, 3, 3)
    tokens, _ = rig.match(request)
    if when != "matched":
        rig.scheduler.update_state_after_alloc(request, table(request), tokens)
    if when in ("loading", "loaded", "prefilled"):
        rig.step()
    if when in ("loaded", "prefilled"):
        rig.loaded(request)
    if when == "prefilled":
        rig.forward(request, 3 * N + 1, all_offers(3))
    rig.scheduler.request_finished(request)
    rig.scheduler.request_finished(request)
    metadata = rig.step()
    assert not rig.scheduler._trackers and not rig.scheduler._may_store
    if when in ("allocated", "loading"):
        # The load goes on and reports its end; its claim ends with it.
        assert (when == "allocated") == bool(metadata.loads)
        rig.loaded(request)
    assert rig.ranks.pins == 0 and rig.ranks.num_claims == [0, 0]
    assert rig.step({"x": 1}) is NOTHING


def test_completions_of_unknown_requests_are_ignored():
    rig = Rig()
    rig.scheduler.update_connector_output(
        KVConnectorOutput(finished_recving={"x"}, failed_recving={"x"})
    )
    rig.scheduler.update_connector_output(KVConnectorOutput())
    rig.scheduler.update_state_after_alloc(make_request("x"), ([],) * 4, 0)
    assert not rig.scheduler._trackers


def test_loads_of_other_connectors_say_nothing_of_ours():
    """MultiConnector tells each of its connectors of all loads."""
    rig = Rig()
    request = make_request(tokens=3 * N)
    rig.prefill(request)
    rig.loaded(request, failed=True)
    assert rig.scheduler.counts.failed_loads == 0
    assert rig.forward(request, 1) is None, "what is stored is stored again"


def test_a_decode_step_does_nothing():
    request = make_request()
    rig = Rig()
    rig.prefill(request)
    request.append_output_token_ids([1])
    output = make_output({"r": 1}, {})  # no table: reading one would raise
    assert rig.scheduler.build_connector_meta(output) is NOTHING
    output.kv_connector_block_state = None
    assert rig.scheduler.build_connector_meta(output) is NOTHING


def test_idle_steps_are_told_apart():
    rig = Rig()
    assert rig.step().idle
    assert not rig.step({"x": 1}).idle


def test_an_empty_step_waits_for_loads_only_where_it_holds_up_nobody():
    """Other engines compute in step with this one."""
    rig = Rig()
    assert rig.step().waits and not rig.step({"x": 1}).waits
    rig.scheduler.idle_steps = IdleSteps(math.inf)
    assert rig.step().idle and not rig.step().waits
    assert not rig.scheduler._lookups.wait._idle
    rig.match(request := make_request())
    rig.scheduler.request_finished(request)
    assert not rig.scheduler._lookups.wait._idle


def test_a_pipeline_waits_for_loads_once_all_its_steps_are_empty():
    """One of those in flight: a request that comes meanwhile is behind all of them."""
    rig = Rig()
    rig.scheduler.idle_steps = IdleSteps(3)
    patience = rig.scheduler._lookups.wait
    for _ in range(2):
        assert not rig.step({"x": 1}).waits and not patience._idle
        steps = [(rig.step(), patience._idle) for _ in range(7)]
        assert [step.waits for step, _ in steps] == [False, False, True] * 2 + [False]
        assert [idle for _, idle in steps] == [False] * 2 + [True] * 5
        assert all(step.idle for step, _ in steps)
    rig.match(request := make_request())
    rig.step({"x": 1})
    rig.scheduler.request_finished(request)
    assert patience._idle


actions = st.tuples(
    st.sampled_from(["match", "allocate", "load", "fail", "forward", "preempt", "finish"]),
    st.sampled_from("abc"),
    st.integers(1, 2 * N),
)


@settings(max_examples=100)
@given(st.lists(actions, max_size=40))
def test_no_claim_and_no_request_is_left_behind(steps):
    """Random lives of three requests, in the order of calls that vLLM keeps."""
    rig = Rig(2).holds(make_request(tokens=4 * N), 4, 1, 3, 4)
    alive, offered, loading = {}, {}, set()
    for action, rid, tokens in steps:
        request = alive.get(rid)
        if action == "match" and rid not in loading:
            request = alive.setdefault(rid, make_request(rid, 4 * N))
            if not request.num_computed_tokens:
                offered[rid] = rig.match(request)[0]
        elif action == "allocate" and rid in offered:
            taken = offered.pop(rid)
            rig.scheduler.update_state_after_alloc(request, table(request), taken)
            assert len(rig.step().loads) == (taken > 0)
            if taken:
                loading.add(rid)
            else:
                request.num_computed_tokens = 1
        elif action in ("load", "fail") and rid in loading:
            loading.discard(rid)
            target = request or make_request(rid, 4 * N)
            rig.loaded(target, failed=action == "fail")
            if request is not None:
                request.num_computed_tokens = 0 if action == "fail" else 3 * N
        elif action == "forward" and request and request.num_computed_tokens:
            rig.forward(request, tokens, all_offers(tokens % 5))
        elif action == "preempt" and request and rid not in loading:
            request.num_computed_tokens = 0
            offered.pop(rid, None)
        elif action == "finish" and request:
            rig.scheduler.request_finished(alive.pop(rid))
            offered.pop(rid, None)
    for rid in list(loading):
        rig.loaded(make_request(rid, 4 * N))
    for request in alive.values():
        rig.scheduler.request_finished(request)
    rig.step()
    assert rig.ranks.pins == 0
    assert not rig.scheduler._trackers


def test_a_fully_stored_prompt_costs_later_steps_nothing():
    """Its decode steps must not look at it again and again for blocks to store."""
    rig = Rig()
    request = make_request(tokens=3 * N + 1)
    rig.holds(request, 3, 3)
    assert rig.admit(request).boundary == 3
    rig.loaded(request)
    request.num_computed_tokens = 3 * N
    rig.forward(request, 1)
    assert not rig.scheduler._may_store


def test_a_request_that_stores_nothing_costs_later_steps_nothing():
    rig = Rig(save=False)
    request = make_request(tokens=3 * N + 1)
    rig.match(request)
    rig.forward(request, request.num_tokens)
    assert not rig.scheduler._may_store


def test_what_is_lost_of_a_resumed_request_is_stored_once_the_ranks_have_said_so():
    """All of it was stored, and vLLM has it: it goes on before the answer comes."""
    executor = Later()
    rig = Rig(Ranks(executor=executor))
    request = make_request(tokens=3 * N + 1)
    rig.match(request)
    executor.run()
    rig.prefill(request)
    assert not rig.scheduler._may_store
    rig.match(request, 3 * N)  # preempted, and what it computed is cached still
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    request.num_computed_tokens = 3 * N
    assert rig.forward(request, 1) is None
    executor.run()  # these ranks hold nothing
    request.append_output_token_ids([1])
    assert attention_of(rig.forward(request, 1)) == [0, 1, 2]


def test_what_a_hand_off_adds_is_stored_once_it_is_computed():
    """Here before its step: the state cannot be stored, and nothing else tells of its block."""
    rig = Rig(save_decode=True)
    request = make_request(tokens=3 * N + 1)
    rig.prefill(request)
    assert not rig.scheduler._may_store
    request.append_output_token_ids([1] * (N - 1))
    rig.forward(request, N - 2, all_offers(4))
    assert attention_of(rig.forward(request, 1)) == [3]


@pytest.mark.parametrize("forgets, save_decode", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("status", ["RUNNING", "PREEMPTED"])
def test_an_answer_that_a_step_leaves_out_is_stored_no_further(forgets, save_decode, status):
    """vLLM's V1 runner goes on from the state before the drafts that it accepted."""
    rig = Rig(save_decode=save_decode)
    rig.scheduler.drafter = Drafter(forgets=forgets)
    request = make_request(tokens=3 * N + 1)
    rig.prefill(request)
    request.append_output_token_ids([1] * (N - 1))
    rig.forward(request, N - 2)
    request.status = RequestStatus[status]
    rig.step()  # of others
    left = forgets and save_decode and status == "RUNNING"
    assert rig.scheduler._trackers["r"].save, "it may have ended"
    assert (rig.forward(request, 1, all_offers(4)) is None) == (left or not save_decode)
    assert rig.scheduler._trackers["r"].save != left
    counted = rig.scheduler.ledger.report().get("scheduler.skipped_requests", {})
    assert counted == ({"skipped_step": 1} if left else {})


def test_a_request_whose_pages_are_all_stored_ends_steps_where_others_wait():
    """The store was too slow for it. Past one meeting it is to aim at the next one at once."""
    rig = Rig(chunk_ends=False)
    rig.scheduler.prefills.step_tokens = N
    leader = make_request("a", range(9 * N + 1))
    assert rig.holds(leader, 9, 9).admit(leader).boundary == 9
    slow = KVConnectorOutput(
        finished_recving={"a"},
        failed_recving={"a"},
        kv_connector_worker_meta=SlowLoads({"a": 1.0}),
    )
    rig.scheduler.update_connector_output(slow)
    leader.status, leader.shared_prefix_boundary = RequestStatus.RUNNING, 0
    rig.prefill(leader, N)
    assert not rig.scheduler._may_store
    for name, blocks in (("b", 4), ("c", 5)):
        follower = make_request(name, [*range(blocks * N), *range(1000, 1000 + N)])
        assert rig.match(follower) == (None, False)
    assert leader.shared_prefix_boundary == 4 * N
    rig.forward(leader, 3 * N)
    assert leader.shared_prefix_boundary == 5 * N


def test_a_new_question_keeps_its_claim_from_an_unsent_drop():
    """Given up and asked anew within one step: the drop of the old claim must not go out."""
    rig = Rig()
    request = make_request(tokens=3 * N + 1)
    rig.holds(request, 3, 3)
    assert rig.match(request, 3 * N) == (0, False)
    load = rig.admit(request, 0)
    assert load is not None and load.boundary == 3
    assert all(lookup._claims for lookup in rig.ranks.lookups)


@pytest.mark.parametrize("save_decode, windows", [(False, []), (True, [2, 3, 4])])
def test_a_resumed_request_is_past_its_prompt(save_decode, windows):
    """Preempted while decoding: what it generated has no name unless it is to be stored."""
    rig = Rig(plan=WINDOWS, save_decode=save_decode)
    request = make_request(tokens=3 * N + 1)
    rig.prefill(request)
    request.append_output_token_ids([1] * (2 * N))
    request.num_computed_tokens = 0
    save = rig.prefill(request)
    # These ranks hold nothing: what was stored before the preemption counts as lost.
    assert sorted(block for _, block, _ in save.windows) == windows
    assert max(save.boundaries, default=0) <= len(save.prefix.hashes)


def test_what_is_cached_locally_past_the_prompt_has_no_name():
    rig = Rig()
    request = make_request(tokens=3 * N + 1)
    request.append_output_token_ids([1] * (2 * N))
    rig.match(request, 5 * N)
    assert rig.scheduler._trackers["r"].likeliest == set()


@pytest.mark.parametrize(
    "first, then",
    [
        ({"lmcache.skip_save": True}, None),
        ({"lmcache.tag.of": "a"}, None),
        (None, {"lmcache.tag.of": "a"}),
    ],
)
def test_what_was_asked_for_a_part_of_a_session_holds_for_its_tokens(first, then):
    """vLLM gives the session the parameters of its last part."""
    rig = Rig()
    rig.match(make_request(tokens=3 * N + 1, params=first))
    rig.match(make_request(tokens=6 * N + 1, params=then))
    tracker = rig.scheduler._trackers["r"]
    assert tracker.prompt_tokens == 6 * N + 1 and not tracker.save
    rig.match(make_request(tokens=9 * N + 1))
    assert not rig.scheduler._trackers["r"].save, "nor with the part after that"


def test_parts_of_a_session_with_the_same_tags_are_stored():
    rig, params = Rig(), {"lmcache.tag.of": "a"}
    for tokens in (3 * N + 1, 6 * N + 1):
        rig.match(make_request(tokens=tokens, params=params))
        assert rig.scheduler._trackers["r"].save
