# SPDX-License-Identifier: Apache-2.0
"""Errors that nobody foresaw go no further than this package, and are never silent."""

import logging
from types import SimpleNamespace as Namespace

import pytest
from vllm.v1.outputs import KVConnectorOutput

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.faults import STRICT, caught
from lmcache_hybrid.metrics import HybridStats
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.storage.claims import LMCacheClaim
from lmcache_hybrid.storage.weights_guard import WeightsGuard

from .helpers import N, make_output, make_request
from .scheduler_rig import Rig as SchedulerRig
from .scheduler_rig import all_offers, attention_of, table


def broken(*args, **kwargs):
    raise OSError("from outside")


def door(rig) -> HybridConnector:
    """The connector of one side, as vLLM calls it."""
    connector = object.__new__(HybridConnector)
    connector.worker = getattr(rig, "worker", None)
    connector.scheduler = getattr(rig, "scheduler", None)
    connector._guard = WeightsGuard()
    return connector


def test_the_first_error_of_a_place_is_logged_with_its_traceback_and_all_are_counted(
    lenient, hybrid_log
):
    ledger = Ledger("worker", WorkerCounts())
    for _ in range(3):
        caught("here", OSError("from outside"), "a prompt is computed", ledger)
    assert lenient == {"here": 3} and ledger.counts.caught_errors == {"here": 3}
    (record,) = [r for r in hybrid_log.records if r.levelno >= logging.WARNING]
    assert record.exc_info and "so a prompt is computed" in record.getMessage()
    assert "OSError('from outside')" in record.getMessage()
    assert "only counted (vllm:lmcache_hybrid_*_errors_total)" in record.getMessage()


def test_an_error_of_a_side_that_is_off_is_not_said_to_be_counted(lenient, hybrid_log):
    for _ in range(3):
        caught("start", OSError("from outside"), "LMCache is off")
    (record,) = [r for r in hybrid_log.records if r.levelno >= logging.WARNING]
    assert record.exc_info and "Further errors there are not logged" in record.getMessage()


def test_tests_see_every_error(lenient, monkeypatch):
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(OSError, match="from outside"):
        caught("here", OSError("from outside"), "a prompt is computed")


# On a rank


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_load_whose_adapter_cannot_be_asked_for_is_computed(worker_rig, lenient, when):
    rig = worker_rig().saved()
    load, answers = rig.load(), [] if when == "before" else [True, True]

    def holds(adapter, reads=False):
        return answers.pop() if answers else broken()

    rig.worker.loads._adapters = Namespace(holds=holds)
    rig.start(load)
    assert len(rig.worker.loads) == 1, "it is to be reported"
    results = rig.results()
    assert results.failed_recving == results.finished_recving == {"r"}
    assert lenient == ({} if when == "before" else {"end_load": 1})
    assert rig.worker.counts.failed_loads["error,none"] == (when == "before")
    rig.assert_clean()


def test_a_load_beside_one_that_cannot_be_queued_is_loaded(worker_rig, lenient):
    rig = worker_rig().saved()
    loads, mark = [rig.load("bad"), rig.load("good")], rig.worker.loads._copies.mark
    marks = [broken, mark]
    rig.worker.loads._copies.mark = lambda: marks.pop(0)()
    rig.start(*loads)
    ended, failed = set(), set()
    while len(ended) < 2:
        results = rig.results()
        ended |= results.finished_recving
        failed |= results.failed_recving
    assert failed == {"bad"} and lenient == {"start_load": 1}
    rig.assert_clean()


def test_a_release_that_fails_keeps_no_load_from_being_queued(worker_rig, lenient, monkeypatch):
    rig = worker_rig().saved()
    load = rig.load()
    monkeypatch.setattr(rig.lookup, "release", broken)
    rig.worker.start_loads(ConnectorMetadata(loads=(load,), released=(("other", 1),)))
    assert rig.results().failed_recving == set() and lenient == {"give_up_claim": 1}


def test_one_pin_that_cannot_be_released_keeps_no_other():
    claim, released = LMCacheClaim({}), []
    claim._pinned = [lambda: released.append(1), broken, lambda: released.append(2)]
    with pytest.raises(OSError):
        claim.release()
    assert sorted(released) == [1, 2]
    claim.release()  # nothing is left


