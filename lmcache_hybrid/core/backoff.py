# SPDX-License-Identifier: Apache-2.0
"""Pauses after failures, and between lines of the log about them."""

import math
import time

# The shortest and the longest time between two lines of the log about what goes on.
FIRST_SAID_SECONDS, SAID_SECONDS = 60.0, 3600.0
# What has not failed for so long was well in between. Some causes are looked for once a minute.
HEALTHY_SECONDS = 600.0


class Backoff:
    """A pause after each failure, twice as long as the last one, until a success.

    Used by one thread at a time.

    Attributes:
        until: ``time.monotonic`` at which the last pause ends.
    """

    def __init__(self, first: float, longest: float) -> None:
        """
        Args:
            first, longest: pauses in seconds.
        """
        self._first, self._longest = first, longest
        self._next, self.until = first, -math.inf

    @property
    def lasts(self) -> bool:
        """Whether there is a pause now."""
        return time.monotonic() < self.until

    def fail(self) -> float:
        """Begin a pause; returns its seconds."""
        seconds = min(self._next, self._longest)
        self._next, self.until = 2 * seconds, time.monotonic() + seconds
        return seconds

    def succeed(self) -> None:
        """Make the next pause short again."""
        self._next = self._first


class LessOften:
    """When to log a failure that goes on: at once, then less and less often.

    After HEALTHY_SECONDS without one, the next is logged at once. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._pause = Backoff(FIRST_SAID_SECONDS, SAID_SECONDS)
        self._last = -math.inf  # time.monotonic of the last failure

    def is_news(self) -> bool:
        """Whether to log the failure that has just been seen."""
        now = time.monotonic()
        if now - self._last > HEALTHY_SECONDS:
            self._pause = Backoff(FIRST_SAID_SECONDS, SAID_SECONDS)
        self._last = now
        if self._pause.lasts:
            return False
        self._pause.fail()
        return True
