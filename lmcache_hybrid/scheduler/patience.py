# SPDX-License-Identifier: Apache-2.0
"""How long one scheduling pass waits for lookups, all its requests together."""

import time

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

# Max seconds where no other request can run: spinning through empty steps would take the
# processor from the lookup.
IDLE_SECONDS = 0.005
# Max seconds beside requests that run, for lookups that were just sent. A store on this machine
# answers within it, and the request does not wait for the next pass, a whole step later.
BUSY_SECONDS = 0.001


class Patience:
    """What is left of a pass's time. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self.begin(idle=True)

    def begin(self, idle: bool) -> None:
        """A new pass begins.

        Args:
            idle: whether no other request can run.
        """
        self._idle, self._left = idle, IDLE_SECONDS if idle else BUSY_SECONDS

    def poll(self, lookup: PendingLookup, sent: bool) -> LookupResult | None:
        """Wait for a lookup, as long as this pass may.

        Args:
            sent: whether this pass sent it. One that was sent before belongs to a store that is
                slow, and each pass would wait for it anew.

        Returns:
            Its result, None for none yet.
        """
        began = time.monotonic()
        result = lookup.poll(max(0.0, self._left) if sent or self._idle else 0.0)
        self._left -= time.monotonic() - began
        return result
