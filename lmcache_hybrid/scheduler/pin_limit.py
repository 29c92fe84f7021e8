# SPDX-License-Identifier: Apache-2.0
"""Bounds what waiting requests pin in LMCache's RAM.

vLLM asks for every waiting request in each scheduling pass, and the ranks pin what they find
until vLLM has blocks for it. A long queue would pin the whole pool: nothing new could be stored,
and no hit on disk or in a remote store could be read.
"""

import math
from collections import Counter
from collections.abc import Mapping

from lmcache_hybrid.core.backends import RAM
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

# Waiting requests pin at most this part of the pool, or the records of this many.
PART = 0.5
FEW = 4

# Records that are pinned together: (tags, block hash, whether states and windows at its end).
Key = tuple[tuple[tuple[str, str], ...], bytes, bool]


class Pins:
    """Counts the records in RAM that waiting requests pin, shared ones once.

    A pending lookup counts with all that it may find. Loads do not count: they end by themselves.
    Used by the scheduler's thread only.
    """

    def __init__(
        self, plan: GroupPlan, page_bytes: Mapping[int, int], pool_gib: float | None
    ) -> None:
        """
        Args:
            page_bytes: of one record, per group of the plan, on one rank. Each rank's RAM has a
                copy even of pages that are equal on all ranks.
            pool_gib: size of one rank's pool; None where RAM keeps nothing: no bound.
        """
        self._size = plan.block_size
        self._most = math.inf if pool_gib is None else PART * pool_gib * (1 << 30)
        self._page_bytes = self._end_bytes = 0
        if self._most < math.inf:
            windows = sum(page_bytes[window.group] * window.blocks for window in plan.windows)
            self._page_bytes = sum(page_bytes[group] for group in plan.attention)
            self._end_bytes = windows + sum(page_bytes[group] for group in plan.states)
        self._held: dict[str, tuple[Key, ...]] = {}  # by request
        self._holders: dict[Key, int] = {}
        # Lookups that were not answered when last looked at, in the order of their numbers.
        self._unanswered: dict[str, PendingLookup] = {}
        self._head: str | None = None
        self._full = False
        self.bytes = 0

    def begin(self) -> None:
        """Begin a scheduling pass."""
        self._head, self._full = None, False

    def consider(self, request_id: str) -> None:
        """Note a request that vLLM asks for; a pass's first one is the head of its queue."""
        if self._head is None:
            self._head = request_id

    def may_ask(self, request_id: str) -> bool:
        """Whether a request that pins nothing yet may be looked up.

        The head always may, so none waits for ever. Those behind a refused one are also refused.
        """
        if request_id == self._head:
            return True
        if not self._full:
            self._take_answers()
            self._full = len(self._held) >= FEW and self.bytes >= self._most
        return not self._full

    def ask(self, lookup: PendingLookup) -> None:
        """Count a lookup that was sent, in place of the request's earlier pins."""
        if self._most == math.inf:
            return
        request, request_id = lookup.request, lookup.request.request_id
        everywhere = ((RAM, len(request.prefix.hashes) + 1),)
        all_of_it = LookupResult(request.limit, 0, everywhere, tail=request.limit_tail)
        self._hold(request_id, self._keys(request, all_of_it))
        self._unanswered.pop(request_id, None)
        self._unanswered[request_id] = lookup

    def answer(self, request_id: str, result: LookupResult) -> None:
        """Count what the request's lookup found; a miss where it was given up."""
        lookup = self._unanswered.pop(request_id, None)
        if lookup is not None:
            self._hold(request_id, self._keys(lookup.request, result))

    def forget(self, request_id: str) -> None:
        """Count no pins of the request any more: they are released, or its load's."""
        self._unanswered.pop(request_id, None)
        self._hold(request_id, ())

    def _take_answers(self) -> None:
        """Count the results of lookups that were answered but not polled yet."""
        while self._unanswered:  # they are answered in order
            request_id, lookup = next(iter(self._unanswered.items()))
            if lookup.result is None:
                return
            self.answer(request_id, lookup.result)

    def _hold(self, request_id: str, keys: tuple[Key, ...]) -> None:
        """Pin ``keys`` for a request, in place of what it pinned before."""
        for key in self._held.pop(request_id, ()):
            self._holders[key] = holders = self._holders[key] - 1
            if not holders:
                del self._holders[key]
                self.bytes -= self._bytes(key)
        if keys:
            self._held[request_id] = keys
        for key in keys:
            self._holders[key] = holders = self._holders.get(key, 0) + 1
            if holders == 1:
                self.bytes += self._bytes(key)

    def _bytes(self, key: Key) -> int:
        return self._end_bytes if key[2] else self._page_bytes

    def _keys(self, request: LookupRequest, result: LookupResult) -> tuple[Key, ...]:
        """Return what a claim for ``result`` pins in RAM."""
        prefix, end = request.prefix, result.tokens(self._size)
        tail = (prefix.inner[end],) if result.tail else ()
        hashes = [*prefix.hashes[request.floor : result.boundary], *tail]
        keys: list[Key] = []
        at = 0
        for source, blocks in result.sources:
            if source == RAM:
                keys += [(prefix.tags, each, False) for each in hashes[at : at + blocks]]
            at += blocks
        if hashes and result.source == RAM:
            keys.append((prefix.tags, hashes[-1], True))
        return tuple(keys)

    def check_integrity(self, claims: Mapping[str, int]) -> None:
        """Assert what holds between two calls of vLLM.

        Args:
            claims: number of the lookup for which the ranks may hold a claim, by request.
        """
        assert self._held.keys() | self._unanswered.keys() <= claims.keys(), "pins nothing"
        for request_id, lookup in self._unanswered.items():
            assert lookup.request.number == claims[request_id]
        holders = Counter(key for keys in self._held.values() for key in keys)
        assert holders == self._holders and sum(map(self._bytes, holders)) == self.bytes
