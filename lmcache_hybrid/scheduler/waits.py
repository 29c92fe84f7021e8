# SPDX-License-Identifier: Apache-2.0
"""Bounds how long a scheduling pass waits for lookups, and tells when a step may wait for loads."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

# Max seconds where no other request can run: empty steps would take the CPU from the lookup.
IDLE_SECONDS = 0.005
# And for a lookup that can be waited for in this pass only.
LAST_CHANCE_SECONDS = 0.05
# Max share of a step to wait for lookups just sent while others run, and its bounds in seconds.
# A store on this machine answers within it, which saves the request one whole step.
BUSY_SHARE = 0.05
BUSY_SECONDS = 0.001, 0.01


class LookupWait:
    """The time that a pass may still wait. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._began = -math.inf
        self.begin(idle=True)

    def begin(self, idle: bool) -> None:
        """Begin a scheduling pass.

        Args:
            idle: whether no other request can run.
        """
        now = time.monotonic()
        least, most = BUSY_SECONDS
        busy = min(most, max(least, (now - self._began) * BUSY_SHARE))
        self._idle, self._left, self._began = idle, IDLE_SECONDS if idle else busy, now
        self._last_chance = LAST_CHANCE_SECONDS if idle else busy

    def poll(self, lookup: PendingLookup, last_chance: bool = False) -> LookupResult | None:
        """Wait for a lookup, as long as this pass may.

        Args:
            last_chance: its request runs with this pass, whether there is a result or not.

        Returns:
            Its result; None while pending.
        """
        # A lookup from an earlier pass shows a slow store; each pass would wait again.
        waits = self._idle or lookup.sent >= self._began
        began, left = time.monotonic(), self._last_chance if last_chance else self._left
        result = lookup.poll(max(0.0, left) if waits else 0.0)
        self._left -= time.monotonic() - began
        self._last_chance -= time.monotonic() - began
        return result

    def idle(self, wait: Callable[[float], bool]) -> bool:
        """Call ``wait`` with the seconds that this pass may wait; 0 if other requests can run."""
        began = time.monotonic()
        result = wait(max(0.0, self._left) if self._idle else 0.0)
        self._left -= time.monotonic() - began
        return result


class IdleSteps:
    """Tells when nothing is computed, so that a step may wait for loads.

    Used by the scheduler's thread only.

    Attributes:
        waits: whether the last step may wait. Only one of those in flight may, so that a new
            request is delayed once.
    """

    def __init__(self, batches: float = 1) -> None:
        """
        Args:
            batches: max steps in flight; inf where other engines run in lockstep with this one
                and must not be delayed.
        """
        self._batches, self._count, self.waits = batches, 0, False

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "IdleSteps":
        """Make those of an engine."""
        if parallel.data_parallel_size > 1:
            return cls(math.inf)
        # The ranks of one stage take one step after the other. With asynchronous scheduling a
        # pipeline has one step more in flight than stages.
        stages = parallel.pipeline_parallel_size
        return cls(stages + 1 if stages > 1 else 1)

    @property
    def alone(self) -> bool:
        """Whether no other engine runs in lockstep with this one."""
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
