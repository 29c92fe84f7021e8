# SPDX-License-Identifier: Apache-2.0
"""Removes damaged records, and hides unreadable ones from lookups."""

import threading
import time
from collections.abc import Container, Iterable, Mapping
from typing import Any

from lmcache.utils import CacheEngineKey
from vllm.logger import init_logger

from lmcache_hybrid.storage.residency import Residency
from lmcache_hybrid.storage.tiers.base import StorageTier

logger = init_logger("vllm.lmcache_hybrid.storage.hidden_records")

# Max hidden records of one backend; the one hidden first comes back first.
MAX_HIDDEN = 4096
# Seconds after which they are looked up again.
HIDDEN_SECONDS = 600.0


class HiddenRecords:
    """Records of one backend that are hidden for a while, or until the engine writes them.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # ``time.monotonic`` at which each is looked up again.
        self._until: dict[CacheEngineKey, float] = {}
        # Until then another rank's write of it does not show it again.
        self._doubted: dict[CacheEngineKey, float] = {}

    def __contains__(self, key: Any) -> bool:
        until = self._until.get(key) if self._until else None
        return until is not None and time.monotonic() < until

    def hide(self, key: CacheEngineKey) -> None:
        with self._lock:
            _remember(self._until, key)

    def show(self, key: CacheEngineKey) -> None:
        with self._lock:
            self._until.pop(key, None)

    def show_once(self, key: CacheEngineKey) -> None:
        """Show a record that another rank should write; that write may fail.

        Only once in HIDDEN_SECONDS: else every second request of its prefix could fail.
        """
        if key not in self._until:
            return
        with self._lock:
            if time.monotonic() >= self._doubted.get(key, 0.0):
                self._until.pop(key, None)
                _remember(self._doubted, key)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()
            self._doubted.clear()


def _remember(times: dict[CacheEngineKey, float], key: CacheEngineKey) -> None:
    """Note a key for HIDDEN_SECONDS; the oldest of MAX_HIDDEN is dropped."""
    times.pop(key, None)
    if len(times) >= MAX_HIDDEN:
        del times[next(iter(times))]
    times[key] = time.monotonic() + HIDDEN_SECONDS


class DamagedRecords:
    """Removes damaged records from one rank's tiers. Any thread may call it.

    RAM and disk lose a record with its index entry; any other tier may fail to delete it. An
    unreadable record may be whole, so it is not deleted. Both would be promised to every later
    request and fail, so they are hidden from lookups.
    """

    def __init__(
        self, names: Iterable[str], tiers: Mapping[str, StorageTier], residency: Residency | None
    ) -> None:
        """
        Args:
            names: of all tiers, which need not be open yet.
        """
        self._tiers, self._residency = tiers, residency
        self._hidden = {name: HiddenRecords() for name in names}

    def hidden(self, backend: str) -> Container[CacheEngineKey]:
        """Return the keys not to look up in a backend."""
        return self._hidden.get(backend, ())

    def written(self, backend: str, key: CacheEngineKey) -> None:
        """Show a record that was written to a backend."""
        self._hidden[backend].show(key)

    def written_elsewhere(self, backend: str, key: CacheEngineKey) -> None:
        """Show a record that another rank writes to a backend; once in HIDDEN_SECONDS."""
        self._hidden[backend].show_once(key)

    def clear(self) -> None:
        """Show all records, after a reset has renamed them."""
        for hidden in self._hidden.values():
            hidden.clear()

    def unreadable(self, key: CacheEngineKey, location: str) -> None:
        """Hide a record that a backend holds and could not read."""
        self._hide(location, key)

    def remove(self, key: CacheEngineKey, location: str | None) -> None:
        """Remove a damaged record; never raises.

        Args:
            location: backend that it was read from; None for all. Copies in others stay: each is
                checked when it is read.
        """
        for name, tier in self._tiers.items():
            if location not in (None, name):
                continue
            try:
                tier.remove(key)
                if not tier.indexed:
                    self._discarded(key)
            except Exception as error:
                logger.debug("%s could not remove %s: %r", name, key, error)
                self._hide(name, key)

    def _hide(self, name: str, key: CacheEngineKey) -> None:
        self._hidden[name].hide(key)
        self._discarded(key)

    def _discarded(self, key: CacheEngineKey) -> None:
        if self._residency is not None:
            self._residency.discarded(key)
