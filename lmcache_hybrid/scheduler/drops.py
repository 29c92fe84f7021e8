# SPDX-License-Identifier: Apache-2.0
"""Removes the records of prompts whose requests ask for it, before these requests are admitted."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.prompt import inner_hashes

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Max seconds from when a drop is first asked for until it is answered: records may be in flight to
# a slow store, and other drops come first.
DROP_SECONDS = 30.0
# Pause before ranks that wait for writes are asked again.
PAUSE_SECONDS = 0.005

UNCACHEABLE = (
    "this prompt is never cached: it has prompt embeddings, media that are not cached, or a tag "
    "that LMCache does not take."
)
NEVER_WAITS = (
    "vLLM lets no request wait that must not read its cache (prompt_logprobs, some pooling). "
    "Nothing was removed."
)
UNKNOWN_ADAPTER = "a rank does not know the content of the LoRA adapter. Nothing was removed."
UNANSWERED = "a rank did not answer in time. Some records may be gone: repeat it."
UNEXPECTED = "an unexpected error, see the engine's log. Some records may be gone: repeat it."
STOPPED = (
    "a rank's store was frozen, switched off or in use meanwhile. Some records may be gone: "
    "repeat it."
)
LATE = (
    f"the engine was busy for {DROP_SECONDS:.0f} s, or still wrote records. Others may be gone: "
    "repeat it."
)
BEHIND_OTHERS = (
    f"other drops took {DROP_SECONDS:.0f} s. Nothing was removed: repeat it, or send fewer at once."
)
UNFINISHED = "the request has ended before all records were removed: repeat it."


@dataclass
class Drop:
    """What a request asks to be removed, and what came of it. Used by the scheduler's thread only.

    Attributes:
        start: in tokens; records that end past it are removed.
        prefix: of the prompt; None if it is never cached.
        answer: for the client; None until it is known.
        pending: the drop under way.
        ends: ``time.monotonic`` by which it is answered; 0 before it is first asked for.
    """

    start: int = 0
    prefix: Prefix | None = None
    answer: dict[str, Any] | None = None
    pending: "PendingDrop | None" = None
    ends: float = 0.0


class PendingDrop:
    """Calls the ranks until all have removed what they hold.

    The queue's thread uses it during a call, and the scheduler's thread between calls.

    Attributes:
        removed: records by backend, summed over ranks.
        refusal: why nothing may be removed; "" if it may.
        failure: why not all was removed; "" if it was.
        late: whether its time was over first. A call under way may still change all others.
    """

    def __init__(
        self,
        queue: LookupQueue,
        request: DropRequest,
        first: int,
        inner: Callable[[], dict[int, bytes]],
        ends: float,
    ) -> None:
        """Make the first call. Never blocks.

        Args:
            first: block that ``request`` begins with.
            inner: lists its boundaries inside a block, on the queue's thread: there may be many.
            ends: ``time.monotonic`` by which it is over.
        """
        self._queue, self._request, self._first, self._ends = queue, request, first, ends
        self._next = 0.0  # time.monotonic of the next call
        # Whether a rank may have removed any, all have removed all, and there is nothing to do.
        self._begun = self._done = self._over = False
        self.removed: Counter[str] = Counter()
        self.refusal = self.failure = ""
        self.late = False
        self._job = queue.call(partial(self._begin, inner))

    def poll(self, seconds: float, ledger: Ledger[SchedulerCounts]) -> bool:
        """Whether it has ended; makes the next call if it has not.

        Args:
            seconds: max time to wait.
            ledger: counts errors of a call.
        """
        if self._over:
            return True
        error, called = None, seconds > 0 or self._job.done()  # raising takes longer than asking
        if called:
            try:
                error = self._job.exception(seconds)
            except TimeoutError:
                called = False
        if isinstance(error, Exception):
            caught("drop_records", error, "a request's records may stay", ledger)
            self.failure = self.failure or UNEXPECTED
        if called and (self._done or self.refusal or self.failure):
            self._over = True
        elif time.monotonic() > self._ends:  # a call under way is still finished
            self.late = self._over = True
        if self._over or not called:
            return self._over
        left = self._next - time.monotonic()
        if left > 0 and seconds > 0:  # empty steps would take the CPU from the writers
            time.sleep(min(left, seconds))
        if left <= seconds:
            self._job = self._queue.call(self._go_on)
        return False

    def _begin(self, inner: Callable[[], dict[int, bytes]]) -> None:
        """Make the first call. Runs on the queue's thread."""
        prefix = self._request.prefix.with_inner(inner())
        self._request = msgspec.structs.replace(self._request, prefix=prefix)
        self._go_on()

    def _go_on(self) -> None:
        """Make one call. Runs on the queue's thread."""
        if self._over:
            return
        if self._request.block is None:
            prefix = self._queue.identified(self._request.prefix)
            if prefix is None:
                self._refuse(UNKNOWN_ADAPTER)
                return
            self._request = msgspec.structs.replace(self._request, prefix=prefix)
            # No lookup comes between this and the removal, so nothing is claimed meanwhile.
            if self._ask(self._request) is None:
                return
        block = self._first if self._request.block is None else self._request.block
        reached = self._ask(msgspec.structs.replace(self._request, block=block))
        if reached is not None and reached > self._first:
            self._request = msgspec.structs.replace(self._request, block=reached)
            self._done = reached >= self._request.end

    def _ask(self, request: DropRequest) -> int | None:
        """Call all ranks; return the block that all have reached, or None to end this call."""
        self._queue.num_drops += request.block is not None
        results: list[DropResult] = self._queue.drop(request)
        if not results:
            self.failure = UNANSWERED
            return None
        for result in results:
            self.removed = self.removed + Counter(result.removed)  # anew: it may be read meanwhile
        if request.block is not None:
            self._begun |= not all(each.waits or each.refusal for each in results)
        self.failure = next((each.failure for each in results if each.failure), "")
        self._refuse(next((each.refusal for each in results if each.refusal), ""))
        if any(result.waits for result in results):
            self._next = time.monotonic() + PAUSE_SECONDS
            if request.block is None:
                return None
        return None if self.refusal or self.failure else min(each.block for each in results)

    def _refuse(self, why: str) -> None:
        """Note why nothing may be removed; "" if it may. Once removing has begun, that is late."""
        if why and self._begun:
            self.failure = self.failure or STOPPED
        else:
            self.refusal = why


