# SPDX-License-Identifier: Apache-2.0
"""Counts and logs lookups and loads, and tells the store watch and KV events of lookups."""

import logging
from dataclasses import dataclass

from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup
from lmcache_hybrid.scheduler.store_watch import StoreWatch
from lmcache_hybrid.scheduler.tracker import RequestTracker

logger = init_logger("vllm.lmcache_hybrid.scheduler.lookup_reports")


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
        _count_lookup(self._ledger, asked, result, one.seconds, self._size, one.known)
        loads = tracker.load_seconds is not None
        _log_lookup(tracker, asked.floor, result, self._size, loads)
        tracker.logged = True


def _count_lookup(
    ledger: Ledger[SchedulerCounts],
    asked: LookupRequest,
    result: LookupResult,
    seconds: float,
    block_size: int,
    known: bool,
) -> None:
    """Count an answered lookup.

    Args:
        seconds: that it took.
        known: False where the ranks do not know the request's adapter.
    """
    # Past the limit nothing could be loaded in any case.
    found = result.tokens(block_size)
    reach = min(result.attention, asked.limit) * block_size
    lost = reach - max(found, asked.floor * block_size)
    with ledger as counts:
        counts.lookups[_outcome(asked, result)] += 1
        counts.lookup_seconds.append(seconds)
        if not known:
            counts.skipped_requests["adapter"] += 1
        if lost > 0:
            counts.lost_hits += 1
            counts.lost_tokens += lost


def _outcome(asked: LookupRequest, result: LookupResult) -> str:
    """One word for counters."""
    if not result.available:
        return "unavailable"
    if result.hit:
        return "hit"
    return "local" if asked.limit + bool(asked.limit_tail) <= asked.floor else "miss"


def _log_lookup(
    tracker: RequestTracker, floor: int, result: LookupResult, block_size: int, loads: bool
) -> None:
    """Log a lookup in LMCache's own words; at INFO only a request's first.

    Args:
        floor: local blocks.
        loads: False where what was found is too little, or computing it is faster.
    """
    request, found = tracker.request, result.tokens(block_size)
    logger.log(
        logging.DEBUG if tracker.logged else logging.INFO,
        "Reqid: %s, Total tokens %d, Inference Engine computed tokens: %d, "
        "LMCache hit tokens: %d, need to load: %d",
        request.request_id,
        request.num_tokens,
        floor * block_size,
        found,
        max(0, found - floor * block_size) if loads else 0,
    )


def count_skipped(ledger: Ledger[SchedulerCounts], result: LookupResult, tokens: int) -> None:
    """Count a hit of ``tokens`` that is computed because that is faster."""
    with ledger as counts:
        counts.skipped_loads[result.source] += 1
        counts.skipped_load_tokens[result.source] += tokens


def count_hit(
    ledger: Ledger[SchedulerCounts],
    result: LookupResult,
    start: int,
    block_size: int,
    in_flight: int,
) -> None:
    """Count a load that begins at block ``start``.

    Args:
        in_flight: loads under way, this one included.
    """
    with ledger as counts:
        counts.hits[result.source] += 1
        for source, blocks in result.last(result.boundary - start + bool(result.tail)):
            counts.hit_tokens[source] += blocks * block_size
        if result.tail:
            counts.hit_tokens[result.source] -= block_size - result.tail
        counts.loads_in_flight = in_flight
