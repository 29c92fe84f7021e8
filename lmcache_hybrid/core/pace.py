# SPDX-License-Identifier: Apache-2.0
"""Ends a load that has a deadline as soon as it is seen that it will miss it.

LMCache's backends stand between a load and the thread that receives its bytes, and pass nothing
on. So the read under way is a context variable, which goes along from thread to thread.
"""

import contextvars
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_hybrid.core.errors import SlowError

# The share of its time after which a load's rate says something.
FIRST_LOOK = 0.2
# A load counts as having got at least so much of its bytes.
LEAST = 1 / 64


class Pace:
    """The progress of one load. Thread-safe."""

    def __init__(self, deadline: float, size: int) -> None:
        """The load begins now.

        Args:
            deadline: ``time.monotonic`` at which it must have ended; ``inf`` for none.
            size: bytes to load.
        """
        self._began, self._deadline, self._size = time.monotonic(), deadline, size
        self._lock = threading.Lock()
        self._got = self._unreported = 0  # bytes; see Reading.report
        self._connecting = 0.0  # seconds of the read that took longest to connect
        # Once it is late: what SlowError says of it.
        self._estimate: float | None = None

    @property
    def seconds(self) -> float:
        """How many are left."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def late(self) -> bool:
        """Whether the rest, at the rate so far, comes too late. It stays so."""
        if self._deadline == math.inf:
            return False
        with self._lock:
            if self._estimate is None:
                whole, limit = self._whole(), self._deadline - self._began
                if limit <= 0:  # it waited for others, and nobody knows what it would take
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
            got: bytes that are here.
            unreported: bytes of reads that do not report what they got.
            connecting: seconds that a read took to connect.
        """
        with self._lock:
            self._got += got
            self._unreported += unreported
            self._connecting = max(self._connecting, connecting)

    def _whole(self) -> float | None:
        """Seconds for all of it at the rate so far; None where it is too early to say."""
        passed, limit = time.monotonic() - self._began, self._deadline - self._began
        # To connect takes as long for a small load as for a large one.
        read = passed - self._connecting
        if read < FIRST_LOOK * limit and passed <= limit:
            return None
        # Of reads that report nothing all may be here: several run side by side.
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
    """One read of a load, on whatever threads."""

    def __init__(self, pace: Pace, size: int) -> None:
        self.pace = pace
        self._left = self._unreported = size
        pace.count(0, size)

    def report(self, connecting: float = 0.0) -> None:
        """Report bytes as they come from now on, with :meth:`got`. Idempotent.

        Args:
            connecting: seconds that it took until the store could be asked.
        """
        if not self._unreported:
            return
        self.pace.count(0, -self._unreported, connecting)
        self._unreported = 0

    def got(self, size: int) -> None:
        """Count bytes as they come; raise SlowError where the load is late."""
        if self is _UNLIMITED:
            return
        size = min(size, self._left)  # a read that is tried again counts once
        self._left -= size
        self.pace.count(size)
        self.pace.check()

    def end(self) -> None:
        """Count what was not reported."""
        self.pace.count(self._left)


_UNLIMITED = Reading(Pace(math.inf, 1), 0)
_READING: contextvars.ContextVar[Reading] = contextvars.ContextVar("reading", default=_UNLIMITED)


def reading() -> Reading:
    """The read that the calling thread or task takes part in; without a deadline by default."""
    return _READING.get()