def test_what_nobody_can_load_is_reported_at_once_and_releases_its_claim(worker_rig):
    rig = worker_rig().saved()
    rig.load("r")  # claims
    connector = door(rig)
    connector.bind_connector_metadata(ConnectorMetadata(unloadable=("r",)))
    results = connector.get_transfer_results(set())
    assert results.failed_recving == results.finished_recving == {"r"}
    rig.assert_clean()


def test_a_rank_that_is_off_fails_every_load(worker_rig):
    load = worker_rig().load(claim=False)
    connector = door(Namespace())
    connector.bind_connector_metadata(ConnectorMetadata(loads=(load,), ended=("e",)))
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    assert results.failed_recving == results.finished_recving == {"r"}
    assert results.finished_sending == {"e"}


def test_a_step_that_failed_is_not_stored(worker_rig):
    """vLLM's V1 runner asks for its save all the same, and its blocks hold anything."""
    rig = worker_rig()
    connector = door(rig)
    connector.bind_connector_metadata(rig.save_metadata())
    with pytest.raises(MemoryError):
        try:
            raise MemoryError("in a layer")
        finally:
            connector.wait_for_save()
    assert rig.worker.counts.skipped_saves == {"error": 1}
    connector.bind_connector_metadata(rig.save_metadata())
    connector.wait_for_save()
    try:
        raise ValueError("of who calls the engine")
    except ValueError:
        connector.bind_connector_metadata(rig.save_metadata())
        connector.wait_for_save()
    assert rig.worker.counts.skipped_saves == {"error": 1}, "the next steps are stored"


def test_a_step_that_cannot_be_stored_counts_as_skipped_and_goes_on(worker_rig, lenient):
    rig = worker_rig()
    connector = door(rig)
    connector.bind_connector_metadata(rig.save_metadata())
    rig.store.writable = broken
    connector.wait_for_save()
    assert rig.worker.counts.skipped_saves == {"error": 1} and lenient == {"wait_for_save": 1}
    assert rig.worker.counts.caught_errors == {"wait_for_save": 1}


def test_loads_are_reported_with_the_next_step_where_their_results_cannot_be_asked_for(
    worker_rig, lenient, monkeypatch
):
    rig = worker_rig().saved()
    connector, load = door(rig), rig.load()
    connector.bind_connector_metadata(ConnectorMetadata(loads=(load,), idle=True, ended=("e",)))
    with monkeypatch.context() as patch:
        patch.setattr(rig.worker.loads, "results", broken)
        assert connector.get_transfer_results(set()).finished_sending == {"e"}
    assert rig.results().finished_recving == {"r"}
    assert lenient == {"get_transfer_results": 1}


# On the scheduler's side


def test_a_request_whose_lookup_breaks_is_computed_and_keeps_no_claim(lenient, monkeypatch):
    request = make_request("r", 4 * N + 1)
    rig = SchedulerRig().holds(request, 4, 4)
    connector = door(rig)
    with monkeypatch.context() as patch:
        patch.setattr(rig.scheduler._planner, "admit", broken)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert lenient == {"get_num_new_matched_tokens": 1}
    rig.step()
    assert rig.ranks.num_claims == [0], "vLLM may have no blocks for it for a long time"
    connector.update_state_after_alloc(request, blocks(request), 0)
    assert rig.forward(request, request.num_tokens, all_offers(4)) is None, "it is given up"


def blocks(request) -> Namespace:
    return Namespace(get_block_ids=lambda: table(request))


def test_a_load_that_cannot_be_planned_fails_on_every_rank(lenient, monkeypatch):
    request = make_request("r", 4 * N + 1)
    rig = SchedulerRig(2).holds(request, 4, 4)
    connector = door(rig)
    assert connector.get_num_new_matched_tokens(request, 0) == (4 * N, True)
    monkeypatch.setattr(rig.scheduler._policy, "sent", broken)
    connector.update_state_after_alloc(request, blocks(request), 4 * N)
    assert lenient == {"update_state_after_alloc": 1}
    metadata = rig.step()
    assert metadata.unloadable == (request.request_id,) and not metadata.loads
    rig.loaded(request, failed=True)
    assert rig.scheduler.counts.failed_loads == 1 and rig.scheduler.counts.loads_in_flight == 0
    assert rig.match(request)[0] == 0, "it is not tried again"
    rig.scheduler.request_finished(request)
    rig.step()
    assert rig.ranks.num_claims == [0, 0]


