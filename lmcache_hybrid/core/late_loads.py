# SPDX-License-Identifier: Apache-2.0
"""Aborts a load early when its rate shows that it will miss its deadline.

LMCache's backends stand between a load and the thread that receives its bytes, and pass nothing
through, so the current read travels in a context variable.
"""

import contextvars
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_hybrid.core.errors import SlowError

# Share of the deadline to wait before judging a load by its rate.
FIRST_LOOK = 0.2
# Lower bound of the received share, so that the estimate stays finite.
LEAST = 1 / 64


class Pace:
    """The progress of one load. Thread-safe."""

    def __init__(self, deadline: float, size: int) -> None:
        """Start the clock of a load.

        Args:
            deadline: ``time.monotonic`` at which it must have ended; ``inf`` for none.
            size: bytes to load.
        """
        self._began, self._deadline, self._size = time.monotonic(), deadline, size
        self._lock = threading.Lock()
        self._got = self._unreported = 0  # bytes; see Reading.report
        self._connecting = 0.0  # seconds of the read that took longest to connect
        # Once it is late: SlowError.seconds.
        self._estimate: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def late(self) -> bool:
        """Whether the rest, at the rate so far, would come too late. Stays True once it is."""
        if self._deadline == math.inf:
            return False
        with self._lock:
            if self._estimate is None:
                whole, limit = self._whole(), self._deadline - self._began
                if limit <= 0:  # spent waiting for other loads: no estimate
                    self._estimate = 0.0
                elif whole is not None and whole > limit:
                    self._estimate = whole
            return self._estimate is not None

    def check(self) -> None:
        """Raise SlowError where it is late."""
        if self.late:
            raise SlowError(self._estimate or 0.0)

    def count(self, got: int, unreported: int = 0, connecting: float = 0.0) -> None:
        """Count progress.

        Args:
            got: bytes received.
            unreported: bytes of reads that do not report progress.
            connecting: seconds that a read took to connect.
        """
        with self._lock:
            self._got += got
            self._unreported += unreported
            self._connecting = max(self._connecting, connecting)

    def _whole(self) -> float | None:
        """Estimate the seconds of the whole load at the rate so far; None if too early."""
        passed, limit = time.monotonic() - self._began, self._deadline - self._began
        # The time to connect does not depend on the size.
        read = passed - self._connecting
        if read < FIRST_LOOK * limit and passed <= limit:
            return None
        # Reads without reports run side by side; all their bytes may have arrived.
        got = (self._got + self._unreported) / self._size
        return self._connecting + read / min(1.0, max(got, LEAST))

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """Read ``size`` bytes: backends may count them as they come, see :func:`reading`."""
        if self._deadline == math.inf:
            yield
            return
        read = Reading(self, size)
        token = _READING.set(read)
        try:
            yield
            read.end()
        finally:
            read.report()
            _READING.reset(token)


class Reading:
    """One read of a load, on any threads."""

    def __init__(self, pace: Pace, size: int) -> None:
        self.pace = pace
        self._left = self._unreported = size
        pace.count(0, size)

    def report(self, connecting: float = 0.0) -> None:
        """Announce that bytes will be reported with :meth:`got`. Idempotent.

        Args:
            connecting: seconds that it took to connect to the store.
        """
        if not self._unreported:
            return
        self.pace.count(0, -self._unreported, connecting)
        self._unreported = 0

    def got(self, size: int) -> None:
        """Count bytes as they come; raise SlowError where the load is late."""
        if self is _UNLIMITED:
            return
        size = min(size, self._left)  # a retried read counts once
        self._left -= size
        self.pace.count(size)
        self.pace.check()

    def end(self) -> None:
        """Count what was not reported."""
        self.pace.count(self._left)


_UNLIMITED = Reading(Pace(math.inf, 1), 0)
_READING: contextvars.ContextVar[Reading] = contextvars.ContextVar("reading", default=_UNLIMITED)


def reading() -> Reading:
    """Return the read of the calling thread or task; one without a deadline by default."""
    return _READING.get()
