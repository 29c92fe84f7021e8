# SPDX-License-Identifier: Apache-2.0
"""Pauses after failures."""

import math
import time


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
