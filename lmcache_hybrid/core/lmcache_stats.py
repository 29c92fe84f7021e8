# SPDX-License-Identifier: Apache-2.0
"""Feeds LMCache's own metrics (``lmcache:*``), which its engine counts on a path we bypass.

Their meaning stays: tokens looked up and found, tokens to retrieve and retrieved, and tokens
stored, each once per rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from vllm.logger import init_logger

if TYPE_CHECKING:
    from lmcache.observability import LMCStatsMonitor

logger = init_logger("vllm.lmcache_hybrid.core.lmcache_stats")


class Monitor(Protocol):
    """Counts finished lookups, loads and saves. Called from any thread; never raises.

    ``started`` is the ``time.perf_counter`` of the start, in seconds.
    """

    def looked_up(self, tokens: int, found: int, started: float) -> None:
        """Count a lookup of ``tokens``, of which the first ``found`` can be loaded."""

    def retrieved(self, tokens: int, loaded: int, started: float) -> None:
        """Count a load of ``tokens`` promised tokens, of which ``loaded`` arrived."""

    def stored(self, tokens: int, started: float) -> None:
        """Count a save of ``tokens``; 0 for a save of states only."""


class _NoMonitor:
    def looked_up(self, tokens: int, found: int, started: float) -> None:
        return

    def retrieved(self, tokens: int, loaded: int, started: float) -> None:
        return

    def stored(self, tokens: int, started: float) -> None:
        return


NO_MONITOR: Monitor = _NoMonitor()


@contextmanager
def only_logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning_once("LMCache's own metrics are not complete: %s", repr(error))


class LMCacheMonitor:
    """Reports to LMCache's monitor afterwards, so that only finished work is counted.

    That monitor takes the time at which it is told of a start, so the real start time is set
    before it is told of the end.
    """

    def __init__(self, monitor: "LMCStatsMonitor") -> None:
        self._monitor = monitor

    def looked_up(self, tokens: int, found: int, started: float) -> None:
        with only_logged():
            stats = self._monitor.on_lookup_request(tokens)
            stats.start_time = started
            self._monitor.on_lookup_finished(stats, found)

    def retrieved(self, tokens: int, loaded: int, started: float) -> None:
        with only_logged():
            stats = self._monitor.on_retrieve_request(tokens)
            stats.start_time = started
            self._monitor.on_retrieve_finished(stats, loaded)

    def stored(self, tokens: int, started: float) -> None:
        with only_logged():
            stats = self._monitor.on_store_request(tokens)
            stats.start_time = started
            self._monitor.on_store_finished(stats, tokens)
