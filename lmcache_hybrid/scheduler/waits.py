# SPDX-License-Identifier: Apache-2.0
"""How long one scheduling pass waits for lookups, all its requests together; when a step waits."""

import math
import time
from typing import TYPE_CHECKING

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

# Max seconds where no other request can run: spinning through empty steps would take the
# processor from the lookup.
IDLE_SECONDS = 0.005
# Max share of a step beside requests that run, for lookups that were just sent, and its bounds
# in seconds. A store on this machine answers within it, and the request does not wait for the
# next pass, a whole step later.
BUSY_SHARE = 0.05
BUSY_SECONDS = 0.001, 0.01


class LookupWait:
    """What is left of a pass's time. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._began = -math.inf
        self.begin(idle=True)

    def begin(self, idle: bool) -> None:
        """A new pass begins.

        Args:
            idle: whether no other request can run.
        """
        now = time.monotonic()
        least, most = BUSY_SECONDS
        busy = min(most, max(least, (now - self._began) * BUSY_SHARE))
        self._idle, self._left, self._began = idle, IDLE_SECONDS if idle else busy, now

    def poll(self, lookup: PendingLookup) -> LookupResult | None:
        """Wait for a lookup, as long as this pass may.

        Returns:
            Its result, None for none yet.
        """
        began = time.monotonic()
        # One of an earlier pass belongs to a store that is slow, and each pass would wait anew.
        waits = self._idle or lookup.sent >= self._began
        result = lookup.poll(max(0.0, self._left) if waits else 0.0)
        self._left -= time.monotonic() - began
        return result


class IdleSteps:
    """Tells when nothing is computed anywhere, so that a step may wait for loads.

    Used by the scheduler's thread only.

    Attributes:
        waits: whether the last step may wait. One of those in flight does, so that a request
            which comes meanwhile is held up once.
    """

    def __init__(self, batches: float = 1) -> None:
        """
        Args:
            batches: steps in flight at most; inf where other engines compute in step with this
                one, whose step must not be held up.
        """
        self._batches, self._count, self.waits = batches, 0, False

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "IdleSteps":
        """Those of an engine."""
        if parallel.data_parallel_size > 1:
            return cls(math.inf)
        # The ranks of one stage take one step after the other. With asynchronous scheduling a
        # pipeline has one step more in flight than stages.
        stages = parallel.pipeline_parallel_size
        return cls(stages + 1 if stages > 1 else 1)

    @property
    def alone(self) -> bool:
        """Whether no other engine computes in step with this one."""
        return self._batches < math.inf

    def add(self, empty: bool) -> bool:
        """Count a step that was scheduled.

        Args:
            empty: whether it computes nothing.

        Returns:
            Whether all steps in flight compute nothing.
        """
        self._count = self._count + 1 if empty else 0
        idle = self._count >= self._batches
        self.waits = idle and self._count % self._batches == 0
        return idle
