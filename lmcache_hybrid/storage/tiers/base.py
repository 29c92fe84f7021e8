# SPDX-License-Identifier: Apache-2.0
"""What this package does with a storage backend of LMCache's, whichever it is.

A kind of backend is a subclass in a file of its own, and a line in ``KINDS`` of
:mod:`lmcache_hybrid.storage.tiers`.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from lmcache_hybrid.protocol.changes import Tier
from lmcache_hybrid.storage.folder.record_io import Fate
from lmcache_hybrid.storage.record import Header
from lmcache_hybrid.storage.record_names import RecordNames

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

# Gives pins back. Call it exactly once, from any thread.
Unpin = Callable[[], None]


@dataclass(frozen=True)
class Opening:
    """What a rank opens its tiers with.

    Attributes:
        config, metadata: LMCache's.
        model_name: readable part of the keys.
        names: of this rank's records.
        failed: called with a tier's name and the number of records that it accepted and could
            not write, by any thread.
        written: called with a tier's name and the key of each record that it wrote, by any thread.
        restored: called for each record that was there before the start.
    """

    config: "LMCacheEngineConfig"
    metadata: "LMCacheMetadata"
    model_name: str
    names: RecordNames
    failed: Callable[[str, int], None]
    written: Callable[[str, CacheEngineKey], None]
    restored: Callable[[CacheEngineKey, Header], None]


class Observer(Protocol):
    """Is told what comes and goes in a tier, see :class:`.residency.Residency`."""

    def follow(
        self,
        tier: Tier,
        index: MutableMapping[CacheEngineKey, Any],
        is_writing: Callable[[], bool] | None = None,
    ) -> MutableMapping[CacheEngineKey, Any]:
        """Note what an index gains and loses from now on.

        Args:
            is_writing: whether writes are under way that it will gain.

        Returns:
            What must take the index's place.
        """

    def ask(self, tier: "StorageTier") -> None:
        """Note what a tier without an index here is found to hold from now on."""


class StorageTier:
    """One of LMCache's storage backends. Any thread may call it.

    Attributes:
        name: LMCache's, of the backend.
        backend: LMCache's, or what took its place.
        indexed: whether its index is in this process. Then it answers at once, keeps what is
            pinned, and tells by itself what it gains and loses.
        in_place: whether records are used where they lie, and reads take no memory.
        shared: whether all ranks see what is in it.
    """

    indexed = False
    in_place = False
    shared = False

    def __init__(self, name: str, backend: Any, opening: Opening) -> None:
        """Wrap a backend that LMCache has started."""
        self.name, self.backend = name, backend

    def restore(self, opening: Opening) -> None:
        """Find the records that are there from before the start. Once, before all others."""

    def observe(self, observer: Observer) -> None:
        """Tell of what comes and goes from now on."""

    # Reading

    def held(self, keys: Sequence[CacheEngineKey], seconds: float) -> Sequence[bool]:
        """Whether it holds each record, asked in as few questions as it takes.

        Raises:
            Exception: no answer within ``seconds``, or a failure.
        """
        raise NotImplementedError

    def pin(self, keys: Sequence[CacheEngineKey]) -> Unpin | None:
        """Keep records from being evicted; None, and no pin, where one of them is gone.

        A tier without an index here has no pins and promises nothing.
        """
        return _nothing

    def read(self, keys: Sequence[CacheEngineKey], promised: float) -> list[MemoryObj | None]:
        """Each record, which the caller owns, or None; may end after the first None.

        Args:
            promised: ``time.monotonic`` at which they were located here.

        Raises:
            LoadError: the load will end too late, or the tier has been silent since ``promised``.
            Exception: whatever the backend raises.
        """
        memories: list[MemoryObj | None] = self.backend.batched_get_blocking(keys)
        return memories

    def fate(self, key: CacheEngineKey, largest: int) -> Fate:
        """Find out why a record that was promised could not be read.

        Args:
            largest: bytes of the largest record.

        Raises:
            Exception: no answer in time, or a failure.
        """
        return "unreadable" if self.backend.contains(key) else "gone"

    # Order of eviction

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        """Note hits, the most recent last. Does not wait, and never raises."""

    def arrange(
        self, keys: Sequence[CacheEngineKey], passing: Sequence[CacheEngineKey], owner: str
    ) -> None:
        """Set the eviction order of new records without counting an access.

        Args:
            keys: of a prompt, the most worth keeping last.
            passing: states that are worth less than all else unless they are hit.
            owner: the request that stored them.
        """

    # Damaged records

    def remove(self, key: CacheEngineKey) -> None:
        """Remove a damaged record; one that is gone is no error.

        Raises:
            Exception: it is still there.
        """
        self.backend.remove(key)

    def close(self) -> None:
        """End the threads of this object. The backend is LMCache's. Idempotent."""

    def check_integrity(self) -> None:
        """Assert what holds while no write is in flight. Walks the index: for tests."""


def _nothing() -> None:
    """Nothing was pinned."""
