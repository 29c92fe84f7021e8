# SPDX-License-Identifier: Apache-2.0
"""Logs why a server takes no records, less and less often."""

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from vllm.logger import init_logger

from lmcache_hybrid.core.backoff import LessOften
from lmcache_hybrid.storage.key_names import printable

logger = init_logger("vllm.lmcache_hybrid.storage.remote.refusals")

# Seconds between two questions why a server cannot be used: each may keep a thread for seconds.
CAUSE_PAUSE_SECONDS = 60.0


class Refusals:
    """What was logged of one server. Thread-safe."""

    def __init__(self, shown: str, cause: Callable[[Exception], str]) -> None:
        """
        Args:
            shown: the server's URL, without a password.
            cause: see :meth:`.RecordConnector.cause`.
        """
        self._shown, self._cause = shown, cause
        self._lock = threading.Lock()
        self._kinds: defaultdict[str, LessOften] = defaultdict(LessOften)
        self._asks_at = -math.inf  # time.monotonic
        self._closed = False

    def say(self, error: Exception, cause: str) -> None:
        """Warn of each kind of refusal, see :class:`.LessOften`.

        A kind is its cause, else the class of the error and the server's first word.
        """
        words = printable(cause or str(error).lstrip("-"))
        kind = cause or type(error).__name__ + words.partition(" ")[0]
        with self._lock:
            if not self._kinds[kind].is_news():
                return
        logger.warning(
            "%s refuses records, which are not stored there while that lasts: %s",
            self._shown,
            words,
        )

    def explain(self, error: Exception, ask: Callable[[], Exception | None] | None = None) -> None:
        """Warn of a server that can never be used as configured. May ask it, once a minute.

        Args:
            ask: asks the server for what ``error`` may hide; it gives None for nothing.
        """
        with self._lock:
            now = time.monotonic()
            if self._closed or now < self._asks_at:
                return
            self._asks_at = now + CAUSE_PAUSE_SECONDS
        if ask is not None:
            error = ask() or error
        if cause := self._cause(error):
            self.say(error, cause)

    def explain_aside(self, error: Exception) -> None:
        """Do :meth:`explain` on a thread of its own; never blocks."""
        if time.monotonic() < self._asks_at:
            return
        asking = threading.Thread(
            target=self.explain, args=(error,), name="hybrid-why", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no more threads: the caller has its own error
            asking.start()

    def close(self) -> None:
        """Ask no server any more."""
        self._closed = True
