# SPDX-License-Identifier: Apache-2.0
"""Lets a request wait for a prefix that another one is computing.

Prompts with one long prefix that arrive together would each compute it. Where one of them is still
far from the last boundary that both have, it ends a step there, and the other one starts from the
state that this leaves, in vLLM's own cache or in the store.
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

# Passes for which a request waits at most while the other one does not move, and once it has
# reached the boundary: vLLM knows the state there a step later, with steps in flight two.
STILL, LATE = 16, 4
# Requests that wait at most: in each pass vLLM looks for each of them in its own cache.
WAITERS = 16
# How often one request waits at most for another that ends, or is preempted, before the boundary.
TRIES = 3


@dataclass
class Wait:
    """A request waits for another one.

    Attributes:
        leader: computes the prefix.
        boundary: in tokens, where the request is to start.
        start: from where it would start now.
        at: tokens that the leader had computed when it was last looked at.
        still: passes since it moved.
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
    """Prompts that are being computed, and who waits for them.

    Used by the scheduler's thread only. A step looks at all that compute a prompt, a pass at each
    request that waits.

    Attributes:
        step_tokens: of one request in one step at most; inf, as at first, lets none wait.
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
        # By the hash of their first block, then by request.
        self._leaders: dict[bytes, dict[str, RequestTracker]] = {}
        self._waits: dict[str, Wait] = {}
        # By request: how many leaders had begun when it last looked for one, and its tries left.
        self._looked: dict[str, tuple[int, int]] = {}
        self._begun = 0

    def end_wait(self, tracker: RequestTracker) -> None:
        """A request has blocks: it waits no longer."""
        wait = self._waits.get(tracker.request.request_id)
        if wait is not None and wait.reached:
            with self._ledger as counts:
                counts.shared_prefills += 1
                counts.shared_prefill_tokens += wait.boundary - wait.start
        self.forget(tracker.request.request_id)

    def begin(self, tracker: RequestTracker) -> None:
        """A request computes its prompt from here on."""
        for wait in self._waits.values():
            if wait.leader is tracker:
                wait.over = True
        checkpoints, hashes = tracker.checkpoints, tracker.prefix.hashes
        drafter = checkpoints.drafter
        # Beside such drafters vLLM's own hits end elsewhere than steps.
        if not checkpoints.offered or drafter.drops_block or drafter.runway:
            return
        if hashes and tracker.saving and self.step_tokens < checkpoints.known:
            self._leaders.setdefault(hashes[0], {})[tracker.request.request_id] = tracker
            self._begun += 1

    def step(self) -> None:
        """Forget those that have computed their prompt or do not run."""
        for first, leaders in [*self._leaders.items()]:
            for request_id, leader in [*leaders.items()]:
                computed = leader.request.num_computed_tokens
                # Waits that end there still look at it.
                if computed >= leader.checkpoints.known or not _runs(leader):
                    del leaders[request_id]
            if not leaders:
                del self._leaders[first]

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._waits.pop(request_id, None)
        self._looked.pop(request_id, None)

    def clear(self) -> None:
        """What is computed now is nobody's to start from."""
        self._leaders.clear()
        self._waits.clear()

    def wait(self, tracker: RequestTracker, start: int) -> bool | None:
        """Whether a request that could start at token ``start`` now waits for another one.

        Returns:
            None where it has waited in vain: the store may have more of it by now.
        """
        request_id = tracker.request.request_id
        wait = self._waits.get(request_id)
        if wait is None:
            return self._find(tracker, start)
        leader, computed = wait.leader, wait.leader.request.num_computed_tokens
        wait.reached = start >= wait.boundary
        if wait.reached:
            if leader.saving and leader.prefix.tags == tracker.prefix.tags:  # it has stored it
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
        """Choose whom to wait for, if anybody."""
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
            # Computing less than half a step is quicker than a step more.
            if boundary - start <= self.step_tokens / 2 or not start <= computed < boundary:
                continue
            if not (_runs(leader) and leader.saving):
                continue
            # Where the leader's next step ends may be settled already.
            if boundary - computed <= self.step_tokens and not leader.checkpoints.ends_at(boundary):
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
        """The deepest boundary, in tokens, that both have and from which both may start."""
        one, other = leader.prefix.hashes, follower.prefix.hashes
        last = min(leader.checkpoints.last, follower.checkpoints.last) // self._size
        low, high = 0, min(len(one), len(other), last)
        while low < high:  # hashes are chained: all before an equal one are equal
            middle = (low + high + 1) // 2
            if one[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        boundary = low * self._size
        while boundary and any(each.checkpoints.is_barred(boundary) for each in (leader, follower)):
            boundary -= self._size
        # Each further one may cost the leader a step.
        near = [m for m in leader.checkpoints.meetings if 0 <= boundary - m <= self.step_tokens / 2]
        near = [meeting for meeting in near if not follower.checkpoints.is_barred(meeting)]
        return max(near, default=boundary)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of vLLM."""
        for request_id, wait in self._waits.items():
            assert wait.leader.request.request_id != request_id
            assert 0 <= wait.start < wait.boundary


def _runs(leader: RequestTracker) -> bool:
    return leader.request.status == RequestStatus.RUNNING


def step_tokens_of(config: "SchedulerConfig") -> float:
    """Tokens of one request in one step at most."""
    most = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    # An adaptive threshold rises up to that.
    fixed = not config.long_prefill_token_threshold_adaptive and config.long_prefill_token_threshold
    return min(most, fixed or math.inf)
