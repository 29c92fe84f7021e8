# SPDX-License-Identifier: Apache-2.0
"""Tracks which records of one rank come and go, for KV cache events.

The indexes of RAM and disk note each key that they gain or lose. Extra notes are harmless: the
report reads the current state. A remote store has no index here: it is asked for written records
until they are found, and lookups show which are gone.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from lmcache.utils import CacheEngineKey

from lmcache_hybrid.core.keys import RecordKey, tags_digest, wide_hash
from lmcache_hybrid.core.threads import started
from lmcache_hybrid.protocol.record_reports import REMOTE, RankReport, RecordName, Tier
from lmcache_hybrid.storage.record_format import Header
from lmcache_hybrid.storage.tiers.base import Observer, StorageTier

# Max records of a remote store to remember, and max expected records.
KEPT_REMOTE = 1 << 17
KEPT_EXPECTED = 1 << 15
# A record that a remote store does not hold this long after it was sent was not written.
CONFIRM_SECONDS = 10.0
# Between two lookups of written records in a remote store; doubled while none is found.
PAUSE_SECONDS, LONGEST_PAUSE = 0.05, 1.0
ANSWER_SECONDS = 2.0


def watched(
    index: MutableMapping[CacheEngineKey, Any], touched: deque[CacheEngineKey]
) -> MutableMapping[CacheEngineKey, Any]:
    """Copy a backend's index into one of the same type that notes each key it gains or loses.

    Args:
        touched: takes the keys, from the thread that changes the index.
    """
    kind: Any = type(index)

    class Watched(kind):  # LMCache's policies make a dict or an OrderedDict
        def __setitem__(self, key: CacheEngineKey, value: Any) -> None:
            super().__setitem__(key, value)
            touched.append(key)

        def __delitem__(self, key: CacheEngineKey) -> None:
            super().__delitem__(key)
            touched.append(key)

        def pop(self, key: CacheEngineKey, *default: Any) -> Any:
            value = super().pop(key, *default)
            touched.append(key)
            return value

        def popitem(self, *args: Any, **kwargs: Any) -> Any:
            item = super().popitem(*args, **kwargs)
            touched.append(item[0])
            return item

        def clear(self) -> None:
            touched.extend(self)
            super().clear()

    return Watched(index)


class Residency(Observer):
    """Tracks a rank's records, and those that the scheduler was told of.

    Any thread may call it. The thread that runs the model calls :meth:`report` in every step; it
    takes a lock only if something changed. :meth:`close` ends the thread that asks remote stores.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._epoch = rank, 0
        self._touched: deque[CacheEngineKey] = deque()
        self._indexes: list[tuple[Tier, Mapping[CacheEngineKey, Any]]] = []
        self._writing: list[Callable[[], bool]] = []
        self._remotes: dict[str, StorageTier] = {}
        self._lock = threading.Lock()  # guards all below
        # Names and tiers of reported records, and names of expected ones.
        self._names: dict[CacheEngineKey, RecordName] = {}
        self._said: dict[CacheEngineKey, Tier] = {}
        self._expected: OrderedDict[CacheEngineKey, RecordName] = OrderedDict()
        self._in_remote: OrderedDict[CacheEngineKey, None] = OrderedDict()
        # Records sent to remote stores, and ``time.monotonic`` until which these are asked.
        self._unconfirmed: dict[CacheEngineKey, float] = {}
        self._confirming = False
        # Serving and writing, as reported last; None so that there is a first report.
        self._state: tuple[bool, bool] | None = None
        self._stop = threading.Event()
        self._thread = started(1, "hybrid-events")

    # From the store

    def follow(
        self,
        tier: Tier,
        index: MutableMapping[CacheEngineKey, Any],
        is_writing: Callable[[], bool] | None = None,
    ) -> MutableMapping[CacheEngineKey, Any]:
        """See :meth:`.Observer.follow`."""
        index = watched(index, self._touched)
        self._indexes.append((tier, index))
        if is_writing is not None:
            self._writing.append(is_writing)
        return index

    def ask(self, tier: StorageTier) -> None:
        """See :meth:`.Observer.ask`."""
        self._remotes[tier.name] = tier

    def restored(self, key: CacheEngineKey, header: Header) -> None:
        """Note a record found on disk at the start."""
        with self._lock:  # not limited by KEPT_EXPECTED: all of them exist
            self._expected[key] = RecordName(header.group, header.block_hash, header.tags)
        self._touched.append(key)

    def expect(self, records: Iterable[tuple[CacheEngineKey, RecordKey]]) -> None:
        """Expect records that are about to be written."""
        with self._lock:
            for key, record in records:
                self._expect(key, _name(record))

    def written(self, keys: Sequence[CacheEngineKey], location: str | None) -> None:
        """Note records that were handed to the backend ``location``, or to all."""
        self._touched.extend(keys)
        if not (location in self._remotes if location else self._remotes):
            return
        with self._lock:
            until = time.monotonic() + CONFIRM_SECONDS
            self._unconfirmed.update(dict.fromkeys(keys, until))
            if self._confirming or self._stop.is_set():
                return
            self._confirming = True
        self._thread.submit(self._confirm)

    def found(
        self, records: Mapping[CacheEngineKey, RecordKey], located: Mapping[RecordKey, str]
    ) -> None:
        """Note a lookup of ``records`` that found those in ``located``."""
        with self._lock:
            for key, record in records.items():
                location = located.get(record)
                if location is None:
                    self._lose_remotely(key)
                elif key not in self._names:
                    self._expect(key, _name(record))
                    self._touched.append(key)
                if location in self._remotes:
                    self._hold_remotely(key)

    def discarded(self, key: CacheEngineKey) -> None:
        """Count a remote store's damaged record as gone, even if the store keeps it."""
        with self._lock:
            self._unconfirmed.pop(key, None)
            self._lose_remotely(key)

    def clear(self, epoch: int) -> None:
        """Forget all records, after a reset.

        Args:
            epoch: of the records from now on.
        """
        with self._lock:
            self._epoch = epoch
            for names in (self._names, self._said, self._expected):
                names.clear()
            self._in_remote.clear()
            self._unconfirmed.clear()
            self._touched.clear()
            self._state = None

    # To the scheduler

    def report(self, serving: bool, unfinished: bool) -> RankReport | None:
        """Report what changed since the last report; None for nothing.

        Args:
            serving: whether records are loaded now.
            unfinished: whether saves have not reached the store yet.
        """
        writing = unfinished or self._confirming or any(busy() for busy in self._writing)
        if not self._touched and (serving, writing) == self._state:
            return None
        with self._lock:
            changes = self._take()
        if not changes and (serving, writing) == self._state:
            return None
        self._state = serving, writing
        return RankReport(self._rank, self._epoch, changes, serving, writing)

    def _take(self) -> tuple[tuple[RecordName, Tier | None], ...]:
        changes: dict[RecordName, Tier | None] = {}
        while self._touched:
            key = self._touched.popleft()
            name = self._names.get(key) or self._expected.get(key)
            if name is None:
                continue  # not of this package, or forgotten
            tier = self._tier(key)
            if tier == self._said.get(key):
                continue
            changes[name] = tier
            if tier is None:
                del self._said[key], self._names[key]
                self._expect(key, name)  # a slower write of it may be under way
            else:
                self._said[key], self._names[key] = tier, name
                self._expected.pop(key, None)
        return tuple(changes.items())

    def _tier(self, key: CacheEngineKey) -> Tier | None:
        for tier, index in self._indexes:
            if key in index:
                return tier
        return REMOTE if key in self._in_remote else None

    # With the lock held

    def _expect(self, key: CacheEngineKey, name: RecordName) -> None:
        if key not in self._names:
            self._expected[key] = name
            if len(self._expected) > KEPT_EXPECTED:
                self._expected.popitem(last=False)

    def _hold_remotely(self, key: CacheEngineKey) -> None:
        if key not in self._in_remote:
            self._touched.append(key)
        self._in_remote[key] = None
        self._in_remote.move_to_end(key)
        if len(self._in_remote) > KEPT_REMOTE:
            self._touched.append(self._in_remote.popitem(last=False)[0])

    def _lose_remotely(self, key: CacheEngineKey) -> None:
        if key in self._in_remote:
            del self._in_remote[key]
            self._touched.append(key)

    # Remote stores

    def _confirm(self) -> None:
        """Ask remote stores for the records sent to them until they hold these."""
        pause = PAUSE_SECONDS
        while not self._stop.wait(pause):
            with self._lock:
                keys = list(self._unconfirmed)
                self._confirming = bool(keys)
            if not keys:
                return
            held = self._held_remotely(keys)
            with self._lock:
                for key in keys:
                    if key not in self._unconfirmed:
                        continue  # damaged or cleared meanwhile
                    if key in held:
                        self._hold_remotely(key)
                    if key in held or self._unconfirmed[key] < time.monotonic():
                        del self._unconfirmed[key]
            pause = PAUSE_SECONDS if held else min(2 * pause, LONGEST_PAUSE)

    def _held_remotely(self, keys: Sequence[CacheEngineKey]) -> set[CacheEngineKey]:
        held: set[CacheEngineKey] = set()
        for tier in self._remotes.values():
            try:
                answers = tier.held(keys, ANSWER_SECONDS)
            except Exception:  # retried until CONFIRM_SECONDS are over
                continue
            held.update(key for key, is_held in zip(keys, answers, strict=True) if is_held)
        return held

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.shutdown(wait=True)


def _name(record: RecordKey) -> RecordName:
    return RecordName(record.group, wide_hash(record.block_hash), tags_digest(record.tags))
