# SPDX-License-Identifier: Apache-2.0
"""Begins to track new requests: their prompts, hints, and where their steps end."""

from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.drops import UNFINISHED, Drop
from lmcache_hybrid.scheduler.keeps import Keep
from lmcache_hybrid.scheduler.prefetches import Prefetch
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.scheduler.request_options import (
    DROP,
    KEEP,
    PREFETCH,
    RequestOptions,
    RequestOptionsReader,
)
from lmcache_hybrid.scheduler.step_ends import Drafter, StepEnds
from lmcache_hybrid.scheduler.tracker import RequestTracker
from lmcache_hybrid.scheduler.unit_advice import ShortPromptAdvice
from lmcache_hybrid.scheduler.unsaved import why_unread, why_unsaved
from lmcache_hybrid.scheduler.whole_items import barred_boundaries

if TYPE_CHECKING:
    from vllm.v1.request import Request


CLOSED = (
    "the engine's caches are being reset, or their reset has failed, or the request has ended "
    "before its turn. Nothing was done: repeat it."
)


class Arrivals:
    """Makes trackers. Used by the scheduler's thread only."""

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        hashes_per_block: int,
        ledger: Ledger[SchedulerCounts],
    ) -> None:
        """
        Args:
            ledger: counts requests that are not stored or not loaded.
        """
        self._plan, self._options, self._ledger = plan, options, ledger
        self._hashes_per_block = hashes_per_block
        self._reader = RequestOptionsReader()
        self._advice = ShortPromptAdvice(plan, ledger)

    def track(
        self, request: "Request", before: RequestTracker | None, drafter: Drafter
    ) -> RequestTracker:
        """Begin to track a request, or the next part of a session.

        Args:
            before: tracker of the session's last part; None for a first part.
        """
        plan, options = self._plan, self._options
        asked = self._reader.read(request)
        prefix = prefix_of(request, plan.block_size, self._hashes_per_block, asked.tags)
        # vLLM keeps only the last part's parameters, but those of earlier parts still hold for
        # their tokens.
        if before is not None and (prefix is None or before.tags != prefix.tags):
            prefix = None
        drop, prefetch, keep = self._steering_of(asked, prefix)
        steered = drop is not None or prefetch is not None
        unsaved = why_unsaved(request, prefix, options, asked.skip_save or steered)
        if before is not None and before.skip_save:
            unsaved = unsaved or "skip_save"
        if prefix is not None:
            self._advice.add(request)
        unit = plan.unit
        # No hit is deeper.
        inner = drafter.deepest(request.num_prompt_tokens, unit) if prefix and unit else 0
        short = not (prefix and prefix.hashes or inner)
        if reason := unsaved or ("short" if short else why_unread(request)):
            with self._ledger as counts:
                counts.skipped_requests[reason] += 1
        step_ends = StepEnds(
            plan.block_size,
            options.checkpoint_tokens,
            options.save_decode,
            offered=bool(plan.states),
            drafter=drafter,
            chunk_ends=options.chunk_ends,
            barred=barred_boundaries(request, plan),
            state_tokens=plan.state_tokens,
        )
        if keep is not None:
            tokens, marks = request.num_prompt_tokens, None if unsaved else step_ends
            keep.begin(plan, options.keep_share, tokens, prefix is not None, marks)
            if keep.error:
                with self._ledger as counts:
                    counts.keeps["refused"] += 1
        return RequestTracker(
            request,
            prefix or Prefix(()),
            unsaved is None,
            step_ends,
            inner=inner,
            tags=None if prefix is None else prefix.tags,
            skip_save=unsaved == "skip_save",
            unstored=unsaved or ("short" if short else None),
            drop=drop,
            prefetch=prefetch,
            keep=keep,
        )

    def _steering_of(
        self, asked: RequestOptions, prefix: Prefix | None
    ) -> tuple[Drop | None, Prefetch | None, Keep | None]:
        """Return what a request asks of the store; None for nothing.

        Args:
            prefix: of its prompt; None if that is never cached.
        """
        why, drop, prefetch, keep = dict(asked.refusals), None, None, None
        if DROP in why:
            drop = Drop(answer={"error": why[DROP]})
            with self._ledger as counts:
                counts.drops["refused"] += 1
        elif asked.drop_from is not None:
            drop = Drop(asked.drop_from, prefix)
        if PREFETCH in why or asked.prefetch:
            prefetch = Prefetch(why.get(PREFETCH, ""))
        if KEEP in why or asked.keep is not None:
            keep = Keep(asked.keep or 0, asked.keep_to, why.get(KEEP, ""))
        return drop, prefetch, keep

    def answer(self, request: "Request", tracker: RequestTracker | None) -> dict[str, Any] | None:
        """Return what to tell the client of a request that has ended; None for nothing.

        Args:
            tracker: None where it was never tracked.
        """
        answer: dict[str, Any] = {}
        if tracker is not None:
            if tracker.drop is not None:
                answer[DROP] = tracker.drop.answer or {"error": UNFINISHED}
            if tracker.prefetch is not None:
                answer[PREFETCH] = tracker.prefetch.answer(failed=not tracker.may_load)
            if tracker.keep is not None:
                answer[KEEP] = tracker.keep.answer()
        else:
            asked = self._reader.read(request)
            closed = {DROP: asked.drop_from is not None, PREFETCH: asked.prefetch}
            closed |= {KEEP: asked.keep is not None}
            answer |= {name: {"error": CLOSED} for name, is_asked in closed.items() if is_asked}
            answer |= {name: {"error": why} for name, why in asked.refusals}
        return answer or None
