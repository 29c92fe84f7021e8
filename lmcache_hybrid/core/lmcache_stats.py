# SPDX-License-Identifier: Apache-2.0
"""LMCache's own metrics (``lmcache:*``), which its engine counts and we pass by.

They mean what they mean there: tokens that were looked up and found, that were to be
retrieved and were, and that were stored, once per rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from vllm.logger import init_logger

if TYPE_CHECKING:
    from lmcache.observability import LMCStatsMonitor

logger = init_logger("vllm.lmcache_hybrid.core.lmcache_stats")


class Monitor(Protocol):
    """Told of what ended; ``started`` is ``time.perf_counter``. Called from any thread.

    Never raises: a load whose end could not be counted has ended all the same.
    """

    def looked_up(self, tokens: int, found: int, started: float) -> None:
        """Of ``tokens`` in whole blocks the first ``found`` can be loaded."""

    def retrieved(self, tokens: int, loaded: int, started: float) -> None:
        """``tokens`` were promised and ``loaded`` came."""

    def stored(self, tokens: int, started: float) -> None:
        """``tokens`` were stored, 0 where it was a state only."""


class _NoMonitor:
    def looked_up(self, tokens: int, found: int, started: float) -> None:
        return

    def retrieved(self, tokens: int, loaded: int, started: float) -> None:
        return

    def stored(self, tokens: int, started: float) -> None:
        return


NO_MONITOR: Monitor = _NoMonitor()


@contextmanager
def _only_logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning_once("LMCache's own metrics are not complete: %s", repr(error))


class LMCacheMonitor:
    """Tells LMCache's monitor afterwards, so that only what happened is counted.

    It expects to be called before and after, and takes the time itself; so the time of
    the start is put in between.
    """

    def __init__(self, monitor: "LMCStatsMonitor") -> None:
        self._monitor = monitor

    def looked_up(self, tokens: int, found: int, started: float) -> None:
        with _only_logged():
            stats = self._monitor.on_lookup_request(tokens)
            stats.start_time = started
            self._monitor.on_lookup_finished(stats, found)

    def retrieved(self, tokens: int, loaded: int, started: float) -> None:
        with _only_logged():
            stats = self._monitor.on_retrieve_request(tokens)
            stats.start_time = started
            self._monitor.on_retrieve_finished(stats, loaded)

    def stored(self, tokens: int, started: float) -> None:
        with _only_logged():
            stats = self._monitor.on_store_request(tokens)
            stats.start_time = started
            self._monitor.on_store_finished(stats, tokens)
