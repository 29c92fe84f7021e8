# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, and for how long; tests/sim/test_shared_prefills.py shows what it brings."""

import math

import pytest
from vllm.config import SchedulerConfig
from vllm.v1.request import RequestStatus

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.scheduler.shared_prefills import (
    LATE,
    STILL,
    TRIES,
    WAITERS,
    SharedPrefills,
    step_tokens_of,
)
from lmcache_hybrid.scheduler.step_ends import Drafter, StepEnds
from lmcache_hybrid.scheduler.tracker import RequestTracker

from .helpers import N, make_request

STEP = 2 * N
SHARED = 10 * N


class Prompts:
    """Prompts that are alike up to SHARED, and vLLM's passes over them."""

    def __init__(self, step_tokens: float = STEP) -> None:
        self.ledger = Ledger("scheduler", SchedulerCounts())
        self.met: list[tuple[str, int]] = []
        self.prefills = SharedPrefills(N, self.ledger, self._meet)
        self.prefills.step_tokens = step_tokens

    def _meet(self, tracker: RequestTracker, boundary: int) -> None:
        tracker.step_ends.meetings.add(boundary)
        self.met.append((tracker.request.request_id, boundary))

    def make(self, name: str, shared: int = SHARED, more: int = 3 * N, **options) -> RequestTracker:
        first = ord(name[-1]) * 1000
        tokens = [*range(shared), *range(first, first + more)]
        request = make_request(name, tokens)
        step_ends = StepEnds(N, 0, False, **options)
        step_ends.begin(len(tokens))
        return RequestTracker(request, prefix_of(request, N, 1), True, step_ends)

    def run(self, tracker: RequestTracker, computed: int = 0) -> RequestTracker:
        tracker.request.status = RequestStatus.RUNNING
        tracker.request.num_computed_tokens = computed
        self.prefills.begin(tracker)
        return tracker

    def waits(self, tracker: RequestTracker, start: int = 0) -> bool | None:
        answer = self.prefills.wait(tracker, start)
        self.prefills.step()
        self.prefills.check_integrity()
        return answer


def test_a_request_waits_for_the_last_boundary_that_both_have():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower) is True
    assert prompts.met == [("a", SHARED)]
    leader.request.num_computed_tokens = SHARED
    assert prompts.waits(follower) is True, "vLLM knows the state a step later"
    for _ in range(2):  # vLLM has no room at first
        assert prompts.waits(follower, SHARED) is False
        assert not prompts.ledger.counts.shared_prefills
    prompts.prefills.end_wait(follower)
    counts = prompts.ledger.counts
    assert (counts.shared_prefills, counts.shared_prefill_tokens) == (1, SHARED)
    assert follower.stored.attention == SHARED // N
    assert prompts.waits(follower, SHARED) is False
    prompts.prefills.end_wait(follower)
    assert counts.shared_prefills == 1


def test_who_starts_elsewhere_is_not_counted():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower)
    leader.request.num_computed_tokens = SHARED
    assert prompts.waits(follower, SHARED) is False
    assert prompts.waits(follower) is True, "vLLM has lost it again"
    prompts.prefills.end_wait(follower)
    assert not prompts.ledger.counts.shared_prefills


def test_so_many_wait_at_once():
    prompts = Prompts()
    prompts.run(prompts.make("a"))
    followers = [prompts.make(f"r{number}") for number in range(WAITERS + 1)]
    assert [prompts.waits(each) for each in followers] == [True] * WAITERS + [False]
    prompts.prefills.forget("r3")
    assert prompts.waits(followers[-1]) is True


def test_steps_end_where_others_wait_already():
    """Each further boundary may cost the leader a step."""
    prompts = Prompts()
    prompts.run(prompts.make("a"))
    for name, shared in (("b", 9 * N), ("c", SHARED), ("d", 7 * N)):
        assert prompts.waits(prompts.make(name, shared))
    assert [boundary for _, boundary in prompts.met] == [9 * N, 9 * N, 7 * N]
    barred = prompts.make("e", barred={9 * N})
    assert prompts.waits(barred)
    assert prompts.met[-1] == ("a", SHARED)


