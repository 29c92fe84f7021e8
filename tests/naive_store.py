# SPDX-License-Identifier: Apache-2.0
"""A store in memory, for unit tests, the simulation and benchmarks."""

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from lmcache_hybrid.core.digests import PLAIN, Digester
from lmcache_hybrid.core.errors import DamagedError, LoadError, RecordError
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage.keep_shares import KeptNames
from lmcache_hybrid.storage.record_format import (
    HEADER_BYTES,
    open_record,
    payload_bytes,
    record_bytes,
    seal,
)
from lmcache_hybrid.storage.store import Buffer, Claim


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
        self._store, self.keys, self.held = store, keys, True
        store.pins.update(keys)

    def release(self) -> None:
        if self.held:
            self.held = False
            self._store.pins.subtract(self.keys)
            self._store.pins += Counter()  # drops zeros


class NaiveStore:
    """A dict of records. Only reading is thread-safe; nothing is ever evicted.

    Attributes:
        records: sealed records by key, the least recently used first; tests reach in to
            lose or damage them.
        pins: how often each key is claimed.
        name: of the backend in which records are found.
        live_buffers: buffers not yet released.
    """

    def __init__(self, fingerprint: bytes = bytes(16)) -> None:
        self._fingerprint = fingerprint
        self.records: dict[RecordKey, bytearray] = {}
        self.pins: Counter[RecordKey] = Counter()
        self.live_buffers = 0
        self.name = "naive"
        self.failed_writes: Counter[str] = Counter()
        self.rewritten_bytes: Counter[str] = Counter()
        self.kept = {self.name: KeptNames(1 << 40)}
        self._lock = threading.Lock()

    def count_buffers(self, change: int) -> None:
        with self._lock:
            self.live_buffers += change

    def engine_key(self, key: RecordKey) -> RecordKey:
        return key

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def locate(self, keys: Sequence[RecordKey], deadline: float = math.inf) -> dict[RecordKey, str]:
        return dict.fromkeys(filter(self.records.__contains__, keys), self.name)

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
                self.discard(key, claim)
                raise DamagedError(key, error) from error
        return [_NaiveBuffer(self, *each) for each in zip(found, digests, strict=True)]

    def keep(self, claim: Claim, records: Iterable[tuple[RecordKey, Buffer]]) -> None:
        return

    def discard(self, key: RecordKey, claim: Claim | None = None) -> None:
        self.records.pop(key, None)

    def in_use(self, hashes: Set[bytes], tags: tuple[tuple[str, str], ...]) -> bool:
        return any(key.block_hash in hashes and key.tags == tags for key in self.pins)

    def is_writing(self, keys: Sequence[RecordKey], seconds: float) -> bool:
        return False

    def remove(self, keys: Sequence[RecordKey], seconds: float) -> dict[str, int]:
        return {self.name: sum(self.records.pop(key, None) is not None for key in keys)}

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

    def arrange(
        self, keys: Sequence[RecordKey], passing: Sequence[RecordKey] = (), owner: str = ""
    ) -> None:
        self.refresh(keys)

    def clear(self, epoch: int) -> None:
        self.records.clear()

    def close(self) -> None:
        pass
