# SPDX-License-Identifier: Apache-2.0
"""Chooses records of a folder to delete, in memory that does not grow with the folder."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.storage.record_format import read_header

# Records used within one minute count as used together: those of one prompt mostly are.
MINUTE = 60.0
# Lower goes first.
Depth = tuple[int, int]
# Records that no engine of this version can read.
UNREADABLE: Depth = (-(1 << 64), 0)


class Deletable(Protocol):
    """A record for :func:`least_used`."""

    @property
    def used(self) -> float:
        """Seconds since the epoch of its last use, or else of its write."""

    @property
    def taken(self) -> int:
        """Bytes that it takes in the store."""

    def depth(self) -> Depth:
        """See :func:`depth_of`; may read the record's header."""


R = TypeVar("R", bound=Deletable)
K = TypeVar("K", int, Depth)


def depth_of(head: bytes) -> Depth:
    """Order records used at the same time, by their headers: the deepest goes first.

    Records behind a deleted one are useless, so the end of a prompt goes first. At one boundary
    the state, which serves only that boundary, goes before the page, which longer hits also need.
    """
    try:
        header = read_header(head)
    except RecordError:
        return UNREADABLE
    return -header.boundary, -header.kind


def least_used(scan: Callable[[], Iterable[R]], excess: int) -> Iterator[R]:
    """Choose the least recently used records, by minutes; within the last minute by depth.

    Args:
        scan: lists the deletable records; called up to three times. They may change meanwhile.
        excess: bytes to free; records of at least that many are chosen, or all.
    """
    if excess <= 0:
        return
    minute, rest = _reach(((_minute(record), record.taken) for record in scan()), excess)
    if minute is None:
        yield from scan()
        return
    depth, rest = _reach(((r.depth(), r.taken) for r in scan() if _minute(r) == minute), rest)
    for record in scan():
        if (used := _minute(record)) < minute:
            yield record
        elif used == minute and (depth is None or (its := record.depth()) < depth):
            yield record
        elif used == minute and its == depth and rest > 0:
            rest -= record.taken
            yield record


def _minute(record: Deletable) -> int:
    return int(record.used // MINUTE)


def _reach(sizes: Iterable[tuple[K, int]], wanted: int) -> tuple[K | None, int]:
    """Find the first key at which the running total reaches ``wanted`` bytes; None if none.

    Returns:
        The key, and how many of its own bytes are needed.
    """
    totals: Counter[K] = Counter()
    for key, size in sizes:
        totals[key] += size
    for key in sorted(totals):
        if totals[key] >= wanted:
            return key, wanted
        wanted -= totals[key]
    return None, wanted
