# SPDX-License-Identifier: Apache-2.0
"""Finds where a waiting request starts: asks the ranks and the policy, or lets it wait longer."""

import math

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.drops import Drops
from lmcache_hybrid.scheduler.load_policy import LoadPolicy
from lmcache_hybrid.scheduler.lookup_reports import count_skipped
from lmcache_hybrid.scheduler.lookups import Lookups
from lmcache_hybrid.scheduler.shared_prefills import SharedPrefills
from lmcache_hybrid.scheduler.tracker import RequestTracker


class Admission:
    """Says how much of a waiting request is loaded. Used by the scheduler's thread only."""

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        lookups: Lookups,
        policy: LoadPolicy,
        drops: Drops,
        prefills: SharedPrefills,
        ledger: Ledger[SchedulerCounts],
    ) -> None:
        """
        Args:
            lookups: say what can be loaded.
            policy: says whether it is.
            drops: what requests ask to be removed before they are looked up.
            prefills: prefixes that others compute, for which a request may wait.
        """
        self._plan, self._options, self._ledger = plan, options, ledger
        self._lookups, self._policy = lookups, policy
        self._drops, self._prefills = drops, prefills

    def promise(self, tracker: RequestTracker, num_computed_tokens: int) -> int | None:
        """Promise vLLM tokens past ``num_computed_tokens``; 0 for no load.

        None while the request waits: for the ranks, until others pin less, or for a prefix that
        another request computes.
        """
        request = tracker.request
        drop = tracker.drop
        if drop is not None and self._drops.waits(request, drop, self._lookups.wait.idle):
            return None
        tracker.step_ends.begin(request.num_tokens)
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
            result = self._lookups.answer(tracker, floor, again)
            if result is None:
                return None
            found = result.attention
            if tracker.request.skip_reading_prefix_cache:
                self._lookups.learn_stored(tracker, wait=True)
                found = tracker.stored.attention
            tracker.step_ends.junction = found * self._plan.block_size
            gain = self._judge(tracker, result, num_computed_tokens)
        if not gain:
            self._lookups.withdraw(tracker)
        return gain

    def _looks_up(self, tracker: RequestTracker) -> bool:
        """Whether a lookup helps: to load, or to learn what is stored already."""
        reads = not tracker.request.skip_reading_prefix_cache
        has_keys = bool(tracker.prefix.hashes or tracker.inner)
        return tracker.may_load and has_keys and (reads or tracker.save)

    def _judge(
        self, tracker: RequestTracker, result: LookupResult, num_computed_tokens: int
    ) -> int:
        """Return the tokens to load of the ranks' offer.

        0 where they are too few, or computing is faster.
        """
        end = result.tokens(self._plan.block_size)
        gain = end - num_computed_tokens
        if gain < max(1, self._options.min_retrieve_tokens):
            return 0
        if tracker.load_seconds is None:
            if tracker.prefetch is None:
                judged = self._policy.judge(tracker.request, result, num_computed_tokens)
            else:
                judged = math.inf
            tracker.load_seconds = judged
            if tracker.load_seconds is None:
                count_skipped(self._ledger, result, gain)
                return 0
        return gain
