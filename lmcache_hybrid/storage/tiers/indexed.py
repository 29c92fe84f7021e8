# SPDX-License-Identifier: Apache-2.0
"""The common base of tiers whose index is in this process."""

from collections.abc import Sequence
from typing import Any

from lmcache.utils import CacheEngineKey
from vllm.logger import init_logger

from lmcache_hybrid.storage import eviction_order
from lmcache_hybrid.storage.tiers.base import Opening, StorageTier

logger = init_logger("vllm.lmcache_hybrid.storage.tiers.indexed")


class IndexedTier(StorageTier):
    """A tier that evicts by a policy of LMCache's interface.

    Pins belong to records, not to keys. After a removal and a new write a key names another
    record, and LMCache's ``unpin(key)`` would unpin that one. Its pin monitor removes all pins of
    a record after ``pin_timeout_sec``; a later ``unpin(key)`` could then release another request's
    pin.
    """

    indexed = True

    def __init__(self, name: str, backend: Any, opening: Opening) -> None:
        backend.cache_policy = eviction_order.policy_for(backend.cache_policy, opening.config)
        super().__init__(name, backend, opening)

    @property
    def _lock(self) -> Any:
        """LMCache's lock, which guards the index and the policy."""
        raise NotImplementedError

    @property
    def _index(self) -> Any:
        """Records by key, in the type that the policy needs."""
        raise NotImplementedError

    def held(self, keys: Sequence[CacheEngineKey], seconds: float) -> Sequence[bool]:
        with self._lock:
            index = self._index
            return [key in index for key in keys]

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        with self._lock:
            index = self._index
            for key in keys:
                if key in index:
                    try:
                        self.backend.cache_policy.update_on_hit(key, index)
                    except Exception as error:  # a wrong eviction order must not lose claims
                        logger.warning_once(
                            "LMCache's eviction policy failed (%r): records are evicted in "
                            "another order than by use. Loads and saves go on.",
                            error,
                        )
