# SPDX-License-Identifier: Apache-2.0
"""The deepest boundary that can be restored, on one rank and over all ranks.

A hit at B needs the attention pages of [0, B), the last pages before B of window groups, and the
state at B, of every group and rank. The ranks' smallest answer is a new limit until all are equal.
"""

import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from lmcache_hybrid.adapters import Adapter
from lmcache_hybrid.groups import GroupPlan, Window
from lmcache_hybrid.monitor import NO_MONITOR, Monitor
from lmcache_hybrid.record import ATTENTION, STATE, RecordKey
from lmcache_hybrid.store import Claim, Store


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """The whole blocks of one prompt, as the store knows them.

    Attributes:
        hashes: vLLM's block hash at the end of each block of N tokens.
        tags: (name, value) pairs that keep requests apart beyond the hashes.
        adapter: the LoRA adapter; its tag is among ``tags`` once the ranks named its content.
    """

    hashes: tuple[bytes, ...]
    tags: tuple[tuple[str, str], ...] = ()
    adapter: Adapter | None = None

    @property
    def identified(self) -> bool:
        """Whether the keys of its records are known: not before the ranks named the adapter."""
        return self.adapter is None or bool(self.adapter.contents)

    def up_to(self, boundary: int) -> "Prefix":
        """Its first ``boundary`` blocks."""
        return msgspec.structs.replace(self, hashes=self.hashes[:boundary])

    def computed_with(self, contents: tuple[bytes, ...]) -> "Prefix | None":
        """With what the ranks say of the adapter; None where they do not know, or no longer agree.

        Args:
            contents: of each rank, see :class:`lmcache_hybrid.adapters.Adapter`.
        """
        if self.adapter is None or not contents or not all(contents):
            return None
        if self.identified:
            return self if self.adapter.contents == contents else None
        adapter = Adapter(self.adapter.lora, contents)
        return Prefix(self.hashes, (*self.tags, adapter.tag), adapter)


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler asks every rank.

    Attributes:
        request_id: whose claim the answer replaces.
        prefix: of the prompt.
        limit: deepest block count allowed; 0 only drops the claim.
        floor: blocks that are cached locally; at or below them nothing is claimed.
        deadline: ``time.monotonic`` by which a rank ends its lookup, some time before the
            scheduler no longer waits.
        again: whether this is a further round of the same lookup.
        number: of the lookup, higher than of any before; a drop names it.
    """

    request_id: str
    prefix: Prefix
    limit: int
    floor: int
    deadline: float = math.inf
    again: bool = False
    number: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One rank's answer, in blocks.

    Attributes:
        boundary: deepest boundary with everything it needs, 0 for none.
        attention: leading blocks whose attention pages exist.
        sources: (backend, how many) of the blocks from the question's floor to ``boundary``,
            by their pages of the first attention group.
        available: False where there is no verdict, which is a miss.
        adapter: what the ranks compute the prefix's adapter with; filled in behind
            :func:`agree`, None where they do not know.
    """

    boundary: int
    attention: int
    sources: tuple[tuple[str, int], ...] = ()
    available: bool = True
    adapter: Adapter | None = None

    @property
    def source(self) -> str:
        """The backend of the last block."""
        return self.sources[-1][0] if self.sources else "unknown"

    def last(self, blocks: int) -> Iterator[tuple[str, int]]:
        """(backend, how many) of the last ``blocks`` before ``boundary``, deepest first."""
        for source, run in reversed(self.sources):
            if blocks <= 0:
                return
            yield source, min(run, blocks)
            blocks -= run

    def outcome(self, floor: int, limit: int) -> str:
        """In a word, of a question with this floor and limit."""
        if not self.available:
            return "unavailable"
        if self.boundary:
            return "hit"
        return "local" if limit <= floor else "miss"


MISS = Answer(0, 0)
UNAVAILABLE = Answer(0, 0, available=False)

# Boundaries that are asked for at once, once the deepest one is not complete.
CANDIDATES = 1024


