# SPDX-License-Identifier: Apache-2.0
"""Lookups that the scheduler does not wait for."""

import threading
import time

import pytest

from lmcache_hybrid.protocol.hit_records import tail_keys
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.protocol.metadata import SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler import waits as module
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.prompt import inner_hashes, prefix_of
from lmcache_hybrid.scheduler.scheduler import HybridScheduler

from .helpers import OPTIONS, PLAN, Later, N, Ranks, fill, make_output, make_request, put


class Rig:
    """A scheduler whose ranks hold five blocks of ``request`` with states at 2 and 4."""

    def __init__(self) -> None:
        self.later = Later()
        self.ranks = Ranks(2, executor=self.later)
        self.request = make_request(tokens=5 * N + 1)
        for store in self.ranks.stores:
            fill(store, prefix_of(self.request, N, 1), 5, (2, 4), PLAN)
        self.scheduler = HybridScheduler(PLAN, OPTIONS, N, self.ranks.queue)

    def match(self, computed: int = 0):
        return self.scheduler.get_num_new_matched_tokens(self.request, computed)

    def step(self, scheduled=None, tables=None) -> tuple[SaveSpec, ...]:
        metadata = self.scheduler.build_connector_meta(make_output(scheduled or {}, tables))
        for released in metadata.released:
            for lookup in self.ranks.lookups:
                lookup.release(*released)
        return metadata.saves


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_request_waits_for_its_answer_and_the_scheduler_does_not(rig):
    assert rig.match() == rig.match() == (None, False)
    assert len(rig.later.waiting) == 1
    rig.later.run()
    assert rig.match() == rig.match() == (4 * N, True)
    rig.step()
    assert rig.scheduler.counts.lookups == {"hit": 1}


def test_a_request_that_ended_before_it_was_asked_for_is_not(rig):
    rig.match()
    rig.scheduler.request_finished(rig.request)
    rig.later.run()
    assert rig.ranks.questions == [] and rig.ranks.pins == 0


def test_a_request_that_ends_while_the_ranks_answer_leaves_no_claim(rig):
    answer = rig.ranks.lookups[1].answer

    def end_then_answer(question):
        if question.limit:
            rig.scheduler.request_finished(rig.request)
            rig.step()  # its drop overtakes the answer
        return answer(question)

    rig.ranks.lookups[1].answer = end_then_answer
    rig.match()
    rig.later.run()
    assert rig.ranks.num_claims == [0, 0] and rig.ranks.pins == 0


def test_a_prompt_shorter_than_a_block_leaves_none_either():
    plan, unit = PLAN.with_unit(N // 4), N // 4
    later = Later()
    ranks = Ranks(2, plan, executor=later)
    scheduler = HybridScheduler(plan, OPTIONS, unit, ranks.queue)
    request = make_request(tokens=N - 1, hash_block_size=unit)
    prefix = prefix_of(request, N, 4).with_inner(inner_hashes(request, (2 * unit,), plan))
    for store in ranks.stores:
        put(store, tail_keys(prefix, 2 * unit, plan))
    answer = ranks.lookups[0].answer

    def answer_then_end(question):
        given = answer(question)
        if question.limit_tail:
            assert given.tail == 2 * unit and ranks.num_claims[0] == 1
            scheduler.request_finished(request)
        return given

    ranks.lookups[0].answer = answer_then_end
    scheduler.get_num_new_matched_tokens(request, 0)
    later.run()
    assert len(ranks.questions) == 2
    assert ranks.num_claims == [0, 0] and ranks.pins == 0


def raise_error():
    raise OSError("no socket")


@pytest.mark.parametrize("fails", [list, raise_error], ids=["silence", "an error"])
def test_a_claim_that_could_not_be_dropped_is_dropped_with_the_next_step(rig, lenient, fails):
    ask = rig.ranks.queue._ask

    def ask_once(question):
        if question.limit == 0:
            return fails()
        answers = ask(question)
        rig.scheduler.request_finished(rig.request)
        return answers

    rig.ranks.queue._ask = ask_once
    rig.match()
    rig.later.run()
    rig.scheduler._lookups._released.clear()  # as if the drop had been sent before
    assert rig.ranks.num_claims == [1, 1]
    rig.step()
    assert rig.ranks.num_claims == [0, 0] and not rig.ranks.queue.unreleased


def test_a_drop_that_is_left_over_spares_the_next_lookup_of_the_request(rig):
    ask = rig.ranks.queue._ask

    def ask_once(question):
        if question.limit == 0:
            return []
        answers = ask(question)
        if len(rig.ranks.questions) == 1:
            rig.scheduler.request_finished(rig.request)
        return answers

    rig.ranks.queue._ask = ask_once
    rig.match()
    rig.later.run()
    assert rig.ranks.queue.unreleased
    rig.match()  # of the same name, before any step
    rig.later.run()
    assert rig.match() == (4 * N, True)
    rig.step()
    assert rig.ranks.num_claims == [1, 1] and not rig.ranks.queue.unreleased


def test_no_answer_in_time_is_a_miss(rig, monkeypatch):
    rig.match()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.9)
    assert rig.match() == (None, False)
    monkeypatch.setattr(time, "monotonic", lambda: now + 2.1)
    assert rig.match() == (0, False)
    rig.later.run()
    rig.step()
    assert rig.match() == (0, False)
    assert rig.ranks.num_claims == [0, 0]