def test_a_request_that_cannot_be_planned_keeps_no_other_from_being_stored(lenient, monkeypatch):
    first, second = make_request("first", 2 * N + 1), make_request("second", range(1, 2 * N + 2))
    rig = SchedulerRig()
    for request in (first, second):
        assert rig.match(request)[0] == 0
        rig.scheduler.update_state_after_alloc(request, table(request), 0)
    plan = rig.scheduler._planner.plan

    def plan_second(tracker, *args):
        return broken() if tracker.request is first else plan(tracker, *args)

    monkeypatch.setattr(rig.scheduler._planner, "plan", plan_second)
    scheduled = {request.request_id: 2 * N + 1 for request in (first, second)}
    tables = {request.request_id: table(request) for request in (first, second)}
    (save,) = rig.step(scheduled, tables).saves
    assert save.request_id == "second" and attention_of(save) == [0, 1]
    assert lenient == {"plan_save": 1}


def test_a_lookup_that_cannot_be_reported_keeps_no_other_from_it(lenient, monkeypatch):
    rig = SchedulerRig()
    for name in ("first", "second"):
        rig.match(make_request(name))
    answered = rig.scheduler.store_watch.answered

    def answered_second(tracker, *args):
        return broken() if tracker.request.request_id == "first" else answered(tracker, *args)

    monkeypatch.setattr(rig.scheduler.store_watch, "answered", answered_second)
    rig.step()
    assert lenient == {"report_lookup": 1}
    assert rig.scheduler.counts.lookups == {"miss": 1}


def test_what_waits_to_be_sent_is_sent_although_a_step_cannot_be_planned(lenient, monkeypatch):
    request = make_request("r", 4 * N + 1)
    rig = SchedulerRig().holds(request, 4, 4)
    connector = door(rig)
    tokens, _ = rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), tokens)
    monkeypatch.setattr(rig.scheduler._policy, "scheduled", broken)
    (load,) = connector.build_connector_meta(make_output({}, {}, {}, ())).loads
    assert load.request_id == request.request_id
    assert rig.scheduler.counts.lookups == {"hit": 1}
    assert lenient == {"build_connector_meta": 1}


def test_a_load_ends_although_what_ranks_say_cannot_be_read(lenient, monkeypatch):
    request = make_request("r", 4 * N + 1)
    rig = SchedulerRig().holds(request, 4, 4)
    assert rig.admit(request) is not None
    monkeypatch.setattr(rig.scheduler._policy, "ended", broken)
    door(rig).update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))
    rig.scheduler.check_integrity()
    assert rig.scheduler.counts.loads_in_flight == 0 and lenient == {"update_connector_output": 1}


def test_a_reset_that_breaks_has_failed_and_nothing_is_served(lenient, hybrid_log):
    rig = SchedulerRig()
    connector = door(rig)
    connector._client, connector._queue = Namespace(clear=broken), Namespace(run=broken)
    assert connector.reset_cache() is False and rig.scheduler.closed
    assert "A reset of all caches failed" in hybrid_log.text
    assert lenient == {"reset_cache": 1}


def test_a_watch_that_breaks_keeps_no_claim_of_a_request_that_ends(monkeypatch):
    request = make_request("r", 4 * N + 1)
    rig = SchedulerRig().holds(request, 4, 4)
    connector = door(rig)
    assert connector.get_num_new_matched_tokens(request, 0) == (4 * N, True)
    monkeypatch.setattr(rig.scheduler.store_watch, "ended", broken)
    with pytest.raises(OSError, match="from outside"):
        rig.scheduler.request_finished(request)
    rig.step()
    assert rig.ranks.num_claims == [0]


def test_what_ranks_count_reaches_the_watch_over_the_store():
    rig, heard = SchedulerRig(), []
    rig.scheduler.store_watch = Namespace(reported=heard.append)
    counts = {"worker.saved_bytes": 1}
    for stats in (None, HybridStats(counts)):
        door(rig).update_connector_output(KVConnectorOutput(kv_connector_stats=stats))
    assert heard == [counts]


def test_an_engine_whose_scheduler_side_is_off_computes():
    connector, request = door(Namespace()), make_request("r", 4 * N + 1)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, blocks(request), 0)
    assert connector.build_connector_meta(make_output({}, {}, {}, ())) == ConnectorMetadata()
    connector.update_connector_output(KVConnectorOutput())
    assert connector.register_finished_partial_tail(request, ([],), ()) is False
    assert connector.request_finished(request, []) == (False, None)
    assert connector.reset_cache() is True and connector.get_kv_connector_stats() is None
    connector.reset_failed()