def test_who_has_passed_a_boundary_is_not_waited_for():
    prompts = Prompts()
    leader = prompts.run(prompts.make("a"), 11 * N)
    leader.step_ends.meetings.add(SHARED)
    assert prompts.waits(prompts.make("b")) is False


def test_who_starts_over_is_waited_for_anew():
    """Preempted and resumed in between: its steps do not end where others wait any more."""
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a"), N), prompts.make("b")
    assert prompts.waits(follower)
    leader.step_ends.begin(leader.request.num_tokens)
    prompts.run(leader, 2 * N)
    assert prompts.waits(follower) is True
    assert prompts.met == [("a", SHARED)] * 2


def test_of_a_leader_that_does_not_know_yet_what_it_stores_nothing_is_believed():
    """It may end before it has stored anything."""
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower)
    leader.background = PendingLookup(LookupRequest("a", leader.prefix, 1, 0), math.inf)
    leader.request.num_computed_tokens = SHARED
    assert prompts.waits(follower, SHARED) is False
    assert not follower.stored.attention


def test_who_stores_nothing_any_more_is_not_waited_for():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower)
    leader.save = False
    assert prompts.waits(prompts.make("c")) is False
    leader.request.num_computed_tokens = SHARED
    assert prompts.waits(follower, SHARED) is False
    assert not follower.stored.attention, "nobody has stored it"


def test_what_was_stored_under_another_tag_is_stored_anew():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    follower.prefix = Prefix(follower.prefix.hashes, (("user", "b"),))
    assert prompts.waits(follower)
    leader.request.num_computed_tokens = SHARED
    assert prompts.waits(follower, SHARED) is False
    assert not follower.stored.attention


def test_the_deepest_of_several_is_waited_for():
    prompts = Prompts()
    for name, shared in (("a", 6 * N), ("b", 9 * N), ("c", 7 * N)):
        prompts.run(prompts.make(name, shared))
    assert prompts.waits(prompts.make("d"))
    assert prompts.met == [("b", 9 * N)]


@pytest.mark.parametrize("computed, waits", [(8 * N - 1, True), (8 * N, False)])
def test_where_the_next_step_ends_is_settled(computed, waits):
    prompts = Prompts()
    prompts.run(prompts.make("a"), computed)
    assert prompts.waits(prompts.make("b")) is waits
    assert bool(prompts.met) is waits


def test_a_step_that_ends_there_for_another_request_serves_this_one_too():
    prompts = Prompts()
    leader = prompts.run(prompts.make("a"))
    assert prompts.waits(prompts.make("b"))
    leader.request.num_computed_tokens = 9 * N
    assert prompts.waits(prompts.make("c"))


@pytest.mark.parametrize("start, waits", [(9 * N - 1, True), (9 * N, False)])
def test_less_than_half_a_step_is_computed(start, waits):
    prompts = Prompts()
    leader = prompts.run(prompts.make("a"), start)
    leader.step_ends.meetings.add(SHARED)
    assert prompts.waits(prompts.make("b"), start) is waits


def test_nobody_waits_for_what_comes_behind():
    prompts = Prompts()
    prompts.run(prompts.make("a"), 2 * N)
    assert prompts.waits(prompts.make("b"), 3 * N) is False
    assert prompts.waits(prompts.make("c"), 2 * N) is True


def test_nobody_waits_for_a_boundary_from_which_no_request_may_start():
    prompts = Prompts()
    prompts.run(prompts.make("a"))
    assert prompts.waits(prompts.make("b", barred={SHARED, SHARED - N}))
    assert prompts.met == [("a", SHARED - 2 * N)]


def test_a_prompts_last_token_is_computed():
    prompts = Prompts()
    prompts.run(prompts.make("a"))
    assert prompts.waits(prompts.make("b", more=0))
    assert prompts.met == [("a", SHARED - N)]


