# SPDX-License-Identifier: Apache-2.0
"""The deepest boundary that one rank can restore, and the claims behind its answers."""

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from lmcache_hybrid.core.groups import GroupPlan, Window
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.core.lmcache_stats import NO_MONITOR, Monitor
from lmcache_hybrid.protocol.lookup import MISS, UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.protocol.prefix import Prefix, load_keys, record_keys, used_keys
from lmcache_hybrid.storage.interface import Claim, Store

# Boundaries that are asked for at once, once the deepest one is not complete.
CANDIDATES = 1024


class _UnwantedError(Exception):
    """Nobody waits for this answer any more."""


class _Found:
    """What a store has of one prefix, asked in a few questions. Of one lookup, on one thread.

    Attributes:
        where: backend of each record that was found.
    """

    def __init__(
        self,
        plan: GroupPlan,
        prefix: Prefix,
        floor: int,
        locate: Callable[[Sequence[RecordKey]], dict[RecordKey, str]],
    ) -> None:
        self.where: dict[RecordKey, str] = {}
        self._plan, self._prefix, self._floor, self._locate = plan, prefix, floor, locate

    def attention(self) -> int:
        """Count the leading blocks whose attention pages are all there, with one question."""
        groups = self._plan.attention
        keys = [key for at in range(len(self._prefix.hashes)) for key in self._pages(at, groups)]
        self.where.update(self._locate(keys))
        missing = (at for at, key in enumerate(keys) if key not in self.where)
        return next(missing, len(keys)) // len(groups)

    def boundaries(self, deepest: int) -> Iterator[int]:
        """Boundaries in (floor, deepest] with all states and windows, deepest first.

        Asks for the deepest one, where most hits are, then for more at once: three questions
        up to the first of :data:`CANDIDATES` boundaries.
        """
        batches = itertools.chain((1,), itertools.repeat(CANDIDATES))
        while deepest > self._floor:
            before = max(deepest - next(batches), self._floor)
            complete = self._complete(before, deepest)
            yield from sorted(complete, reverse=True)
            deepest = before

    def _complete(self, before: int, deepest: int) -> list[int]:
        """Those in (before, deepest], with one question."""
        plan, wanted = self._plan, range(before + 1, deepest + 1)
        states = {boundary: self._states(boundary) for boundary in wanted}
        pages = [
            key
            for window in plan.windows
            for at in range(window.first(self._floor, before + 1), deepest)
            for key in self._pages(at, (window.group,))
        ]
        keys = [*pages, *itertools.chain.from_iterable(states.values())]
        self.where.update(self._locate([key for key in keys if key not in self.where]))
        gaps = [self._gaps(window, before + 1, deepest) for window in plan.windows]
        return [
            boundary
            for boundary in wanted
            if all(key in self.where for key in states[boundary])
            and all(
                gap[boundary] < window.first(self._floor, boundary)
                for window, gap in zip(plan.windows, gaps, strict=True)
            )
        ]

    def _gaps(self, window: Window, first: int, deepest: int) -> dict[int, int]:
        """By boundary: the last block before it whose page of this group is missing, or -1."""
        start, last = window.first(self._floor, first), -1
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


class RankLookup:
    """Answers for one rank, and the claims behind its answers.

    A claim lives from the answer until its load took it (:meth:`take`), the
    request gave it up (:meth:`drop`), or the next question replaced it. A drop
    that overtakes its question, because the scheduler stopped waiting, counts too;
    one that comes after the next question leaves that one's claim alone.
    """

    def __init__(self, plan: GroupPlan, store: Store, monitor: Monitor = NO_MONITOR) -> None:
        self._plan = plan
        self._store = store
        self._monitor = monitor
        self._claims: dict[str, tuple[int, Claim]] = {}  # by request; of which question
        self._answering = "", 0
        self._given_up = False
        self._lock = threading.Lock()  # lookup thread, worker thread

    def answer(self, question: LookupRequest) -> LookupResult:
        """Find the deepest boundary and claim it. Mutates the claims."""
        started = time.perf_counter()
        answer = self._answer(question)
        if question.limit > 0 and answer.available and not question.again:
            size = self._plan.block_size
            asked = len(question.prefix.hashes) * size
            self._monitor.looked_up(asked, answer.boundary * size, started)
        return answer

    def _answer(self, question: LookupRequest) -> LookupResult:
        self.drop(question.request_id, question.number)
        with self._lock:
            self._answering = question.request_id, question.number
            self._given_up = False
        if question.limit <= 0:
            return MISS
        if not self._store.readable():
            return UNAVAILABLE
        try:
            return self._search(question)
        except _UnwantedError:
            return UNAVAILABLE

    def _search(self, question: LookupRequest) -> LookupResult:
        """Find the deepest boundary that can be claimed. Raises _UnwantedError."""
        prefix, plan, floor = question.prefix, self._plan, question.floor
        found = _Found(plan, prefix, floor, functools.partial(self._locate, question))
        # Counted past the limit too: what is stored need not be stored again.
        attention = found.attention()
        for boundary in found.boundaries(min(attention, question.limit)):
            keys = load_keys(prefix, floor, boundary, plan)
            self._check_wanted(question)
            claim = self._store.claim({key: found.where[key] for key in keys})
            if claim is not None:
                self._store.refresh(used_keys(prefix, (boundary,), plan))
                if not self._keep(question, claim):
                    return UNAVAILABLE
                pages = keys[:: len(plan.attention)][: boundary - floor]
                return LookupResult(boundary, attention, _runs(found.where[key] for key in pages))
        # vLLM takes its own copy, which may be gone the next time.
        local = min(floor, len(prefix.hashes))
        self._store.refresh(used_keys(prefix, (local,), plan))
        return LookupResult(0, attention)

    def _locate(self, question: LookupRequest, keys: Sequence[RecordKey]) -> dict[RecordKey, str]:
        self._check_wanted(question)
        return self._store.locate(keys, question.deadline)

    def _check_wanted(self, question: LookupRequest) -> None:
        """Raises _UnwantedError when nobody waits for the answer any more.

        Called only once the question is the one that is being answered: a drop comes after
        the deadline, so it is either seen there or the question is already too old here.
        """
        if self._given_up or time.monotonic() > question.deadline:
            raise _UnwantedError

    def _keep(self, question: LookupRequest, claim: Claim) -> bool:
        """File the claim unless its request was dropped in the meantime."""
        with self._lock:
            self._answering = "", 0
            if not self._given_up:
                self._claims[question.request_id] = question.number, claim
                return True
        claim.release()
        return False

    def take(self, request_id: str) -> Claim | None:
        """Hand the claim over; the caller releases it."""
        with self._lock:
            return self._claims.pop(request_id, (0, None))[1]

    def drop(self, request_id: str, number: int = sys.maxsize) -> None:
        """Release the claim of a request that will not load, filed or about to be.

        Args:
            number: of the question that was given up; claims of later ones stay.
        """
        with self._lock:
            answering, latest = self._answering
            self._given_up |= request_id == answering and latest <= number
            claimed_by, claim = self._claims.get(request_id, (0, None))
            if claim is None or claimed_by > number:
                return
            del self._claims[request_id]
        claim.release()

    @property
    def num_claims(self) -> int:
        return len(self._claims)


def _runs(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Equal neighbours as (name, how many)."""
    return tuple((name, len(list(run))) for name, run in itertools.groupby(names))
