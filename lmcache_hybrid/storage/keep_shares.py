# SPDX-License-Identifier: Apache-2.0
"""Names of records that a backend evicts last, each until a time of its own."""

import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from lmcache_hybrid.storage import eviction_order

# Part of the share of all salts that one of them may take.
OF_SALT = 0.4
# Max keeps of one record that are told apart: those beyond it end with their time only.
KEEPS = 8
# (number, second until which it lasts) of each keep of a record; 0 for more than KEEPS.
KeepsOfOne = tuple[tuple[int, int], ...]
# Looks like a record that cannot be evicted.
PINNED = SimpleNamespace(can_evict=False)


class KeptNames:
    """The kept records of one backend, stored or not: one that is written later is kept, too.

    Thread-safe. Sizes are counted in full, whether a record is stored or not, so that the share
    holds once all are. Names past their time are forgotten with the next keep or eviction.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: bytes that the backend may hold.
        """
        self._capacity = capacity
        self._lock = threading.Lock()  # guards changes
        # (second of time.monotonic until which it is kept, salt, bytes, its keeps) by name.
        self._names: dict[Hashable, tuple[int, bytes, int, KeepsOfOne]] = {}
        # Names and bytes by this second, and a heap of these seconds.
        self._by_end: dict[int, set[Hashable]] = {}
        self._bytes_by_end: dict[int, int] = {}
        self._ends: list[int] = []
        self._of_salt: Counter[bytes] = Counter()
        self._total = 0

    def __contains__(self, name: Hashable) -> bool:
        kept = self._names.get(name)
        return kept is not None and kept[0] > time.monotonic()

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def size(self) -> int:
        """Bytes of all records kept now, those that are not stored included. Never waits."""
        now = time.monotonic()
        sizes = self._bytes_by_end.copy()  # at once, whatever other threads do
        return sum(size for until, size in sizes.items() if until > now)

    def why_full(self, records: Mapping[Hashable, int], salt: bytes, share: float) -> str:
        """Say why records cannot be kept; "" if they can. Tells a salt nothing of others.

        Args:
            records: bytes by name.
            share: of the capacity, for all salts.
        """
        with self._lock:
            self._forget_ended()
            new = sum(size for name, size in records.items() if name not in self._names)
            own, most = self._of_salt[salt] + new, share * self._capacity
            if own > OF_SALT * most:
                who = "this cache_salt" if salt else "all requests without a cache_salt"
                return (
                    f"{who} would keep {own / 1e6:.1f} MB, of {OF_SALT * most / 1e6:.1f} MB that "
                    "may be kept for one."
                )
            if self._total + new > most:
                return "what may be kept for all is in use. Try again later."
            return ""

    def keep(
        self, records: Mapping[Hashable, int], salt: bytes, seconds: float, number: int = 0
    ) -> None:
        """Keep records from now on, those kept for longer as long as they were.

        Args:
            records: bytes by name.
            number: of the keep, for :meth:`end`.
        """
        now = time.monotonic()
        until = math.ceil(now + seconds)
        with self._lock:
            self._forget_ended()
            for name, size in records.items():
                ends, _, _, keeps = self._names.get(name, (0, salt, 0, ()))
                others = tuple(each for each in keeps if each[1] > now and each[0] != number)
                own = number, max(until, dict(keeps).get(number, 0))
                keeps = (*others, own) if len(others) < KEEPS else ((0, max(until, ends)),)
                if ends < until:
                    self._put(name, until, salt, size, keeps)
                else:
                    self._names[name] = *self._names[name][:3], keeps

    def end(self, names: Iterable[Hashable], number: int = 0) -> None:
        """Keep records no longer, but those that other keeps name as long as these.

        Args:
            number: of the only keep that is to end; 0 for all.
        """
        now = time.monotonic()
        with self._lock:
            for name in names:
                _, salt, size, keeps = self._names.get(name, (0, b"", 0, ()))
                left = tuple(each for each in keeps if each[1] > now and number not in (0, each[0]))
                if left:
                    self._put(name, max(until for _, until in left), salt, size, left)
                else:
                    self._forget(name)

    def clear(self) -> None:
        """Keep none any longer."""
        with self._lock:
            for kept in (
                *(self._names, self._by_end, self._bytes_by_end),
                *(self._ends, self._of_salt),
            ):
                kept.clear()
            self._total = 0

    def forget_ended(self) -> None:
        """Forget what has ended, so that evictions need not look past it."""
        if self:
            with self._lock:
                self._forget_ended()

    def _forget_ended(self) -> None:
        now = time.monotonic()
        while self._ends and self._ends[0] <= now:
            for name in list(self._by_end[self._ends[0]]):
                self._forget(name)
            ended = heapq.heappop(self._ends)
            del self._by_end[ended], self._bytes_by_end[ended]

    def _put(self, name: Hashable, until: int, salt: bytes, size: int, keeps: "KeepsOfOne") -> None:
        """Keep a name until then, whatever was before."""
        self._forget(name)
        if until not in self._by_end:
            self._by_end[until], self._bytes_by_end[until] = set(), 0
            heapq.heappush(self._ends, until)
        self._names[name] = until, salt, size, keeps
        self._by_end[until].add(name)
        self._bytes_by_end[until] += size
        self._of_salt[salt] += size
        self._total += size

    def _forget(self, name: Hashable) -> None:
        until, salt, size, _ = self._names.pop(name, (0, b"", 0, ()))
        if not until:
            return
        self._by_end[until].discard(name)
        self._bytes_by_end[until] -= size
        self._total -= size
        self._of_salt[salt] -= size
        if not self._of_salt[salt]:
            del self._of_salt[salt]

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        with self._lock:
            held = [size for _, _, size, _ in self._names.values()]
            assert self._total == sum(held) == self._of_salt.total(), "bytes are kept for nothing"
            assert sorted(self._ends) == sorted(self._by_end), "an end is not waited for"
            assert sum(map(len, self._by_end.values())) == len(held), "a name has no end"
            sizes = {
                end: sum(self._names[each][2] for each in self._by_end[end]) for end in self._ends
            }
            assert self._bytes_by_end == sizes, "bytes are kept past their end"


