# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the worker count, and how a ledger reports it."""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts, WorkerCounts
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

from .helpers import N, make_request
from .scheduler_rig import Rig as SchedulerRig
from .scheduler_rig import all_offers, table


def test_a_report_is_what_was_counted_since_the_last_one():
    ledger = Ledger("scheduler", SchedulerCounts())
    assert ledger.report() is None
    with ledger as counts:
        counts.lookups["hit"] += 2
        counts.lost_tokens += 5
        counts.lookup_seconds.append(0.5)
        counts.loads_in_flight = 3
    assert ledger.report() == {
        "scheduler.lookups": {"hit": 2},
        "scheduler.lost_tokens": 5,
        "scheduler.lookup_seconds": [0.5],
        "scheduler.loads_in_flight": 3,
    }
    assert ledger.report() is None
    with ledger as counts:
        counts.lookups["miss"] += 1
        counts.loads_in_flight = 1
    assert ledger.report() == {"scheduler.lookups": {"miss": 1}, "scheduler.loads_in_flight": 1}
    assert ledger.counts.lookups == {"hit": 2, "miss": 1}  # totals stay
    assert ledger.counts.lookup_seconds == []


def test_no_count_is_lost_between_threads():
    ledger, seen, times = Ledger("worker", WorkerCounts()), 0, 0

    def count() -> None:
        for _ in range(2000):
            with ledger as counts:
                counts.loaded_bytes += 1
                counts.load_seconds.append(1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or ledger._changed:
        news = ledger.report() or {}
        seen += news.get("worker.loaded_bytes", 0)
        times += len(news.get("worker.load_seconds", ()))
    assert seen == times == 8000


def test_what_a_backend_counts_during_a_report_is_reported_once():
    """Its writers count under a lock of their own."""

    class Busy(Counter):
        def items(self):
            self["LocalDiskBackend"] += 1  # a write fails just now
            return super().items()

    ledger, seen = Ledger("worker", WorkerCounts(failed_writes=Busy())), Counter()
    for _ in range(2):
        ledger.counts.failed_writes["RemoteBackend"] += 1
        with ledger as counts:
            counts.saved_bytes += 1
        for label, times in ledger.report().get("worker.failed_writes", {}).items():
            seen[label] += times
    assert seen == ledger.counts.failed_writes


def test_a_step_that_does_nothing_takes_no_lock_and_makes_no_stats(worker):
    rig = SchedulerRig()
    for ledger in (rig.scheduler.ledger, worker.worker.ledger):
        ledger._lock = None  # any use of it raises
    request = make_request(tokens=N - 1)
    for _ in range(3):
        assert rig.scheduler.build_connector_meta(SimpleNamespace(**empty_step(request))) == NOTHING
        worker.worker.start_loads(NOTHING)
        worker.worker.save(NOTHING)
        worker.worker.results(set(), False)
        assert rig.scheduler.ledger.report() is worker.worker.ledger.report() is None


def empty_step(request) -> dict:
    """A decode step of one request."""
    return {
        "kv_connector_block_state": None,
        "scheduled_new_reqs": [],
        "num_scheduled_tokens": {request.request_id: 1},
        "total_num_scheduled_tokens": 1,
    }


def test_a_hit_counts_its_tokens_by_source():
    request = make_request(tokens=5 * N + 1)
    rig = SchedulerRig().holds(request, 5, 4)
    near = {key for key in rig.ranks.stores[0].records if key.boundary <= 2 * N}
    locate = rig.ranks.stores[0].locate
    rig.ranks.stores[0].locate = lambda keys, deadline: {
        key: "near" if key in near else "far" for key in locate(keys, deadline)
    }
    assert rig.match(request, 0) == (4 * N, True)
    assert rig.match(request, N) == (3 * N, True), "vLLM has found a block of its own since"
    rig.scheduler.update_state_after_alloc(request, table(request), 3 * N)
    rig.step()
    counts = rig.scheduler.counts
    assert counts.hits == {"far": 1}
    assert counts.hit_tokens == {"near": N, "far": 2 * N}
    assert (counts.lost_hits, counts.lost_tokens) == (1, N)
    assert counts.loads_in_flight == 1
    rig.loaded(request)
    assert counts.loads_in_flight == counts.failed_loads == 0


@pytest.mark.parametrize(
    "attention, states, computed, outcome, lost",
    [
        (0, (), 0, "miss", 0),
        (3, (), 0, "miss", 3),  # pages without a state
        (3, (2,), 0, "hit", 1),
        (3, (3,), 0, "hit", 0),
        (3, (2,), 2 * N, "miss", 1),
        (3, (), 3 * N, "local", 0),  # vLLM has it all: nothing is lost
        (2, (), 3 * N, "local", 0),
    ],
)
def test_a_lookup_is_counted_by_outcome_and_by_what_it_lost(
    attention, states, computed, outcome, lost
):
    # Four whole blocks, but the last token is never restored: three at most.
    request = make_request(tokens=4 * N)
    rig = SchedulerRig().holds(request, attention, *states)
    rig.match(request, computed)
    rig.step()
    counts = rig.scheduler.counts
    assert counts.lookups == {outcome: 1}
    assert (counts.lost_hits, counts.lost_tokens) == (lost > 0, lost * N)
    assert len(counts.lookup_seconds) == 1 and 0 <= counts.lookup_seconds[0] < 60


def test_a_lookup_without_answer_lasts_until_it_is_given_up_and_not_until_it_is_reported():
    rig = SchedulerRig()
    rig.match(make_request("r"))
    tracker = rig.scheduler._trackers["r"]
    lookup = PendingLookup(LookupRequest("r", tracker.prefix, 1, 0), time.monotonic())
    rig.scheduler._reports.add(tracker, lookup, UNAVAILABLE, known=True)
    lookup.sent -= 100.0
    rig.step()
    assert len(rig.scheduler.counts.lookup_seconds) == 2
    assert max(rig.scheduler.counts.lookup_seconds) < 60.0


def test_pages_past_the_last_token_or_a_load_limit_are_not_lost():
    request = make_request(tokens=4 * N)
    rig = SchedulerRig().holds(request, 4, 3)
    assert rig.match(request) == (3 * N, True)
    rig.step()
    assert rig.scheduler.counts.lost_tokens == 0
    rig = SchedulerRig(max_tokens_per_load=2 * N).holds(request, 4, 2)
    assert rig.match(request) == (2 * N, True)
    rig.step()
    assert rig.scheduler.counts.lost_tokens == 0


def test_a_rank_without_a_verdict_is_told_from_a_miss():
    rig = SchedulerRig(ranks=2)
    rig.ranks.silent = True
    rig.match(make_request("one"))
    rig.ranks.silent = False
    rig.ranks.stores[1].readable = lambda: False
    rig.match(make_request("two"))
    rig.step()
    assert rig.scheduler.counts.lookups == {"unavailable": 2}


def test_a_failed_load_counts_what_it_promised_and_an_aborted_one_does_not():
    one, two = make_request("one"), make_request("two")
    rig = SchedulerRig().holds(one, 3, 3)
    rig.admit(one, N)
    rig.admit(two)
    counts = rig.scheduler.counts
    assert counts.loads_in_flight == 2
    rig.scheduler.request_finished(two)
    rig.loaded(one, failed=True)
    assert (counts.failed_loads, counts.failed_tokens, counts.loads_in_flight) == (1, 2 * N, 1)
    rig.loaded(two, failed=True)
    assert (counts.failed_loads, counts.failed_tokens, counts.loads_in_flight) == (1, 2 * N, 0)


def test_a_request_that_ends_with_the_error_of_its_load_is_counted():
    """With ``lmcache.hybrid_load_failure_policy: fail`` vLLM ends it first."""
    request = make_request("one")
    rig = SchedulerRig().holds(request, 3, 3)
    rig.admit(request, N)
    request.status = RequestStatus.FINISHED_ERROR
    rig.scheduler.request_finished(request)
    rig.loaded(request, failed=True)
    counts = rig.scheduler.counts
    assert (counts.failed_loads, counts.failed_tokens, counts.loads_in_flight) == (1, 2 * N, 0)


@pytest.mark.parametrize(
    "reason, request_, options",
    [
        ("short", {"tokens": N - 1}, {}),
        ("read_only", {}, {"save": False}),
        ("priority", {"priority": 5}, {"priority_limit": 4}),
        ("skip_save", {"params": {"lmcache.skip_save": True}}, {}),
        ("uncacheable", {"params": {"lmcache.tag.user": "a@b"}}, {}),
        ("skip_reading", {}, {}),
    ],
)
def test_a_skipped_request_is_counted_once_by_reason(reason, request_, options):
    rig, request = SchedulerRig(**options), make_request(**request_)
    request.skip_reading_prefix_cache = reason == "skip_reading"
    for _ in range(2):  # once per request
        rig.match(request)
    assert rig.scheduler.counts.skipped_requests == {reason: 1}


def test_offers_that_come_again_are_no_loss():
    request = make_request(tokens=3 * N + 1)
    rig = SchedulerRig()
    rig.match(request)
    rig.forward(request, 3 * N, all_offers(3))
    rig.forward(request, 1, all_offers(3))
    assert not rig.scheduler.counts.dropped_offers


def test_records_bytes_and_seconds_of_saves_and_loads_are_counted(worker):
    worker.worker.save(worker.save_metadata())
    worker.run(worker.load(start=1))
    counts = worker.worker.counts
    assert (counts.saved_attention, counts.saved_states) == (3, 1)
    assert (counts.loaded_attention, counts.loaded_states) == (2, 1)
    assert 0 < counts.loaded_bytes < counts.saved_bytes
    assert [len(t) for t in (counts.save_seconds, counts.load_seconds)] == [1, 1]
    assert counts.load_wait_seconds[0] >= 0
    assert not counts.failed_loads and not counts.skipped_saves


def test_failed_loads_are_counted_by_reason(worker):
    worker.saved()
    load = worker.load("a")
    worker.lookup.release("a")
    worker.run(load)  # its records are not pinned any more
    worker.store.fetch = lambda claim, keys: (_ for _ in ()).throw(OSError("no such thing"))
    worker.run(worker.load("b"))
    assert worker.worker.counts.failed_loads == {"unpinned,none": 1, "error,none": 1}
    assert worker.worker.counts.load_seconds == []  # only of those that came


def test_skipped_saves_are_counted_by_reason(worker):
    worker.store.readable = worker.store.writable = lambda: False
    worker.saved()
    worker.store.readable = lambda: True
    worker.saved()
    assert worker.worker.counts.skipped_saves == {"unhealthy": 1, "frozen": 1}
