# SPDX-License-Identifier: Apache-2.0
"""What a rank needs of a store.

Verb pairs: ``reserve`` / ``put`` (or ``release``) for writing, ``claim`` /
``fetch`` / ``release`` for reading. The real one is in
:mod:`lmcache_hybrid.storage.lmcache_store`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.core.keys import RecordKey


class Buffer(Protocol):
    """Memory of one record, owned by whoever holds it until ``release``.

    Attributes:
        digests: of the payload's chunks, see :mod:`lmcache_hybrid.storage.record`.
        digester: the store's, which computes and checks them.
    """

    digests: bytes
    digester: Digester

    @property
    def payload(self) -> torch.Tensor:
        """uint8, CPU, the record's pages."""

    def release(self) -> None:
        """Give the memory back. Call exactly once."""


class Claim(Protocol):
    """Records that are pinned in the store until ``release``."""

    keys: tuple[RecordKey, ...]

    def release(self) -> None:
        """Unpin. May be called more than once."""


C = TypeVar("C", bound=Claim)
B = TypeVar("B", bound=Buffer)


class Store(Protocol[C, B]):
    """Records of one rank. Every method may be called from any thread.

    Claims and buffers are of the store's own kinds.

    Attributes:
        failed_writes: records that a backend took and could not write, by backend.
    """

    failed_writes: Counter[str]

    def readable(self) -> bool:
        """Whether lookups and loads make sense now."""

    def writable(self) -> bool:
        """Whether saves are wanted and possible now."""

    def locate(self, keys: Sequence[RecordKey], deadline: float = math.inf) -> dict[RecordKey, str]:
        """Name the backend of each record that is there, in the order of ``keys``.

        One question to each backend, however many keys there are.

        Args:
            deadline: ``time.monotonic`` after which nobody waits for the answer.
        """

    def claim(self, located: Mapping[RecordKey, str]) -> C | None:
        """Pin all keys where ``locate`` found them, or none and return None."""

    def fetch(self, claim: C, keys: Sequence[RecordKey]) -> list[B]:
        """Read records of a claim and check all but their payloads; all or nothing.

        Raises:
            LoadError: a record is gone or there is no memory to read it into.
            DamagedError: it is not the record asked for; it was removed.
        """

    def keep(self, claim: C, records: Iterable[tuple[RecordKey, B]]) -> None:
        """These were read and found good: a nearer backend may keep them."""

    def discard(self, key: RecordKey) -> None:
        """Remove a damaged record; never raises."""

    def reserve(self, payload: int) -> B | None:
        """Memory for a record of ``payload`` bytes of pages, None when the store is full."""

    def put(self, records: Iterable[tuple[RecordKey, B]]) -> None:
        """Seal and store the records, and release their buffers."""

    def refresh(self, keys: Sequence[RecordKey]) -> None:
        """These are in use: the first of them shall be the last to be evicted."""

    def arrange(self, keys: Sequence[RecordKey]) -> None:
        """The same of records just written, which is no use of them."""

    def clear(self) -> None:
        """Forget all records of this rank."""