def test_blocks_lost_meanwhile_are_asked_for(rig):
    """The claims start at what was cached locally when the ranks were asked."""
    rig.match(2 * N)
    rig.later.run()
    assert rig.match(0) == (None, False)
    rig.later.run()
    assert rig.match(0) == (4 * N, True)
    assert [question.floor for question in rig.ranks.questions] == [2, 0]


def test_what_vllm_has_all_of_is_not_waited_for(rig):
    assert rig.match(5 * N) == (0, False)
    assert rig.step({rig.request.request_id: 1}) == ()
    rig.later.run()
    assert rig.scheduler.counts.lookups == {}
    rig.request.num_computed_tokens = 5 * N + 1
    assert rig.step({rig.request.request_id: 1}) == (), "the store has these"
    assert rig.scheduler.counts.lookups == {"local": 1}
    rig.scheduler.request_finished(rig.request)
    assert rig.ranks.num_claims == [0, 0] and rig.ranks.pins == 0


def test_what_vllm_has_all_of_and_the_store_has_not_is_stored(rig):
    for store in rig.ranks.stores:
        store.records.clear()
    rig.match(5 * N)
    rid, tables = rig.request.request_id, tuple([[i + 1 for i in range(6)]] * 4)
    assert rig.step({rid: 1}) == ()
    rig.later.run()
    rig.request.num_computed_tokens = 5 * N + 1
    (save,) = rig.step({rid: 1}, {rid: tables})
    assert [block for block, _ in save.attention] == [0, 1, 2, 3, 4]


def test_the_end_of_a_prompt_that_vllm_has_is_waited_for():
    """The prompt's last block is computed again, and it is stored in this step or never."""
    rig = Rig()
    rig.request = make_request(tokens=5 * N)
    assert rig.match(4 * N) == (None, False)
    rig.later.run()
    assert rig.match(4 * N) == (0, False)


def test_a_request_that_ends_before_it_is_known_what_is_stored_is_not_asked_for(rig):
    rig.match(5 * N)
    rig.scheduler.request_finished(rig.request)
    rig.later.run()
    assert rig.ranks.questions == []


@pytest.fixture
def waits(rig, monkeypatch) -> list[float]:
    """Seconds that each poll may wait; no answer ever comes, and waiting takes all of them."""
    asked: list[float] = []
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    submit = rig.scheduler._queue.submit

    def ask(question):
        pending = submit(question)

        def poll(seconds=0.0) -> None:
            asked.append(seconds)
            now[0] += seconds

        pending.poll = poll
        return pending

    rig.scheduler._queue.submit = ask
    return asked


def test_an_idle_engine_waits_for_any_lookup_once_per_pass(rig, waits):
    rig.match()
    rig.match()
    rig.step()
    rig.match()
    assert waits == [module.IDLE_SECONDS, 0, module.IDLE_SECONDS]


