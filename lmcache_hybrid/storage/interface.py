# SPDX-License-Identifier: Apache-2.0
"""What a rank needs of a store, and a naive one in memory for tests and for reading.

Verb pairs: ``reserve`` / ``put`` (or ``release``) for writing, ``claim`` /
``fetch`` / ``release`` for reading. The real one is in
:mod:`lmcache_hybrid.storage.lmcache_store`.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from lmcache_hybrid.core.counts import ByLabel
from lmcache_hybrid.core.digests import PLAIN, Digester
from lmcache_hybrid.core.errors import DamagedError, LoadError, RecordError
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage.record import (
    HEADER_BYTES,
    open_record,
    payload_bytes,
    record_bytes,
    seal,
)


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

    failed_writes: ByLabel

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


class _NaiveBuffer:
    def __init__(self, store: "NaiveStore", record: bytearray, digests: bytes = b"") -> None:
        self._store, self.record, self.digests = store, record, digests
        self.digester: Digester = PLAIN
        store.count_buffers(1)

    @property
    def payload(self) -> torch.Tensor:
        end = HEADER_BYTES + payload_bytes(len(self.record))
        return torch.frombuffer(self.record, dtype=torch.uint8)[HEADER_BYTES:end]

    def release(self) -> None:
        self._store.count_buffers(-1)


class _NaiveClaim:
    def __init__(self, store: "NaiveStore", keys: tuple[RecordKey, ...]) -> None:
        self._store, self.keys, self._held = store, keys, True
        store.pins.update(keys)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._store.pins.subtract(self.keys)
            self._store.pins += Counter()  # drops zeros


class NaiveStore:
    """A dict of records. Only reading is thread-safe; nothing is ever evicted.

    Attributes:
        records: sealed records by key, the least recently used first; tests reach in to
            lose or damage them.
        pins: how often each key is claimed.
        live_buffers: buffers not yet released.
    """

    def __init__(self, fingerprint: bytes = bytes(16)) -> None:
        self._fingerprint = fingerprint
        self.records: dict[RecordKey, bytearray] = {}
        self.pins: Counter[RecordKey] = Counter()
        self.live_buffers = 0
        self.failed_writes = ByLabel()
        self._lock = threading.Lock()

    def count_buffers(self, change: int) -> None:
        with self._lock:
            self.live_buffers += change

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def locate(self, keys: Sequence[RecordKey], deadline: float = math.inf) -> dict[RecordKey, str]:
        return dict.fromkeys(filter(self.records.__contains__, keys), "naive")

    def claim(self, located: Mapping[RecordKey, str]) -> Claim | None:
        if any(key not in self.records for key in located):
            return None
        return _NaiveClaim(self, tuple(located))

    def fetch(self, claim: Claim, keys: Sequence[RecordKey]) -> list[Buffer]:
        for key in keys:
            if key not in self.records:
                raise LoadError(f"record {key.label} at {key.boundary} is gone", "gone", key)
        # A copy, so that nobody damages what is stored.
        found = [bytearray(self.records[key]) for key in keys]
        digests = []
        for key, record in zip(keys, found, strict=True):
            try:
                digests.append(open_record(memoryview(record), key, self._fingerprint))
            except RecordError as error:
                self.discard(key)
                raise DamagedError(key, error) from error
        return [_NaiveBuffer(self, *each) for each in zip(found, digests, strict=True)]

    def keep(self, claim: Claim, records: Iterable[tuple[RecordKey, Buffer]]) -> None:
        return

    def discard(self, key: RecordKey) -> None:
        self.records.pop(key, None)

    def reserve(self, payload: int) -> Buffer | None:
        return _NaiveBuffer(self, bytearray(record_bytes(payload)))

    def put(self, records: Iterable[tuple[RecordKey, Buffer]]) -> None:
        for key, buffer in records:
            assert isinstance(buffer, _NaiveBuffer)
            seal(memoryview(buffer.record), key, self._fingerprint, buffer.digests)
            self.records[key] = buffer.record
            buffer.release()

    def refresh(self, keys: Sequence[RecordKey]) -> None:
        for key in reversed(keys):
            if key in self.records:
                self.records[key] = self.records.pop(key)

    arrange = refresh

    def clear(self) -> None:
        self.records.clear()