@pytest.mark.parametrize(
    "options",
    [
        {"offered": False},
        {"drafter": Drafter(drops_block=True, runway=1)},
        {"drafter": Drafter(runway=3)},
    ],
)
def test_nobody_waits_where_a_step_leaves_nothing_to_start_from(options):
    prompts = Prompts()
    prompts.run(prompts.make("a", **options))
    assert prompts.waits(prompts.make("b", **options)) is False


@pytest.mark.parametrize("drafter", [Drafter(runway=1), Drafter(runway=1, look_ahead=1)])
def test_a_drafter_that_costs_no_block_keeps_nobody_from_waiting(drafter):
    prompts = Prompts()
    prompts.run(prompts.make("a", drafter=drafter))
    assert prompts.waits(prompts.make("b", drafter=drafter))


def test_nobody_waits_for_what_is_not_stored():
    prompts = Prompts()
    leader = prompts.make("a")
    leader.save = False
    prompts.run(leader)
    assert prompts.waits(prompts.make("b")) is False


def test_nobody_waits_by_default():
    prompts = Prompts(SharedPrefills(N, Ledger("s", SchedulerCounts()), None).step_tokens)
    prompts.run(prompts.make("a"))
    assert prompts.waits(prompts.make("b")) is False


def test_a_request_that_does_not_move_is_waited_for_so_long():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower)
    assert all(prompts.waits(follower) for _ in range(STILL))
    leader.request.num_computed_tokens = N
    assert all(prompts.waits(follower) for _ in range(STILL + 1))
    assert prompts.waits(follower) is None
    assert prompts.waits(follower) is False, "once is enough"


def test_a_state_that_is_nowhere_is_waited_for_so_long():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower)
    for step in range(LATE):
        leader.request.num_computed_tokens = SHARED + step
        assert prompts.waits(follower)
    leader.request.status = RequestStatus.FINISHED_STOPPED  # it has passed the boundary
    assert prompts.waits(follower) is None


@pytest.mark.parametrize("status", [RequestStatus.PREEMPTED, RequestStatus.FINISHED_ABORTED])
def test_a_request_that_stops_is_not_waited_for(status):
    prompts = Prompts()
    for _ in range(TRIES):
        leader = prompts.run(prompts.make("a"))
        follower = prompts.make("b")
        assert prompts.waits(follower)
        leader.request.status = status
        assert prompts.waits(follower) is None
        assert prompts.waits(follower) is False


def test_a_request_waits_for_so_many_others():
    prompts = Prompts()
    follower = prompts.make("z")
    for number in range(TRIES):
        leader = prompts.run(prompts.make(f"r{number}"))
        assert prompts.waits(follower)
        leader.request.status = RequestStatus.FINISHED_ABORTED
        assert prompts.waits(follower) is None
    prompts.run(prompts.make("a"))
    assert prompts.waits(follower) is False


def test_what_has_ended_is_forgotten():
    prompts = Prompts()
    leader, follower = prompts.run(prompts.make("a")), prompts.make("b")
    assert prompts.waits(follower)
    prompts.prefills.forget("b")
    leader.request.num_computed_tokens = leader.request.num_tokens
    prompts.prefills.step()
    assert not prompts.prefills._leaders and not prompts.prefills._waits
    assert not prompts.prefills._looked


def test_a_reset_ends_all_waits():
    prompts = Prompts()
    prompts.run(prompts.make("a"))
    follower = prompts.make("b")
    assert prompts.waits(follower)
    prompts.prefills.clear()
    assert prompts.waits(follower) is False


@pytest.mark.parametrize(
    "config, tokens",
    [
        ({"max_num_batched_tokens": 8192}, 8192),
        ({"max_num_batched_tokens": 8192, "max_num_scheduled_tokens": 4096}, 4096),
        ({"max_num_batched_tokens": 8192, "long_prefill_token_threshold": 1024}, 1024),
        (
            {
                "max_num_batched_tokens": 8192,
                "long_prefill_token_threshold": 1024,
                "long_prefill_token_threshold_adaptive": True,
            },
            8192,
        ),
    ],
)
def test_a_steps_tokens_are_vllms(config, tokens):
    made = SchedulerConfig(max_model_len=8192, is_encoder_decoder=False, **config)
    assert step_tokens_of(made) == tokens
