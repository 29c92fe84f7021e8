# SPDX-License-Identifier: Apache-2.0
"""Claims on records in the tiers of a rank."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from lmcache.utils import CacheEngineKey

from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage.tiers.base import StorageTier, Unpin


class LMCacheClaim:
    """Records that no indexed tier evicts until :meth:`release`, which the owner calls.

    Attributes:
        keys: of the records.
        located: name of each record's tier.
        made: ``time.monotonic`` of the claim; a remote store that was silent since is not asked.
        held: False once released.
    """

    def __init__(self, located: Mapping[RecordKey, str]) -> None:
        self.keys = tuple(located)
        self.located = dict(located)
        self.made = time.monotonic()
        self.held = True
        self._lock = threading.Lock()
        self._pinned: list[Unpin] = []

    def pin(
        self,
        tiers: Mapping[str, StorageTier],
        engine_key: Callable[[RecordKey], CacheEngineKey],
    ) -> bool:
        """Pin every key where it was located. False if one is gone: then release the claim."""
        for name in dict.fromkeys(self.located.values()):
            keys = [engine_key(key) for key, where in self.located.items() if where == name]
            unpin = tiers[name].pin(keys)
            if unpin is None:
                return False
            self._pinned.append(unpin)
        return True

    def release(self) -> None:
        """Unpin. May be called more than once, from any thread."""
        with self._lock:
            self.held = False
            pinned, self._pinned = self._pinned, []
        with ExitStack() as each:  # if one raises, the others are still unpinned
            for unpin in pinned:
                each.callback(unpin)