class Drops:
    """The drops of all requests, one after the other: lookups wait for the same thread.

    Used by the scheduler's thread only.
    """

    def __init__(
        self, plan: GroupPlan, queue: LookupQueue, ledger: Ledger[SchedulerCounts]
    ) -> None:
        self._plan, self._queue, self._ledger = plan, queue, ledger
        # Steps begun, and the last one that a drop waits for.
        self._step = self._awaited = 0
        self._turn: PendingDrop | None = None

    def begin(self) -> int:
        """Begin a step.

        Returns:
            Its number if a drop waits for the ranks to begin it or the next one, else 0.
        """
        self._step += 1
        return self._step if self._step <= self._awaited else 0

    def waits(
        self, request: "Request", drop: Drop, wait: Callable[[Callable[[float], bool]], bool]
    ) -> bool:
        """Whether a request waits for its drop, which begins with the first call.

        Args:
            wait: calls a function with the seconds that this pass may still wait.
        """
        if drop.answer is not None:
            return False
        if request.skip_reading_prefix_cache:
            self._refuse(drop, NEVER_WAITS)
            return False
        drop.ends = drop.ends or time.monotonic() + DROP_SECONDS
        if drop.pending is None:
            # Its own request may have ended, and asks no more.
            if self._turn is not None and not self._turn.poll(0.0, self._ledger):
                if time.monotonic() <= drop.ends:
                    return True
                drop.answer = {"removed": {}, "error": BEHIND_OTHERS}
                self._count("failed")
                return False
            self._begin(request, drop)
            self._turn = drop.pending
        pending = drop.pending
        if pending is None:
            return False
        if not wait(lambda seconds: pending.poll(seconds, self._ledger)):
            return True
        if self._turn is pending:
            self._turn = None  # its prompt need not be held until the next drop
        refusal = "" if pending.late else pending.refusal
        error = LATE if pending.late else refusal or pending.failure
        drop.answer = {"removed": dict(+pending.removed)}
        if error:
            drop.answer["error"] = error
        self._count("refused" if refusal else "failed" if error else "done")
        return False

    def _begin(self, request: "Request", drop: Drop) -> None:
        """Begin a drop, or answer it."""
        prefix, plan = drop.prefix, self._plan
        tokens, unit, size = request.num_prompt_tokens, plan.unit, plan.block_size
        if prefix is None:
            self._refuse(drop, UNCACHEABLE)
            return
        if drop.start >= tokens:
            self._refuse(
                drop, f"lmcache.drop_from={drop.start} lies past the prompt of {tokens} tokens."
            )
            return
        end, past = len(prefix.hashes), range(0)
        if unit:
            # Beside a drafter the last boundary may have no hash, see prompt.extended.
            last = min(tokens, len(request.block_hashes) * unit)
            past = range((drop.start // unit + 1) * unit, last + 1, unit)
            end = max([end, *(-(-boundary // size) for boundary in past[-1:])])
        first = drop.start // size
        if end <= first:
            drop.answer = {"removed": {}}
            self._count("done")
            return
        # Two steps on: this pass may schedule saves, and the next step begins when they have ended.
        self._awaited = self._step + 2
        wanted = DropRequest(prefix, drop.start, end, self._awaited)
        inner = partial(inner_hashes, request, past, plan)
        drop.pending = PendingDrop(self._queue, wanted, first, inner, drop.ends)

    def _refuse(self, drop: Drop, why: str) -> None:
        drop.answer = {"error": why}
        self._count("refused")

    def _count(self, outcome: str) -> None:
        with self._ledger as counts:
            counts.drops[outcome] += 1