class _Spared:
    """A backend's index in which kept records look pinned, for one choice of what to evict.

    Attributes:
        passed: kept records that were looked at, in order.
    """

    def __init__(self, index: Any, kept: KeptNames) -> None:
        self._index, self._kept = index, kept
        self.passed: dict[Hashable, None] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._index)

    def __reversed__(self) -> Iterator[tuple[Hashable, Any]]:
        """Of :meth:`items`, for LMCache's MRU."""
        return ((name, self[name]) for name in reversed(self._index))

    def __getitem__(self, name: Hashable) -> Any:
        entry = self._index[name]
        if name not in self._kept:
            return entry
        self.passed[name] = None
        return PINNED

    def items(self) -> "_SparedItems":
        return _SparedItems(self)


class _SparedItems:
    def __init__(self, spared: _Spared) -> None:
        self._spared = spared

    def __iter__(self) -> Iterator[tuple[Hashable, Any]]:
        return ((name, self._spared[name]) for name in self._spared)

    def __reversed__(self) -> Iterator[tuple[Hashable, Any]]:
        return reversed(self._spared)


def evicted_last(policy: Any, capacity: int) -> KeptNames:
    """Make a backend's policy evict kept records last. Mutates it, once.

    Where nothing else can be evicted, they are. A policy meets a kept record once per turn of the
    cache: it is then moved behind all others, see :func:`.eviction_order.postpone`. FIFO, whose
    order cannot be changed at once, looks past all of them with each eviction.

    Args:
        capacity: bytes that the backend may hold.

    Returns:
        The policy's kept names, empty at first.
    """
    known: KeptNames | None = vars(policy).get("kept")
    if known is not None:
        return known
    kept, choose = KeptNames(capacity), policy.get_evict_candidates

    def get_evict_candidates(cache_dict: Any, num_candidates: int = 1) -> list[Any]:
        kept.forget_ended()
        if not kept:
            return list(choose(cache_dict, num_candidates))
        spared = _Spared(cache_dict, kept)
        found = list(choose(spared, num_candidates))
        if not found:  # only kept ones are left, and stay in their order
            return list(choose(cache_dict, num_candidates))
        eviction_order.postpone(policy, cache_dict, spared.passed)
        return found

    policy.kept, policy.get_evict_candidates = kept, get_evict_candidates
    return kept
