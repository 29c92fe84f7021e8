# SPDX-License-Identifier: Apache-2.0
"""Passes lookup results on to metrics, log, store watch and KV events, once a step."""

from dataclasses import dataclass

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.lookup_metrics import count_lookup, log_lookup
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup
from lmcache_hybrid.scheduler.store_watch import StoreWatch
from lmcache_hybrid.scheduler.tracker import RequestTracker


@dataclass(frozen=True)
class _Answered:
    """A lookup and its result; see :meth:`LookupReports.add`."""

    tracker: RequestTracker
    asked: LookupRequest
    result: LookupResult
    seconds: float
    known: bool


class LookupReports:
    """Collects the lookup results of a scheduling pass, and reports them at its end.

    Used by the scheduler's thread only.
    """

    def __init__(
        self,
        plan: GroupPlan,
        ledger: Ledger[SchedulerCounts],
        store_watch: StoreWatch,
        events: KVEvents | None,
    ) -> None:
        self._size, self._ledger = plan.block_size, ledger
        self._store_watch, self._events = store_watch, events
        self._answered: list[_Answered] = []

    def add(
        self, tracker: RequestTracker, lookup: PendingLookup, result: LookupResult, known: bool
    ) -> None:
        """Add the result of a request's lookup, which ends now.

        Args:
            known: False where the ranks do not know the request's adapter.
        """
        self._answered.append(_Answered(tracker, lookup.request, result, lookup.seconds, known))

    def send(self) -> None:
        """Pass on what was added since the last call."""
        if not self._answered:
            return
        answered, self._answered = self._answered, []
        for one in answered:
            try:
                self._send(one)
            except Exception as error:
                caught("report_lookup", error, "metrics or events lack it", self._ledger)

    def _send(self, one: _Answered) -> None:
        tracker, asked, result = one.tracker, one.asked, one.result
        self._store_watch.answered(tracker, asked, result)  # reads ``logged``
        if self._events is not None:
            self._events.learn_answer(tracker.request, tracker.prefix, result)
        if tracker.request.skip_reading_prefix_cache:
            return  # it loads nothing
        count_lookup(self._ledger, asked, result, one.seconds, self._size, one.known)
        log_lookup(tracker.request, asked.floor, result, self._size, first=not tracker.logged)
        tracker.logged = True
