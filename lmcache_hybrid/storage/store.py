# SPDX-License-Identifier: Apache-2.0
"""The interface between a rank and its store.

A write is ``reserve`` and ``put`` (or ``release``), a read ``claim``, ``fetch`` and ``release``.
The implementation is :mod:`lmcache_hybrid.storage.lmcache_store`.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.core.keys import RecordKey

if TYPE_CHECKING:
    from lmcache_hybrid.storage.keep_shares import KeptNames  # imports LMCache


class Buffer(Protocol):
    """Memory of one record. The caller of ``reserve`` or ``fetch`` must release it.

    ``put`` releases the buffers it is given.

    Attributes:
        digests: of the payload's chunks, see :mod:`lmcache_hybrid.storage.record_format`.
        digester: the store's, which computes and checks them.
    """

    digests: bytes
    digester: Digester

    @property
    def payload(self) -> torch.Tensor:
        """The record's pages: uint8 on the CPU, one dimension."""

    def release(self) -> None:
        """Release the memory. Call exactly once."""


class Claim(Protocol):
    """Records that are pinned in the store until ``release``, which the owner calls.

    The lookup owns a claim until a load takes it over.

    Attributes:
        keys: of the records.
        held: False once released.
    """

    keys: tuple[RecordKey, ...]
    held: bool

    def release(self) -> None:
        """Unpin. May be called more than once, from any thread."""


C = TypeVar("C", bound=Claim)
B = TypeVar("B", bound=Buffer)


class Store(Protocol[C, B]):
    """Records of one rank. Any thread may call it; ``locate`` only the lookup thread.

    A store accepts only claims and buffers of its own.

    Attributes:
        failed_writes: records that a backend accepted and could not write, by backend.
        rewritten_bytes: of records that were put although a backend held them, by backend.
        kept: records that are evicted last, by each backend that this package makes evict so.
    """

    failed_writes: Counter[str]
    rewritten_bytes: Counter[str]
    kept: "Mapping[str, KeptNames]"

    def engine_key(self, key: RecordKey) -> Hashable:
        """Name a record in its backends, until the next reset."""

    def readable(self) -> bool:
        """Whether lookups and loads are possible now."""

    def writable(self) -> bool:
        """Whether saves are wanted and possible now."""

    def locate(self, keys: Sequence[RecordKey], deadline: float = math.inf) -> dict[RecordKey, str]:
        """Name the backend of each record that exists, in the order of ``keys``.

        Asks each backend once, however many keys there are.

        Args:
            deadline: ``time.monotonic`` at which the caller stops waiting.
        """

    def claim(self, located: Mapping[RecordKey, str]) -> C | None:
        """Pin all keys where ``locate`` found them; None, without pins, if one is gone."""

    def fetch(self, claim: C, keys: Sequence[RecordKey]) -> list[B]:
        """Read records of a claim and check all but their payloads; all or nothing.

        The caller releases the buffers.

        Raises:
            LoadError: a record is gone, or there is no memory to read it into.
            DamagedError: stored bytes are not the record of their key; they were removed.
        """

    def keep(self, claim: C, records: Iterable[tuple[RecordKey, B]]) -> None:
        """Copy records that were read and checked to a nearer backend."""

    def discard(self, key: RecordKey, claim: C | None = None) -> None:
        """Remove a damaged record from the backend that it was read from; never raises.

        Args:
            claim: of the read; None removes it from every backend.
        """

    def in_use(self, hashes: Set[bytes], tags: tuple[tuple[str, str], ...]) -> bool:
        """Whether any record of these block hashes and tags is claimed."""

    def is_writing(self, keys: Sequence[RecordKey], seconds: float) -> bool:
        """Whether a backend still writes any of these records.

        Args:
            seconds: max time to find out.

        Raises:
            RemovalError: a backend does not say.
        """

    def remove(self, keys: Sequence[RecordKey], seconds: float) -> Mapping[str, int]:
        """Remove records from every backend, the farthest first; claimed ones, too.

        Returns:
            By backend, how many it held.

        Raises:
            RemovalError: a backend failed, or did not answer within ``seconds``. Nearer ones still
                hold what they had.
        """

    def reserve(self, payload: int) -> B | None:
        """Reserve memory for a record with ``payload`` bytes of pages; None when full."""

    def put(self, records: Iterable[tuple[RecordKey, B]]) -> None:
        """Seal and store records; releases their buffers even when it raises."""

    def refresh(self, keys: Sequence[RecordKey]) -> None:
        """Mark as recently used, first key most recent."""

    def arrange(
        self, keys: Sequence[RecordKey], passing: Sequence[RecordKey] = (), owner: str = ""
    ) -> None:
        """Set the eviction order of new records without counting an access.

        Args:
            keys: of a prompt as far as it is stored, the first to be evicted last.
            passing: states to evict before all else unless they are hit.
            owner: the request that stored them.
        """

    def clear(self, epoch: int) -> None:
        """Forget all records of this rank, in-flight saves included.

        Args:
            epoch: number of the reset, the same on all ranks.
        """

    def close(self) -> None:
        """End its threads. Its backends are LMCache's."""
