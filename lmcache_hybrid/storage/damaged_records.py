# SPDX-License-Identifier: Apache-2.0
"""Removes records that were found damaged, and hides those that cannot be read."""

import threading
import time
from collections.abc import Container, Iterable, Mapping
from typing import Any

from lmcache.utils import CacheEngineKey
from vllm.logger import init_logger

from lmcache_hybrid.storage.residency import Residency
from lmcache_hybrid.storage.tiers.base import StorageTier

logger = init_logger("vllm.lmcache_hybrid.storage.damaged_records")

# Records of one backend to hide at most; those that were hidden first come back first.
MAX_HIDDEN = 4096
# They are looked up again after so long.
HIDDEN_SECONDS = 600.0


class HiddenRecords:
    """Records of one backend that are not looked up for a while, or until the engine writes them.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # ``time.monotonic`` at which each is looked up again.
        self._until: dict[CacheEngineKey, float] = {}
        # And until which nobody's word is taken for it that another rank has written it.
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
        """Look a record up again that another rank is to write, which may fail there.

        Once in HIDDEN_SECONDS: else it would fail every second request of its prefix.
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
    """Set the end of HIDDEN_SECONDS for a key, the last of MAX_HIDDEN."""
    times.pop(key, None)
    if len(times) >= MAX_HIDDEN:
        del times[next(iter(times))]
    times[key] = time.monotonic() + HIDDEN_SECONDS


class DamagedRecords:
    """Removes damaged records from one rank's tiers. Any thread may call it.

    RAM and disk lose a record with its entry in their index. Any other tier may fail to delete
    it. What could not be read may be whole, so nobody deletes it. Both would be promised and fail
    for every later request, so they are hidden from lookups.
    """

    def __init__(
        self, names: Iterable[str], tiers: Mapping[str, StorageTier], residency: Residency | None
    ) -> None:
        """Hide nothing.

        Args:
            names: of all tiers, which need not be open yet.
        """
        self._tiers, self._residency = tiers, residency
        self._hidden = {name: HiddenRecords() for name in names}

    def hidden(self, backend: str) -> Container[CacheEngineKey]:
        """Keys that are not to be looked up in a backend."""
        return self._hidden.get(backend, ())

    def written(self, backend: str, key: CacheEngineKey) -> None:
        """Look a record up again, which has been written to a backend."""
        self._hidden[backend].show(key)

    def written_elsewhere(self, backend: str, key: CacheEngineKey) -> None:
        """Look a record up again, which another rank writes to a backend; once in a while."""
        self._hidden[backend].show_once(key)

    def clear(self) -> None:
        """Hide nothing: all records have new names."""
        for hidden in self._hidden.values():
            hidden.clear()

    def unreadable(self, key: CacheEngineKey, location: str) -> None:
        """Leave a record alone that a backend holds and could not read."""
        self._hide(location, key)

    def remove(self, key: CacheEngineKey, location: str | None) -> None:
        """Remove a damaged record; never raises.

        Args:
            location: backend that it was read from. Copies in others stay: nobody has seen them,
                and one that is damaged, too, goes when it is read. None for all backends.
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
