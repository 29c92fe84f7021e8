# SPDX-License-Identifier: Apache-2.0
"""Passes lookup results on to metrics, log, store watch and KV events, once a step."""

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.lookup_metrics import count_lookup, log_lookup
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup
from lmcache_hybrid.scheduler.store_watch import StoreWatch
from lmcache_hybrid.scheduler.tracker import RequestTracker


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
        self._results: list[tuple[RequestTracker, PendingLookup, LookupResult, bool]] = []

    def add(
        self, tracker: RequestTracker, lookup: PendingLookup, result: LookupResult, known: bool
    ) -> None:
        """Add the result of a request's lookup.

        Args:
            known: False where the ranks do not know the request's adapter.
        """
        self._results.append((tracker, lookup, result, known))

    def send(self) -> None:
        """Pass on what was added since the last call."""
        if not self._results:
            return
        results, self._results = self._results, []
        for tracker, lookup, result, known in results:
            try:
                self._send(tracker, lookup, result, known)
            except Exception as error:
                caught("report_lookup", error, "metrics or events lack it", self._ledger)

    def _send(
        self, tracker: RequestTracker, lookup: PendingLookup, result: LookupResult, known: bool
    ) -> None:
        request = tracker.request
        self._store_watch.answered(tracker, lookup.request, result)  # reads ``logged``
        if self._events is not None:
            self._events.learn_answer(request, tracker.prefix, result)
        if request.skip_reading_prefix_cache:
            return  # it loads nothing
        count_lookup(self._ledger, lookup, result, self._size, known)
        log_lookup(request, lookup.request.floor, result, self._size, first=not tracker.logged)
        tracker.logged = True
