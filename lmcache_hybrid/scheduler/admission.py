# SPDX-License-Identifier: Apache-2.0
"""Finds where a waiting request starts: asks the ranks and the policy, or lets it wait longer."""

import math
import time
from collections.abc import Iterable

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import MISS, LookupResult
from lmcache_hybrid.scheduler.drops import Drops
from lmcache_hybrid.scheduler.load_planner import limit_of, question_of
from lmcache_hybrid.scheduler.load_policy import LoadPolicy
from lmcache_hybrid.scheduler.lookup_metrics import count_skipped
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue, PendingLookup
from lmcache_hybrid.scheduler.lookup_reports import LookupReports
from lmcache_hybrid.scheduler.pins import Pins
from lmcache_hybrid.scheduler.shared_prefills import SharedPrefills
from lmcache_hybrid.scheduler.tracker import (
    Asked,
    Loading,
    NotAsked,
    Offered,
    RequestTracker,
)
from lmcache_hybrid.scheduler.waits import LookupWait


class Admission:
    """Looks up hits for waiting requests. Used by the scheduler's thread only.

    Attributes:
        drops: what requests ask to be removed before they are looked up.
    """

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        queue: LookupQueue,
        policy: LoadPolicy,
        pins: Pins,
        prefills: SharedPrefills,
        ledger: Ledger[SchedulerCounts],
        reports: LookupReports,
    ) -> None:
        """
        Args:
            queue: sends lookups to the ranks.
            pins: says whether one more may be sent.
            prefills: prefixes that others compute, for which a request may wait.
            reports: receives each lookup result.
        """
        self._plan, self._options = plan, options
        self._queue, self._policy, self._pins, self._prefills = queue, policy, pins, prefills
        self._ledger, self._reports = ledger, reports
        self._wait = LookupWait()
        self.drops = Drops(plan, queue, ledger)
        self._released: list[tuple[str, int]] = []

    def begin(self, idle: bool) -> None:
        """Begin a scheduling pass, see :meth:`LookupWait.begin`."""
        self._wait.begin(idle)
        self._pins.begin()

    def promise(self, tracker: RequestTracker, num_computed_tokens: int) -> int | None:
        """Promise vLLM tokens past ``num_computed_tokens``; 0 for no load.

        None while the request waits: for the ranks, until others pin less, or for a prefix that
        another request computes.
        """
        request = tracker.request
        drop = tracker.drop
        if drop is not None and self.drops.waits(request, drop, self._wait.idle):
            return None
        self._pins.consider(request.request_id)
        tracker.checkpoints.begin(request.num_tokens)
        gain = self._gain(tracker, num_computed_tokens)
        if gain is not None and tracker.may_load and not request.skip_reading_prefix_cache:
            must_wait = self._prefills.wait(tracker, num_computed_tokens + gain)
            if must_wait:
                return None
            if must_wait is None:  # it has waited in vain, and the store may have more by now
                gain = self._gain(tracker, num_computed_tokens, again=True)
        if gain:
            tracker.promise(gain)
        return gain

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

    def _gain(
        self, tracker: RequestTracker, num_computed_tokens: int, again: bool = False
    ) -> int | None:
        """Return the tokens to load past ``num_computed_tokens``; with 0 it claims nothing.

        None while the lookup is pending, or must wait until other requests pin less.

        Args:
            again: ask the ranks although they have answered.
        """
        gain = 0
        if self._looks_up(tracker):
            floor = num_computed_tokens // self._plan.block_size
            result = self._answer(tracker, floor, again)
            if result is None:
                return None
            found = result.attention
            if tracker.request.skip_reading_prefix_cache:
                self.learn_stored(tracker, wait=True)
                found = tracker.stored.attention
            tracker.checkpoints.junction = found * self._plan.block_size
            gain = self._judge(tracker, result, num_computed_tokens)
        if not gain:
            self.withdraw(tracker)
        return gain

    def _looks_up(self, tracker: RequestTracker) -> bool:
        """Whether a lookup helps: to load, or to learn what is stored already."""
        reads = not tracker.request.skip_reading_prefix_cache
        has_keys = bool(tracker.prefix.hashes or tracker.inner)
        return tracker.may_load and has_keys and (reads or tracker.save)

    def _answer(self, tracker: RequestTracker, floor: int, again: bool) -> LookupResult | None:
        """Return what the ranks offer past ``floor`` local blocks, and else as :meth:`_gain`."""
        while True:
            match tracker.phase:
                case Asked(lookup):
                    result = self._wait.poll(lookup)
                    if result is None:
                        return None
                    self.answered(tracker, lookup, result)
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

    def _judge(
        self, tracker: RequestTracker, result: LookupResult, num_computed_tokens: int
    ) -> int:
        """Return the tokens to load of the ranks' offer.

        0 where they are too few, or computing is faster.
        """
        end = result.boundary * self._plan.block_size + result.tail
        gain = end - num_computed_tokens
        if gain < max(1, self._options.min_retrieve_tokens):
            return 0
        if tracker.load_seconds is None:
            judged = self._policy.judge(tracker.request, result, num_computed_tokens)
            tracker.load_seconds = judged if tracker.prefetch is None else math.inf
            if tracker.load_seconds is None:
                count_skipped(self._ledger, result, gain)
                return 0
        return gain

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
        tracker.load_seconds = None
        # Store again what is computed again: it may be missing because its save failed.
        tracker.stored.forget(tracker.stored.attention)
        if nothing and not tracker.save:
            tracker.offer(MISS, floor)
            return True
        least = self._options.min_retrieve_tokens
        lookup = self._queue.submit(question_of(tracker, floor, self._plan, limit, tail, least))
        if unread or (nothing and len(prefix.hashes) <= floor and prefix.identified):
            # Nothing can be loaded: learn what is stored without waiting for it.
            tracker.cancel_background()
            tracker.background = lookup
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
            result = self._wait.poll(lookup, last_chance=True) if wait else lookup.poll()
            if result is not None:
                self.answered(tracker, lookup, result)

    def answered(
        self, tracker: RequestTracker, lookup: PendingLookup, result: LookupResult
    ) -> None:
        """Take a lookup result, which is reported at the end of the pass."""
        if tracker.prefetch is not None:
            tracker.prefetch.silent = not result.available
        self._reports.add(tracker, lookup, result, tracker.take_answer(result))
        stored, size = tracker.stored, self._plan.block_size
        # Of all others nothing is known: some before a hit may be missing.
        stored.states.update(boundary * size for boundary in result.states)
        if result.hit:
            stored.states.add(result.boundary * size + result.tail)
        for window in self._plan.windows:
            first = window.first(lookup.request.floor, result.boundary)
            pages, last = set(range(first, result.boundary)), 0
            for end in result.states:
                pages.update(range(max(last, window.first(0, end)), end))
                last = end
            stored.windows.update((window.group, block) for block in pages)

    def check_integrity(self, trackers: Iterable[RequestTracker]) -> None:
        """Assert what holds between two calls of vLLM, for all requests that are tracked."""
        self._prefills.check_integrity()
        claims = {t.request.request_id: t.claim for t in trackers if t.claim}
        self._pins.check_integrity(claims)
