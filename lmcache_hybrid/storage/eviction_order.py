# SPDX-License-Identifier: Apache-2.0
"""Evicts records that were never hit before those that were. Kept ones: :mod:`.keep_shares`."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.cache_policy.lfu import LFUCachePolicy
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy
from lmcache.v1.storage_backend.cache_policy.mru import MRUCachePolicy

from lmcache_hybrid.core.lmcache_stats import only_logged

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

# If this share of a prompt was known before, all of it counts as used.
KNOWN = 0.5
# Max chunk hashes whose first use is noted for LMCache's metric of reuse. LMCache would note 12.5
# million, in 2 GB of memory, and forgets none when it evicts.
NOTED = 1 << 16
# Owner of records that were stored before the start.
BEFORE = "before"


class ARC(LRUCachePolicy):
    """ARC (Megiddo and Modha, FAST 2003) in place of LMCache's LRU.

    Two queues, each evicted by last use. Records of a new prompt join the first once all of it is
    stored. When they are hit, or another request computes the same prefix, they move to the
    second. The first is evicted while it holds more than a share that adapts: records stored again
    after eviction from the first raise it, from the second lower it. So prompts that never come
    back evict each other and not used records.

    Unlike in ARC a prompt comes and goes as a whole. If half of it was known before, as in a
    growing conversation, all of it counts as used. The newest prompt and records stored since are
    evicted last, the end of a prompt before its beginning. States that only a branch could use go
    first.

    Call with the backend's lock held, as LMCache's policies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.max_num_chunk_hash = NOTED
        # First queue: the request that stored each record; the next to be evicted comes first.
        self._once: OrderedDict[CacheEngineKey, str] = OrderedDict()
        # Second queue: whether each record was used; else its prompt is still being stored.
        self._main: OrderedDict[CacheEngineKey, bool] = OrderedDict()
        # Keys evicted from either queue.
        self._once_lost: OrderedDict[CacheEngineKey, None] = OrderedDict()
        self._main_lost: OrderedDict[CacheEngineKey, None] = OrderedDict()
        # Records that the first queue may hold.
        self._share = 0.0
        # Records of the newest prompt that is stored, and those of prompts being computed since.
        self._newest: set[CacheEngineKey] = set()

    def update_on_put(self, key: CacheEngineKey) -> None:
        super().update_on_put(key)
        self._once.pop(key, None)
        once, main = len(self._once_lost), len(self._main_lost)
        again = key in self._once_lost or key in self._main_lost
        if key in self._once_lost:
            self._share += max(1.0, main / once)
            del self._once_lost[key]
        elif key in self._main_lost:
            self._share -= max(1.0, once / main)
            del self._main_lost[key]
        self._share = min(max(0.0, self._share), len(self._once) + len(self._main))
        self._main[key] = again
        self._main.move_to_end(key)
        self._newest.add(key)

    def found_again(self, key: CacheEngineKey) -> None:
        """Add a record from before the start to the first queue."""
        self._once[key] = BEFORE

    def update_on_hit(self, key: CacheEngineKey, cache_dict: Any) -> None:
        if key in cache_dict:
            self._promote(key)
            with only_logged():  # a read that raised here would keep its memory
                self.update_chunk_hash_dict(key)

    def update_on_force_evict(self, key: CacheEngineKey) -> None:
        self._once.pop(key, None)
        self._main.pop(key, None)
        self._newest.discard(key)

    def _promote(self, key: CacheEngineKey) -> None:
        self._once.pop(key, None)
        self._main[key] = True
        self._main.move_to_end(key)

    def postpone(self, keys: Iterable[CacheEngineKey]) -> None:
        """Count records as used, the last most recently."""
        for key in keys:
            if key in self._main or key in self._once:
                self._promote(key)

    def arrange(
        self, keys: Sequence[CacheEngineKey], passing: Iterable[CacheEngineKey], owner: str
    ) -> None:
        """Set the eviction order of a prompt's records.

        Args:
            keys: of the prompt as far as it is stored, the first to be evicted first.
            passing: states that are evicted before all others unless they are hit.
            owner: the request that stored them.
        """
        known = [key for key in keys if self._main.get(key) or self._once.get(key, owner) != owner]
        for key in keys if len(known) >= KNOWN * len(keys) else known:
            if key in self._main or key in self._once:
                self._promote(key)
        for key in keys:
            if self._main.get(key) is False:
                del self._main[key]
                self._once[key] = owner
            if key in self._once:
                self._once.move_to_end(key)
        if keys:
            self._newest = set(keys)
        for key in passing:
            if self._main.get(key) is False:
                del self._main[key]
                self._once[key] = ""
                self._once.move_to_end(key, last=False)
            self._newest.discard(key)

    def get_evict_candidates(
        self, cache_dict: Any, num_candidates: int = 1
    ) -> list[CacheEngineKey]:
        over = max(0, len(self._once) - int(self._share))
        older = chain(islice(self._once, over), self._main)
        newest_last = (key for key in older if key not in self._newest)
        # Records that it was not told of may also be evicted.
        order = chain(newest_last, self._once, self._main, cache_dict)
        candidates: dict[CacheEngineKey, None] = {}
        for key in order:
            # Records in flight are not indexed yet.
            if key in cache_dict and cache_dict[key].can_evict:
                candidates[key] = None
            if len(candidates) == num_candidates:
                break
        for key in candidates:
            self._newest.discard(key)
            if self._once.pop(key, ""):
                self._once_lost[key] = None
            elif self._main.pop(key, False):
                self._main_lost[key] = None
        held = len(self._once) + len(self._main)
        while len(self._once) + len(self._once_lost) > held and self._once_lost:
            self._once_lost.popitem(last=False)
        while len(self._once_lost) + len(self._main_lost) > held and self._main_lost:
            self._main_lost.popitem(last=False)
        return list(candidates)


def arrange(
    policy: Any,
    index: Any,
    keys: Sequence[CacheEngineKey],
    passing: Iterable[CacheEngineKey],
    owner: str,
) -> None:
    """Set the eviction order of a prompt's records in a backend; call with its lock held.

    LMCache's own LRU keeps the order in ``index``; its other policies are left alone. For the rest
    see :meth:`ARC.arrange`.
    """
    if isinstance(policy, ARC):
        policy.arrange(keys, passing, owner)
    elif isinstance(policy, LRUCachePolicy):
        for key in keys:
            if key in index:
                index.move_to_end(key)


def postpone(policy: Any, index: Any, keys: Iterable[CacheEngineKey]) -> None:
    """Move records to where they are evicted last; call with the backend's lock held.

    ARC, LRU and LFU count them as used once more, the last most recently. FIFO keeps its order.
    """
    if isinstance(policy, ARC):
        policy.postpone(keys)
        return
    for key in keys:
        if isinstance(policy, LFUCachePolicy):
            policy.update_on_hit(key, index)
        elif isinstance(policy, LRUCachePolicy | MRUCachePolicy):  # MRU evicts from the end
            index.move_to_end(key, last=isinstance(policy, LRUCachePolicy))


def policy_for(policy: Any, config: "LMCacheEngineConfig") -> Any:
    """Return :class:`ARC` in place of an empty backend's LRU, unless the user chose a policy."""
    chosen = "cache_policy" in getattr(config, "_user_set_keys", ())
    return ARC() if type(policy) is LRUCachePolicy and not chosen else policy
