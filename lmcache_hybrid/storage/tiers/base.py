# SPDX-License-Identifier: Apache-2.0
"""The interface of a storage tier, which wraps one of LMCache's backends.

Each kind of backend is a subclass in a file of its own, and a line in ``KINDS`` of
:mod:`lmcache_hybrid.storage.tiers`.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from lmcache_hybrid.protocol.record_reports import Tier
from lmcache_hybrid.storage.folder.record_io import Fate
from lmcache_hybrid.storage.keep_shares import KeptNames
from lmcache_hybrid.storage.record_format import Header
from lmcache_hybrid.storage.record_names import RecordNames

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

# Releases pins. Call it exactly once, from any thread.
Unpin = Callable[[], None]


@dataclass(frozen=True)
class Opening:
    """The arguments for opening a rank's tiers.

    Attributes:
        config, metadata: LMCache's.
        model_name: readable part of the keys.
        names: of this rank's records.
        failed: called with a tier's name and the number of records that it accepted and could
            not write, by any thread.
        rewritten: called with a tier's name and the bytes of records that it wrote although it
            held them, by any thread; a tier with an index need not call it.
        written: called with a tier's name and the key of each record that it wrote, by any thread.
        restored: called for each record found from before the start.
        visit: whether they are only tried, by the doctor, and not used by an engine.
    """

    config: "LMCacheEngineConfig"
    metadata: "LMCacheMetadata"
    model_name: str
    names: RecordNames
    failed: Callable[[str, int], None]
    rewritten: Callable[[str, int], None]
    written: Callable[[str, CacheEngineKey], None]
    restored: Callable[[CacheEngineKey, Header], None]
    visit: bool = False


class Observer(Protocol):
    """Follows the records in a tier, see :class:`.residency.Residency`."""

    def follow(
        self,
        tier: Tier,
        index: MutableMapping[CacheEngineKey, Any],
        is_writing: Callable[[], bool] | None = None,
    ) -> MutableMapping[CacheEngineKey, Any]:
        """Note the keys that an index gains and loses from now on.

        Args:
            is_writing: whether writes are in flight that it will gain.

        Returns:
            The index to use instead.
        """

    def ask(self, tier: "StorageTier") -> None:
        """Note the records that a tier without an index is found to hold from now on."""


class StorageTier:
    """One of LMCache's storage backends. Any thread may call it.

    Attributes:
        name: LMCache's name of the backend.
        backend: as LMCache has opened it.
        indexed: whether its index is in this process. Then it answers at once, keeps pinned
            records, and notes the keys it gains and loses.
        in_place: whether records are used where they lie, and reads take no memory.
        shared: whether all ranks see its records.
        kept: records that it evicts last; None where it evicts by an order that is not ours.
    """

    indexed = False
    in_place = False
    shared = False
    kept: KeptNames | None = None

    def __init__(self, name: str, backend: Any, opening: Opening) -> None:
        """Wrap a backend that LMCache has started."""
        self.name, self.backend = name, backend

    def restore(self, opening: Opening) -> None:
        """Find records from before the start. Called once, before all other methods."""

    def observe(self, observer: Observer) -> None:
        """Notify the observer from now on."""

    # Reading

    def held(self, keys: Sequence[CacheEngineKey], seconds: float) -> Sequence[bool]:
        """Whether it holds each record, in as few round trips as possible.

        Raises:
            Exception: no answer within ``seconds``, or a failure.
        """
        raise NotImplementedError

    def pin(self, keys: Sequence[CacheEngineKey]) -> Unpin | None:
        """Protect records from eviction; None, without pins, if one of them is gone.

        A tier without an index has no pins and promises nothing.
        """
        return _nothing

    def read(self, keys: Sequence[CacheEngineKey], promised: float) -> list[MemoryObj | None]:
        """Read each record, which the caller owns, or None; may end after the first None.

        Args:
            promised: ``time.monotonic`` at which they were located here.

        Raises:
            LoadError: the load will end too late, or the tier has been silent since ``promised``.
            Exception: of the backend.
        """
        memories: list[MemoryObj | None] = self.backend.batched_get_blocking(keys)
        return memories

    def fate(self, key: CacheEngineKey, largest: int) -> Fate:
        """Find out why a promised record could not be read, see :meth:`.RecordConnector.fate`."""
        return "unreadable" if self.backend.contains(key) else "gone"

    # Eviction order

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        """Note hits, the most recent last. Does not wait, and never raises."""

    def arrange(
        self, keys: Sequence[CacheEngineKey], passing: Sequence[CacheEngineKey], owner: str
    ) -> None:
        """See :meth:`.Store.arrange`; but of ``keys`` the first are evicted first."""

    # Damaged records

    def remove(self, key: CacheEngineKey) -> None:
        """Remove a damaged record; a missing one is not an error.

        Raises:
            Exception: it is still there.
        """
        self.backend.remove(key)

    # Drops

    def is_writing(self, keys: Sequence[CacheEngineKey], seconds: float) -> bool:
        """See :meth:`.Store.is_writing`. Raises Exception if it does not say in time."""
        return False

    def remove_all(self, keys: Sequence[CacheEngineKey], seconds: float) -> int:
        """Remove records, pinned ones too, and return how many it held.

        Raises Exception if some may still be there.
        """
        held = self.held(keys, seconds)
        found = [key for key, is_held in zip(keys, held, strict=True) if is_held]
        for key in found:
            self.remove(key)
        return len(found)

    def close(self) -> None:
        """End the threads of this object, and of a backend of this package. Idempotent."""

    def check_integrity(self) -> None:
        """Assert what holds while no write is in flight. Walks the index: for tests."""


def _nothing() -> None:
    """Unpin nothing."""