def test_who_runs_whatever_is_answered_is_waited_for_longer_where_nobody_else_waits(rig, waits):
    """vLLM lets no request wait that must not read."""
    rig.request.skip_reading_prefix_cache = True
    rig.match()
    second = make_request("second", tokens=5 * N + 1)
    second.skip_reading_prefix_cache = True
    rig.scheduler.get_num_new_matched_tokens(second, 0)
    rig.step({"other": 1})
    third = make_request("third", tokens=5 * N + 1)
    third.skip_reading_prefix_cache = True
    rig.scheduler.get_num_new_matched_tokens(third, 0)
    assert waits == [module.LAST_CHANCE_SECONDS, 0, module.BUSY_SECONDS[0]]


def test_beside_others_only_what_was_just_asked_is_waited_for(rig, waits):
    rig.step({"other": 1})
    rig.match()
    rig.step({"other": 1})
    rig.match()
    assert waits == [module.BUSY_SECONDS[0], 0]


def test_all_that_a_pass_asks_shares_its_time(rig, waits):
    rig.step({"other": 1})
    rig.match()
    rig.scheduler.get_num_new_matched_tokens(make_request("second", tokens=5 * N + 1), 0)
    assert waits == [module.BUSY_SECONDS[0], 0]


@pytest.mark.parametrize("step, most", [(0.001, 0.001), (0.1, 0.005), (60.0, 0.01)])
def test_beside_long_steps_it_waits_longer(waits, monkeypatch, step, most):
    pause = module.LookupWait()
    began = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: began + step)
    pause.begin(idle=False)
    assert pause._left == pytest.approx(most)


def test_a_second_question_of_a_pass_is_waited_for(rig, waits, monkeypatch):
    """vLLM has lost blocks of its own since the first."""
    rig.step({"other": 1})
    rig.match(2 * N)
    rig.later.run()
    lookup = rig.scheduler._trackers[rig.request.request_id].phase.lookup
    monkeypatch.delattr(lookup, "poll")  # it is answered now
    rig.step({"other": 1})
    assert rig.match() == (None, False)
    assert waits == [module.BUSY_SECONDS[0]] * 2


def test_an_engine_whose_requests_have_ended_is_idle(rig, waits):
    rig.step({rig.request.request_id: 1})
    rig.scheduler.request_finished(rig.request)
    rig.match()
    assert waits == [module.IDLE_SECONDS]


def test_an_exception_is_a_miss_and_counted(lenient, hybrid_log):
    def broken(question):
        raise OSError("no socket")

    queue = LookupQueue(broken, 1000)
    scheduler = HybridScheduler(PLAN, OPTIONS, N, queue)
    for _ in range(3):
        pending = queue.submit(LookupRequest("r", Prefix((b"x" * 32,)), 1, 0))
        assert pending.poll(10) == UNAVAILABLE
    queue.close()
    assert scheduler.counts.caught_errors == lenient == {"ask_ranks": 3}
    (warning,) = [record for record in hybrid_log.records if record.levelname == "WARNING"]
    assert warning.exc_info and "only counted" in warning.getMessage()


def test_the_thread_asks_in_order_and_one_at_a_time():
    gate, seen = threading.Event(), []

    def ask(question):
        gate.wait(10)
        seen.append(question.request_id)
        return [LookupResult(1, 1)]

    queue = LookupQueue(ask, 60_000)
    asked = [queue.submit(LookupRequest(name, Prefix(()), 1, 0)) for name in "abc"]
    assert [pending.poll() for pending in asked] == [None] * 3
    asked[1].cancel()
    gate.set()
    assert asked[2].poll(10) == LookupResult(1, 1)
    assert queue.run(lambda: True)
    assert seen == ["a", "c"]
    queue.close()


def test_a_drop_that_cannot_even_be_sent_is_sent_with_the_next_step(rig, lenient):
    """Nobody could know of the claims, which would stay pinned."""
    ask = rig.ranks.queue._ask

    def ask_once(question):
        if question.limit == 0:
            raise OSError("the socket is gone")
        answers = ask(question)
        rig.scheduler.request_finished(rig.request)
        return answers

    rig.ranks.queue._ask = ask_once
    rig.match()
    rig.later.run()
    assert rig.ranks.num_claims == [1, 1]
    rig.step()
    assert rig.ranks.num_claims == [0, 0] and not rig.ranks.queue.unreleased
    assert rig.scheduler.counts.caught_errors == lenient == {"release_claims": 1}