def record_keys(
    prefix: Prefix, block: int, block_size: int, kind: int, groups: Sequence[int]
) -> list[RecordKey]:
    """Keys of block number ``block`` (counted from 0) for all ``groups``."""
    boundary = (block + 1) * block_size
    return [RecordKey(kind, group, prefix.hashes[block], boundary, prefix.tags) for group in groups]


def load_keys(prefix: Prefix, start: int, boundary: int, plan: GroupPlan) -> list[RecordKey]:
    """Everything a load of blocks [start, boundary) reads: attention, windows, states."""
    keys = [
        key
        for block in range(start, boundary)
        for key in record_keys(prefix, block, plan.block_size, ATTENTION, plan.attention)
    ]
    for window in plan.windows:
        keys += window_keys(prefix, start, boundary, plan.block_size, window)
    return keys + record_keys(prefix, boundary - 1, plan.block_size, STATE, plan.states)


def used_keys(prefix: Prefix, boundaries: Iterable[int], plan: GroupPlan) -> list[RecordKey]:
    """What hits at ``boundaries`` (blocks) need, in the order in which it is worth keeping.

    Pages from the first one on, for those are shared the most, and each state behind
    the pages that it needs, but before those that it does not.
    """
    keys: list[RecordKey] = []
    start = 0
    for boundary in sorted(set(boundaries) - {0}):
        new = load_keys(prefix, start, boundary, plan)
        for window in plan.windows:
            # Those before ``start`` may be among what the boundary before has.
            new += window_keys(prefix, 0, boundary, plan.block_size, window)
        keys += new
        start = boundary
    return list(dict.fromkeys(keys))


def window_keys(
    prefix: Prefix, start: int, boundary: int, block_size: int, window: Window
) -> list[RecordKey]:
    """Pages of a window group that a load of blocks [start, boundary) reads, last one first."""
    blocks = range(boundary - 1, window.first(start, boundary) - 1, -1)
    return [
        record_keys(prefix, block, block_size, ATTENTION, (window.group,))[0] for block in blocks
    ]


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

    def answer(self, question: Question) -> Answer:
        """Find the deepest boundary and claim it. Mutates the claims."""
        started = time.perf_counter()
        answer = self._answer(question)
        if question.limit > 0 and answer.available and not question.again:
            size = self._plan.block_size
            asked = len(question.prefix.hashes) * size
            self._monitor.looked_up(asked, answer.boundary * size, started)
        return answer

    def _answer(self, question: Question) -> Answer:
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

    def _search(self, question: Question) -> Answer:
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
                return Answer(boundary, attention, _runs(found.where[key] for key in pages))
        # vLLM takes its own copy, which may be gone the next time.
        local = min(floor, len(prefix.hashes))
        self._store.refresh(used_keys(prefix, (local,), plan))
        return Answer(0, attention)

    def _locate(self, question: Question, keys: Sequence[RecordKey]) -> dict[RecordKey, str]:
        self._check_wanted(question)
        return self._store.locate(keys, question.deadline)

    def _check_wanted(self, question: Question) -> None:
        """Raises _UnwantedError when nobody waits for the answer any more.

        Called only once the question is the one that is being answered: a drop comes after
        the deadline, so it is either seen there or the question is already too old here.
        """
        if self._given_up or time.monotonic() > question.deadline:
            raise _UnwantedError

    def _keep(self, question: Question, claim: Claim) -> bool:
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


def agree(ask: Callable[[Question], list[Answer]], question: Question) -> Answer:
    """Ask all ranks until they name one boundary; UNAVAILABLE where one has no verdict.

    A round trip, and one more for each boundary that some rank lacks.

    Args:
        ask: sends a question to all ranks; no answers when one did not answer.
    """
    while True:
        answers = ask(question)
        if not answers:
            return UNAVAILABLE
        attention = min(answer.attention for answer in answers)
        lowest = min(answer.boundary for answer in answers)
        available = all(answer.available for answer in answers)
        if all(answer.boundary == lowest for answer in answers):
            return Answer(lowest, attention, answers[0].sources, available)
        question = msgspec.structs.replace(question, limit=lowest, again=True)
        if lowest == 0:
            ask(question)  # makes the other ranks drop their claims
            return Answer(0, attention, available=available)
