# SPDX-License-Identifier: Apache-2.0
"""Looks up what the store has of a request, as often as vLLM asks for it, and tells its tracker."""

import time
from collections.abc import Iterable

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import MISS, LookupResult
from lmcache_hybrid.scheduler.load_planner import limit_of, question_of
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue, PendingLookup
from lmcache_hybrid.scheduler.lookup_reports import LookupReports
from lmcache_hybrid.scheduler.pin_limit import Pins
from lmcache_hybrid.scheduler.tracker import (
    Asked,
    Loading,
    NotAsked,
    Offered,
    RequestTracker,
)
from lmcache_hybrid.scheduler.waits import LookupWait


class Lookups:
    """The lookups of all requests, and the claims that they leave on the ranks.

    Used by the scheduler's thread only.

    Attributes:
        wait: the time that a pass may wait.
    """

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        queue: LookupQueue,
        pins: Pins,
        ledger: Ledger[SchedulerCounts],
        reports: LookupReports,
    ) -> None:
        """
        Args:
            queue: sends lookups to the ranks.
            pins: says whether one more may be sent.
            reports: receives each lookup result.
        """
        self._plan, self._options = plan, options
        self._queue, self._pins = queue, pins
        self._ledger, self._reports = ledger, reports
        self.wait = LookupWait()
        self._released: list[tuple[str, int]] = []

    def begin(self, idle: bool) -> None:
        """Begin a scheduling pass, see :meth:`LookupWait.begin`."""
        self.wait.begin(idle)
        self._pins.begin()

    def answer(
        self, tracker: RequestTracker, floor: int, again: bool = False
    ) -> LookupResult | None:
        """Return what the ranks offer past ``floor`` local blocks. Asks them once.

        None while the lookup is pending, or must wait until other requests pin less.

        Args:
            again: ask them although they have answered.
        """
        self._pins.consider(tracker.request.request_id)
        while True:
            match tracker.phase:
                case Asked(lookup):
                    result = self.wait.poll(lookup)
                    if result is None:
                        return None
                    self._take(tracker, lookup, result)
                    tracker.offer(result, lookup.request.floor)
                    self._pins.answer(tracker.request.request_id, result)
                # An offer stands unless vLLM has lost local blocks since: it would begin too late.
                case Offered(result, asked_floor) if floor >= asked_floor and not again:
                    return result
                case NotAsked() | Offered():
                    if not self._ask(tracker, floor):
                        return None
                    again = False
                case Loading():
                    raise AssertionError("vLLM asks for no request whose load is under way")

    def _ask(self, tracker: RequestTracker, floor: int) -> bool:
        """Ask the ranks, unless nothing can be loaded or learned.

        Returns:
            False where the request must wait until others pin less.
        """
        request, prefix = tracker.request, tracker.prefix
        most = self._options.max_tokens_per_load
        limit, tail = limit_of(tracker, floor, self._plan, most)
        nothing = (limit, tail) <= (floor, 0)
        # Who has been answered once is not made to wait: it would give up what it was offered.
        # vLLM makes nobody wait who must not read.
        unread = request.skip_reading_prefix_cache
        first = isinstance(tracker.phase, NotAsked) and not nothing and not unread
        if first and not self._pins.may_ask(request.request_id):
            if not tracker.delayed:
                tracker.delayed = True
                with self._ledger as counts:
                    counts.delayed_lookups += 1
            return False
        tracker.forget_answer()
        if nothing and not tracker.save:
            tracker.offer(MISS, floor)
            return True
        least = self._options.min_retrieve_tokens
        lookup = self._queue.submit(question_of(tracker, floor, self._plan, limit, tail, least))
        if unread or (nothing and len(prefix.hashes) <= floor and prefix.identified):
            # Nothing can be loaded: learn what is stored without waiting for it.
            tracker.ask_in_background(lookup)
            tracker.offer(MISS, floor)
        else:
            tracker.ask(lookup)
            self._pins.ask(lookup)
        return True

    def learn_stored(self, tracker: RequestTracker, wait: bool = False) -> None:
        """Take the answer to the lookup of what is stored already, if there is one by now.

        Args:
            wait: as long as this pass may.
        """
        lookup = tracker.background
        if lookup is not None:
            result = self.wait.poll(lookup, last_chance=True) if wait else lookup.poll()
            if result is not None:
                self._take(tracker, lookup, result)

    def _take(self, tracker: RequestTracker, lookup: PendingLookup, result: LookupResult) -> None:
        """Take a lookup result, which is reported at the end of the pass."""
        known = tracker.take_answer(result, lookup.request.floor, self._plan)
        self._reports.add(tracker, lookup, result, known)

    # Claims

    def load(self, tracker: RequestTracker, tokens: int) -> LookupResult:
        """Start the promised load, for which vLLM has blocks. Returns the ranks' offer."""
        result = tracker.load(tokens, self._plan.block_size, time.monotonic())
        self._pins.forget(tracker.request.request_id)
        return result

    def admit(self, tracker: RequestTracker) -> None:
        """Start a request that loads nothing; vLLM has blocks for it."""
        self._release(tracker, tracker.admit())

    def withdraw(self, tracker: RequestTracker) -> None:
        """Take back a promise and release its claim."""
        self._release(tracker, tracker.withdraw())

    def _release(self, tracker: RequestTracker, claim: int) -> None:
        """Let the ranks release the claims of lookup number ``claim``, if there is one."""
        self._pins.forget(tracker.request.request_id)
        if claim:
            self._released.append((tracker.request.request_id, claim))

    def take_released(self) -> list[tuple[str, int]]:
        """Return (request, lookup number) of claims that the ranks must release, each once."""
        while self._queue.unreleased:
            self._released.append(self._queue.unreleased.popleft())
        released, self._released = self._released, []
        return released

    def check_integrity(self, trackers: Iterable[RequestTracker]) -> None:
        """Assert what holds between two calls of vLLM, for all requests that are tracked."""
        claims = {t.request.request_id: t.claim for t in trackers if t.claim}
        self._pins.check_integrity(claims)
