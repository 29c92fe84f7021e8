# SPDX-License-Identifier: Apache-2.0
"""How long one scheduling pass waits for lookups, all its requests together."""

import math
import time

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

# Max seconds where no other request can run: spinning through empty steps would take the
# processor from the lookup.
IDLE_SECONDS = 0.005
# Max share of a step beside requests that run, for lookups that were just sent, and its bounds
# in seconds. A store on this machine answers within it, and the request does not wait for the
# next pass, a whole step later.
BUSY_SHARE = 0.05
BUSY_SECONDS = 0.001, 0.01


class Patience:
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
