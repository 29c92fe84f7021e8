# SPDX-License-Identifier: Apache-2.0
"""The deepest boundary that can be restored, on one rank and over all ranks.

A hit at B needs the attention pages of [0, B), the last pages before B of
window groups, and the state at B, of every group, on every rank. Ranks may hold
different boundaries, so the smallest answer is only a new limit to ask with: all
must name the same boundary.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from lmcache_hybrid.groups import GroupPlan, Window
from lmcache_hybrid.monitor import NO_MONITOR, Monitor
from lmcache_hybrid.record import ATTENTION, STATE, RecordKey
from lmcache_hybrid.store import Claim, Store


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """The whole blocks of one prompt, as the store knows them.

    Attributes:
        hashes: vLLM's block hash at the end of each block of N tokens.
        tags: (name, value) pairs that keep requests apart beyond the hashes.
    """

    hashes: tuple[bytes, ...]
    tags: tuple[tuple[str, str], ...] = ()


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler asks every rank.

    Attributes:
        request_id: whose claim the answer replaces.
        prefix: of the prompt.
        limit: deepest block count allowed; 0 only drops the claim.
        floor: blocks that are cached locally; at or below them nothing is claimed.
        deadline: ``time.monotonic`` after which the scheduler no longer waits.
        again: whether this is a further round of the same lookup.
    """

    request_id: str
    prefix: Prefix
    limit: int
    floor: int
    deadline: float = math.inf
    again: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One rank's answer, in blocks.

    Attributes:
        boundary: deepest boundary with everything it needs, 0 for none.
        attention: leading blocks whose attention pages exist.
        sources: (backend, how many) of the blocks from the question's floor to ``boundary``,
            by their pages of the first attention group.
        available: False where there is no verdict, which is a miss.
    """

    boundary: int
    attention: int
    sources: tuple[tuple[str, int], ...] = ()
    available: bool = True

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


class RankLookup:
    """Answers for one rank, and the claims behind its answers.

    A claim lives from the answer until its load took it (:meth:`take`), the
    request gave it up (:meth:`drop`), or the next question replaced it. A drop
    that overtakes its question, because the scheduler stopped waiting, counts too.
    """

    def __init__(self, plan: GroupPlan, store: Store, monitor: Monitor = NO_MONITOR) -> None:
        self._plan = plan
        self._store = store
        self._monitor = monitor
        self._claims: dict[str, Claim] = {}
        self._answering = ""
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
        self.drop(question.request_id)
        with self._lock:
            self._answering, self._given_up = question.request_id, False
        # Looked at after the line above: a drop comes after the deadline, so it is
        # either seen there or the question is already too old here.
        if time.monotonic() > question.deadline:
            return MISS
        if question.limit <= 0:
            return MISS
        if not self._store.readable():
            return UNAVAILABLE
        prefix, plan = question.prefix, self._plan
        # Counted past the limit too: what is stored need not be stored again.
        located, attention = self._attention_prefix(prefix, len(prefix.hashes))
        boundary = min(attention, question.limit)
        while boundary > question.floor:
            found, reach = self._locate_last(prefix, question.floor, boundary)
            if reach < boundary:
                boundary = reach
                continue
            keys = load_keys(prefix, question.floor, boundary, plan)
            claim = self._store.claim({key: found.get(key) or located[key] for key in keys})
            if claim is not None:
                self._store.refresh(used_keys(prefix, (boundary,), plan))
                if not self._keep(question, claim):
                    return MISS
                blocks = boundary - question.floor
                sources = _runs(located[key] for key in keys[:: len(plan.attention)][:blocks])
                return Answer(boundary, attention, sources)
            boundary -= 1
        # vLLM takes its own copy, which may be gone the next time.
        local = min(question.floor, len(prefix.hashes))
        self._store.refresh(used_keys(prefix, (local,), plan))
        return Answer(0, attention)

    def _locate_last(
        self, prefix: Prefix, floor: int, boundary: int
    ) -> tuple[dict[RecordKey, str], int]:
        """Where the states and windows of a boundary are, and the next boundary worth a look.

        That is ``boundary`` itself where all of them are there, else the deepest one
        that does without the one that is missing.
        """
        size, plan = self._plan.block_size, self._plan
        states = record_keys(prefix, boundary - 1, size, STATE, plan.states)
        located = self._store.locate(states)
        if len(located) < len(states):
            return {}, boundary - 1
        for window in plan.windows:
            keys = window_keys(prefix, floor, boundary, size, window)
            found = self._store.locate(keys)
            if len(found) < len(keys):
                return {}, boundary - 1 - len(found)
            located.update(found)
        return located, boundary

    def _keep(self, question: Question, claim: Claim) -> bool:
        """File the claim unless its request was dropped in the meantime."""
        with self._lock:
            self._answering = ""
            if not self._given_up:
                self._claims[question.request_id] = claim
                return True
        claim.release()
        return False

    def _attention_prefix(self, prefix: Prefix, limit: int) -> tuple[dict[RecordKey, str], int]:
        """Where the attention records are, and how many leading blocks are complete."""
        located: dict[RecordKey, str] = {}
        for group in self._plan.attention:
            found = self._store.locate(
                [
                    record_keys(prefix, block, self._plan.block_size, ATTENTION, (group,))[0]
                    for block in range(limit)
                ]
            )
            located.update(found)
            limit = len(found)
        return located, limit

    def take(self, request_id: str) -> Claim | None:
        """Hand the claim over; the caller releases it."""
        with self._lock:
            return self._claims.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Release the claim of a request that will not load, filed or about to be."""
        with self._lock:
            self._given_up |= request_id == self._answering
            claim = self._claims.pop(request_id, None)
        if claim is not None:
            claim.release()

    @property
    def num_claims(self) -> int:
        return len(self._claims)


def _runs(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Equal neighbours as (name, how many)."""
    return tuple((name, len(list(run))) for name, run in groupby(names))


def agree(ask: Callable[[Question], list[Answer]], question: Question) -> Answer:
    """Ask all ranks until they name one boundary; UNAVAILABLE where one has no verdict.

    Args:
        ask: sends a question to every rank and returns all answers, or an empty
            list when a rank did not answer.

    Round trips: one where the ranks hold the same, else one more for each
    boundary that some rank lacks. Each round either ends or lowers the limit.
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
