# SPDX-License-Identifier: Apache-2.0
"""Lets a request wait for a prefix that another one is computing.

Prompts with one long prefix that arrive together would each compute it. Instead, one of them (the
leader) ends a step at their last common boundary, and the other waits and starts from the state
there, in vLLM's own cache or in the store.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.scheduler.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig

# Max passes that a request waits while the leader does not move, and after it has reached the
# boundary: vLLM knows the state one step later, two with steps in flight.
STILL, LATE = 16, 4
# Max waiting requests: in each pass vLLM looks up each of them in its own cache.
WAITERS = 16
# Max waits of one request for leaders that end, or are preempted, before the boundary.
TRIES = 3


@dataclass
class Wait:
    """A request that waits for another one.

    Attributes:
        leader: computes the prefix.
        boundary: in tokens, where the request is to start.
        start: in tokens, where it would start without waiting.
        at: tokens that the leader had computed at the last look.
        still: passes since the leader moved.
        late: passes since it reached the boundary.
        reached: the request can start at the boundary.
        over: the leader has started over and ends no step there.
    """

    leader: RequestTracker
    boundary: int
    start: int
    at: int = 0
    still: int = 0
    late: int = 0
    reached: bool = False
    over: bool = False


class SharedPrefills:
    """Tracks running prefills and the requests that wait for them.

    Used by the scheduler's thread only. A step costs one look per running prefill, a pass one per
    waiting request.

    Attributes:
        step_tokens: max tokens of one request in a step; inf, the default, lets none wait.
    """

    def __init__(
        self,
        block_size: int,
        ledger: Ledger[SchedulerCounts],
        meet: Callable[[RequestTracker, int], None],
    ) -> None:
        """
        Args:
            block_size: N in tokens.
            meet: lets a request end a step at a boundary in tokens.
        """
        self.step_tokens = math.inf
        self._size, self._ledger, self._meet = block_size, ledger, meet
        # By hash of the first block, then by request.
        self._leaders: dict[bytes, dict[str, RequestTracker]] = {}
        self._waits: dict[str, Wait] = {}
        # By request: value of _begun at its last search for a leader, and its tries left.
        self._looked: dict[str, tuple[int, int]] = {}
        self._begun = 0

    def end_wait(self, tracker: RequestTracker) -> None:
        """End a request's wait: it has blocks."""
        wait = self._waits.get(tracker.request.request_id)
        if wait is not None and wait.reached:
            with self._ledger as counts:
                counts.shared_prefills += 1
                counts.shared_prefill_tokens += wait.boundary - wait.start
        self.forget(tracker.request.request_id)

    def begin(self, tracker: RequestTracker) -> None:
        """Add a request that starts to compute its prompt."""
        for wait in self._waits.values():
            if wait.leader is tracker:
                wait.over = True
        step_ends, hashes = tracker.step_ends, tracker.prefix.hashes
        drafter = step_ends.drafter
        # With such drafters vLLM's own hits end elsewhere than its steps.
        if not step_ends.offered or drafter.drops_block or drafter.computes_again:
            return
        if hashes and tracker.saving and self.step_tokens < step_ends.known:
            self._leaders.setdefault(hashes[0], {})[tracker.request.request_id] = tracker
            self._begun += 1

    def step(self) -> None:
        """Drop leaders that have computed their prompt or do not run."""
        for first, leaders in [*self._leaders.items()]:
            for request_id, leader in [*leaders.items()]:
                computed = leader.request.num_computed_tokens
                # Requests that wait for it keep their own reference.
                if computed >= leader.step_ends.known or not _runs(leader):
                    del leaders[request_id]
            if not leaders:
                del self._leaders[first]

    def forget(self, request_id: str) -> None:
        """Drop a request's wait."""
        self._waits.pop(request_id, None)
        self._looked.pop(request_id, None)

    def clear(self) -> None:
        """Drop all leaders and waits, after a reset."""
        self._leaders.clear()
        self._waits.clear()

    def wait(self, tracker: RequestTracker, start: int) -> bool | None:
        """Whether a request that could start at token ``start`` must wait for another one.

        Returns:
            None where it has waited in vain: look it up again, the store may have more by now.
        """
        request_id = tracker.request.request_id
        wait = self._waits.get(request_id)
        if wait is None:
            return self._find(tracker, start)
        leader, computed = wait.leader, wait.leader.request.num_computed_tokens
        wait.reached = start >= wait.boundary
        if wait.reached:
            stores = leader.saving and leader.background is None
            if stores and leader.prefix.tags == tracker.prefix.tags:
                blocks = wait.boundary // self._size
                tracker.stored.attention = max(tracker.stored.attention, blocks)
            return False
        wait.still = 0 if computed > wait.at else wait.still + 1
        wait.late += computed >= wait.boundary
        wait.at = computed
        if wait.over:
            del self._waits[request_id]
            return self._find(tracker, start)
        gone = computed < wait.boundary and not _runs(leader)
        if gone or wait.still > STILL or wait.late > LATE:
            del self._waits[request_id]
            return None
        return True

    def _find(self, tracker: RequestTracker, start: int) -> bool:
        """Choose a leader to wait for; False for none."""
        request_id, hashes = tracker.request.request_id, tracker.prefix.hashes
        leaders = self._leaders.get(hashes[0]) if hashes else None
        if not leaders or len(self._waits) >= WAITERS:
            return False
        begun, tries = self._looked.get(request_id, (0, TRIES))
        if begun == self._begun or not tries:
            return False
        best: Wait | None = None
        for leader in leaders.values():
            boundary, computed = self._meeting(leader, tracker), leader.request.num_computed_tokens
            # Computing less than half a step is faster than waiting for one more step.
            if boundary - start <= self.step_tokens / 2 or not start <= computed < boundary:
                continue
            if not (_runs(leader) and leader.saving):
                continue
            # The end of the leader's next step may already be fixed.
            if boundary - computed <= self.step_tokens and not leader.step_ends.ends_at(boundary):
                continue
            if best is None or boundary > best.boundary:
                best = Wait(leader, boundary, start, computed)
        self._looked[request_id] = self._begun, tries - (best is not None)
        if best is None:
            return False
        self._meet(best.leader, best.boundary)
        self._waits[request_id] = best
        return True

    def _meeting(self, leader: RequestTracker, follower: RequestTracker) -> int:
        """Return the deepest common boundary, in tokens, from which both may start."""
        one, other = leader.prefix.hashes, follower.prefix.hashes
        last = min(leader.step_ends.last, follower.step_ends.last) // self._size
        low, high = 0, min(len(one), len(other), last)
        while low < high:  # hashes are chained: all before an equal one are equal
            middle = (low + high + 1) // 2
            if one[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        boundary = low * self._size
        barred = leader.step_ends.barred | follower.step_ends.barred
        while boundary and boundary in barred:
            boundary -= self._size
        # Reuse a meeting nearby: each further one may cost the leader a step.
        near = [m for m in leader.step_ends.meetings if 0 <= boundary - m <= self.step_tokens / 2]
        return max(set(near) - follower.step_ends.barred, default=boundary)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of vLLM."""
        for request_id, wait in self._waits.items():
            assert wait.leader.request.request_id != request_id
            assert 0 <= wait.start < wait.boundary


def _runs(leader: RequestTracker) -> bool:
    return leader.request.status == RequestStatus.RUNNING


def step_tokens_of(config: "SchedulerConfig") -> float:
    """Return the max tokens of one request in one step."""
    most = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    # An adaptive threshold can rise up to ``most``.
    fixed = not config.long_prefill_token_threshold_adaptive and config.long_prefill_token_threshold
    return min(most, fixed or math.inf)
