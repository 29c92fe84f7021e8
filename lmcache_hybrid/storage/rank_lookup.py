# SPDX-License-Identifier: Apache-2.0
"""Finds the deepest boundary that one rank can restore, and claims its records."""

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from lmcache_hybrid.core.groups import GroupPlan, Window
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.core.lmcache_stats import NO_MONITOR, Monitor
from lmcache_hybrid.protocol.hit_records import (
    inner_keys,
    load_keys,
    record_keys,
    tail_keys,
    used_keys,
)
from lmcache_hybrid.protocol.lookup import MISS, UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage.store import Claim, Store

# Boundaries to locate at once if the deepest one is incomplete.
CANDIDATES = 1024


class _UnwantedError(Exception):
    """The lookup was given up, or its deadline has passed."""


class _Found:
    """Locates the records of one prefix in a few calls. Lives for one lookup, on its thread.

    Attributes:
        where: backend of each record found.
    """

    def __init__(
        self,
        plan: GroupPlan,
        request: LookupRequest,
        locate: Callable[[Sequence[RecordKey]], dict[RecordKey, str]],
    ) -> None:
        self.where: dict[RecordKey, str] = {}
        self._asked: set[RecordKey] = set()
        self._plan, self._prefix, self._floor = plan, request.prefix, request.floor
        self._locate, self._states_at = locate, list(_ranges(request.states_at))
        size, blocks = plan.block_size, len(self._prefix.hashes)
        floor = self._floor * size
        # A partly filled page follows whole ones.
        limit = min(request.limit * size + request.limit_tail, blocks * size + size - 1)
        inner = (tokens for tokens in self._prefix.inner if floor < tokens <= limit)
        # All boundaries in (floor, limit], deepest first, in tokens; how many end the last block.
        self._ends = sorted({*range(floor + size, limit + 1, size), *inner}, reverse=True)
        self._deepest = sum(end >= limit // size * size for end in self._ends)

    def attention(self) -> int:
        """Count the leading blocks whose attention pages all exist, in one call.

        Also locates the records of the deepest block's boundaries, where most hits are, and those
        of :meth:`states`. Pages past the limit count: they need not be stored again.
        """
        groups, ends = self._plan.attention, self._ends[: self._deepest]
        keys = [key for at in range(len(self._prefix.hashes)) for key in self._pages(at, groups)]
        tails = (tail_keys(self._prefix, end, self._plan) for end in self._inner(ends))
        states = (self._needs(ends, 0) for ends in self._states_at)
        more = itertools.chain(*tails, *states)
        self._add([*keys, *self._needs(self._blocks(ends), self._floor), *more])
        missing = (at for at, key in enumerate(keys) if key not in self.where)
        return next(missing, len(keys)) // len(groups)

    def states(self) -> set[int]:
        """Return those of the request's ``states_at`` whose records :meth:`attention` found."""
        return {end for ends in self._states_at for end in self._whole(ends, 0)}

    def boundaries(self, attention: int) -> Iterator[int]:
        """Yield boundaries with all states and windows, deepest first, in tokens.

        :meth:`attention` has located those of the deepest block. Each call then locates
        :data:`CANDIDATES` more, and a second one the rest of boundaries inside a block whose state
        exists.

        Args:
            attention: leading blocks whose attention pages all exist.
        """
        size = self._plan.block_size
        past = sum(end >= (attention + 1) * size for end in self._ends)
        ends, batch = self._ends[past:], max(0, self._deepest - past) or CANDIDATES
        while ends:
            yield from self._complete(ends[:batch])
            ends, batch = ends[batch:], CANDIDATES

    def _inner(self, ends: Sequence[int]) -> list[int]:
        return [end for end in ends if end % self._plan.block_size]

    def _blocks(self, ends: Sequence[int]) -> range:
        """Return the whole boundaries among ``ends``, in blocks; there are no gaps."""
        whole = [end // self._plan.block_size for end in ends if not end % self._plan.block_size]
        return range(whole[-1], whole[0] + 1) if whole else range(0)

    def _complete(self, ends: Sequence[int]) -> Iterator[int]:
        """Yield the complete ones of ``ends``, deepest first.

        Boundaries inside a block are first asked for one state each, as all their records would
        be many keys. Those found need a second call.
        """
        blocks = self._blocks(ends)
        probes = {
            end: inner_keys(self._prefix, end, STATE, self._plan.states[:1])[0]
            for end in self._inner(ends)
        }
        self._add([*self._needs(blocks, self._floor), *probes.values()])
        whole = {end * self._plan.block_size for end in self._whole(blocks, self._floor)}
        found = (end for end, probe in probes.items() if probe in self.where)
        tails = {end: tail_keys(self._prefix, end, self._plan) for end in found}
        for end in sorted(whole.union(tails), reverse=True):
            if end in tails:
                self._add(itertools.chain.from_iterable(tails.values()))
            if end in whole or all(key in self.where for key in tails[end]):
                yield end

    def _add(self, keys: Iterable[RecordKey]) -> None:
        """Locate the keys not asked for yet."""
        unknown = [key for key in dict.fromkeys(keys) if key not in self._asked]
        if unknown:
            self._asked.update(unknown)
            self.where.update(self._locate(unknown))

    def _needs(self, blocks: range, floor: int) -> list[RecordKey]:
        """List the keys of states and window pages of the boundaries ``blocks``, ascending.

        Args:
            floor: blocks that vLLM holds; their window pages are not needed.
        """
        if not blocks:
            return []
        pages = [
            key
            for window in self._plan.windows
            for at in range(window.first(floor, blocks[0]), blocks[-1])
            for key in self._pages(at, (window.group,))
        ]
        return [*pages, *itertools.chain.from_iterable(map(self._states, blocks))]

    def _whole(self, blocks: range, floor: int) -> list[int]:
        """List the complete boundaries among ``blocks``, whose :meth:`_needs` were located."""
        if not blocks:
            return []
        windows = self._plan.windows
        gaps = [self._gaps(each, each.first(floor, blocks[0]), blocks[-1]) for each in windows]
        return [
            boundary
            for boundary in blocks
            if all(key in self.where for key in self._states(boundary))
            and all(
                gap[boundary] < window.first(floor, boundary)
                for window, gap in zip(windows, gaps, strict=True)
            )
        ]

    def _gaps(self, window: Window, start: int, deepest: int) -> dict[int, int]:
        """Map each boundary from ``start`` on to the last block before it without a page, or -1."""
        last = -1
        gaps = {start: last}  # the first boundary itself, for a window of no block
        for at in range(start, deepest):
            if self._pages(at, (window.group,))[0] not in self.where:
                last = at
            gaps[at + 1] = last
        return gaps

    def _pages(self, block: int, groups: Sequence[int]) -> list[RecordKey]:
        return record_keys(self._prefix, block, self._plan.block_size, ATTENTION, groups)

    def _states(self, boundary: int) -> list[RecordKey]:
        plan = self._plan
        return record_keys(self._prefix, boundary - 1, plan.block_size, STATE, plan.states)


def _ranges(numbers: Sequence[int]) -> Iterator[range]:
    """Group ascending numbers into ranges without gaps."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield range(found[0], found[-1] + 1)


class RankLookup:
    """Answers lookups for one rank and owns the claims behind its answers.

    One thread calls :meth:`answer`, with each request's lookups in the order of their numbers,
    and :meth:`refresh`; any thread may call the rest.

    A claim lives until its load takes it (:meth:`take_claim`; the load releases it), its request
    gives it up (:meth:`release`), or the request's next lookup replaces it. A release names its
    lookup: it cancels that lookup even while it is being answered, and never a later one.
    """

    def __init__(self, plan: GroupPlan, store: Store, monitor: Monitor = NO_MONITOR) -> None:
        self._plan = plan
        self._store = store
        self._monitor = monitor
        # By request: number of the lookup, and its claim.
        self._claims: dict[str, tuple[int, Claim]] = {}
        # Request and number of the lookup being answered, and whether it was released.
        self._answering = "", 0
        self._given_up = False
        self._lock = threading.Lock()  # guards these three
        # Used by the last lookup, see refresh(): prefix, boundaries, boundaries inside a block.
        self._used: tuple[Prefix, tuple[int, ...], tuple[int, ...]] | None = None

    def answer(self, request: LookupRequest) -> LookupResult:
        """Find the deepest boundary and claim it in place of the request's last claim."""
        self.refresh()
        started = time.perf_counter()
        result = self._answer(request)
        asks = request.limit > 0 or request.limit_tail > 0
        if asks and result.available and request.claims and not request.again:
            size = self._plan.block_size
            asked = max(
                len(request.prefix.hashes) * size, request.limit * size + request.limit_tail
            )
            self._monitor.looked_up(asked, result.tokens(size), started)
        return result

    def refresh(self) -> None:
        """Mark the records that the last lookup found as recently used.

        Called after the answer is sent, so that nobody waits for it; claimed records are not
        evicted meanwhile. Skipping this call is safe: the next :meth:`answer` calls it.
        """
        used, self._used = self._used, None
        if used is not None:
            prefix, boundaries, inner = used
            self._store.refresh(used_keys(prefix, boundaries, self._plan, inner))

    def _answer(self, request: LookupRequest) -> LookupResult:
        self.release(request.request_id, request.number)
        with self._lock:
            self._answering = request.request_id, request.number
            self._given_up = False
        if request.only_releases:
            return MISS
        if not self._store.readable():
            return UNAVAILABLE
        try:
            return self._search(request)
        except _UnwantedError:
            return UNAVAILABLE

    def _search(self, request: LookupRequest) -> LookupResult:
        """Find the deepest boundary that can be claimed. Raises _UnwantedError."""
        prefix, plan, floor = request.prefix, self._plan, request.floor
        found = _Found(plan, request, functools.partial(self._locate, request))
        attention, barred = found.attention(), set(request.barred)
        states = found.states()
        for end in found.boundaries(attention):
            if end in barred:
                continue
            boundary, tail = divmod(end, plan.block_size)
            keys = load_keys(prefix, floor, boundary, plan, tail)
            self._check_wanted(request)
            claim = self._store.claim({key: found.where[key] for key in keys})
            if claim is None:
                states.discard(boundary)  # some of it has just been evicted
            else:
                past = {at for at in states if boundary < at <= attention}
                whole = past if tail else {boundary, *past}
                self._used = prefix, tuple(whole), (end,) if tail else ()
                if not request.claims:
                    claim.release()
                elif not self._keep(request, claim):
                    return UNAVAILABLE
                pages = keys[:: len(plan.attention)][: boundary - floor + bool(tail)]
                sources = _runs(found.where[key] for key in pages)
                return LookupResult(
                    boundary, attention, sources, tail=tail, states=tuple(sorted(states))
                )
        # vLLM uses its own blocks, which it may have evicted by the next time.
        past = {at for at in states if floor < at <= attention}
        self._used = prefix, (min(floor, len(prefix.hashes)), *past), ()
        return LookupResult(0, attention, states=tuple(sorted(states)))

    def _locate(self, request: LookupRequest, keys: Sequence[RecordKey]) -> dict[RecordKey, str]:
        self._check_wanted(request)
        return self._store.locate(keys, request.deadline)

    def _check_wanted(self, request: LookupRequest) -> None:
        """Raise _UnwantedError once nobody waits for the answer.

        A release that comes before its lookup is not remembered. But the scheduler sends it only
        after the deadline, which ends such a lookup here.
        """
        if self._given_up or time.monotonic() > request.deadline:
            raise _UnwantedError

    def _keep(self, request: LookupRequest, claim: Claim) -> bool:
        """Keep the claim, or release it if its lookup was given up meanwhile."""
        with self._lock:
            self._answering = "", 0
            if not self._given_up:
                self._claims[request.request_id] = request.number, claim
                return True
        claim.release()
        return False

    def take_claim(self, request_id: str) -> Claim | None:
        """Hand over a request's claim; the caller releases it."""
        with self._lock:
            return self._claims.pop(request_id, (0, None))[1]

    def release(self, request_id: str, number: int = sys.maxsize) -> None:
        """Release the claim of a request that will not load, even one being made.

        Args:
            number: of the lookup given up; claims of later ones stay.
        """
        with self._lock:
            answering, latest = self._answering
            self._given_up |= request_id == answering and latest <= number
            claimed_by, claim = self._claims.get(request_id, (0, None))
            if claim is None or claimed_by > number:
                return
            del self._claims[request_id]
        claim.release()

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        with self._lock:
            claims = [claim for _, claim in self._claims.values()]
            assert all(claim.held for claim in claims), "a filed claim was released"
            assert len(set(map(id, claims))) == len(claims), "two requests share a claim"
            answering, latest = self._answering
            claimed_by, _ = self._claims.get(answering, (latest + 1, None))
            assert claimed_by > latest, "a lookup left its predecessor's claim"


def _runs(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Count equal neighbours: (name, how many)."""
    return tuple((name, len(list(run))) for name, run in itertools.groupby(names))
