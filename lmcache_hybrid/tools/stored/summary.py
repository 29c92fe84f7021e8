# SPDX-License-Identifier: Apache-2.0
"""What a store holds, by model, rank and fingerprint."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from lmcache_hybrid.tools.stored.audit import Status, Verdict

# Most prefixes with states that are kept for each fingerprint: about 10 MB.
SAMPLE = 1 << 17


@dataclass(frozen=True)
class Row:
    """Records of one model, layout and rank, i.e. of one fingerprint.

    Attributes:
        rank: ``0/2`` is rank 0 of 2.
        records: good ones; the other counts are of what is not good.
        states: good state records.
        bytes: of everything, in the store.
        prompts: at least so many different prompts; see :class:`Tally`.
        resumable: boundaries that have the states of all groups, where the model has states.
        estimated: ``resumable`` is of a sample, as there are very many.
        deepest: largest boundary, in tokens.
        youngest, oldest: seconds since a record was written (files) or used (Redis).
    """

    model: str
    rank: str
    fingerprint: str
    records: int
    states: int
    bytes: int
    prompts: int
    resumable: int
    estimated: bool
    deepest: int
    youngest: float | None
    oldest: float | None
    damaged: int
    other_version: int
    unfinished: int


class Resumable:
    """Counts prefixes that have the states of all groups.

    Exact up to SAMPLE prefixes; beyond that an even sample of them is kept, and the count
    is an estimate. So its memory is bounded.
    """

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        # Prefixes whose digest is a multiple of this are kept.
        self._every = 1

    @property
    def estimated(self) -> bool:
        return self._every > 1

    def add(self, prefix: bytes, group: str) -> None:
        bit = self._bits.setdefault(group, 1 << len(self._bits))
        key = xxhash.xxh3_64_intdigest(prefix)
        if key % self._every:
            return
        self._groups[key] = self._groups.get(key, 0) | bit
        while len(self._groups) > SAMPLE:
            self._every *= 2
            self._groups = {k: v for k, v in self._groups.items() if not k % self._every}

    def count(self) -> int:
        every = (1 << len(self._bits)) - 1
        return self._every * sum(groups == every for groups in self._groups.values())


@dataclass
class Tally:
    """Counts of one fingerprint while a store is read, in bounded memory.

    A record knows the hash of its whole prefix, but not the block before it. So prompts
    cannot be told one by one; but prefixes of the same length with different hashes
    belong to different prompts, and a store has one record of each group for each of
    them: the most of one group at one boundary is a lower bound.
    """

    statuses: Counter[Status] = field(default_factory=Counter)
    taken: int = 0
    states: int = 0
    youngest: float | None = None
    oldest: float | None = None
    # Records by boundary and group.
    prefixes: Counter[tuple[int, str]] = field(default_factory=Counter)
    resumable: Resumable = field(default_factory=Resumable)

    def add(self, verdict: Verdict) -> None:
        entry, header = verdict.entry, verdict.header
        self.statuses[verdict.status] += 1
        self.taken += entry.taken
        if entry.age is not None:
            self.youngest = min(entry.age, entry.age if self.youngest is None else self.youngest)
            self.oldest = max(entry.age, self.oldest or 0.0)
        if header is None:
            return
        self.prefixes[header.boundary, entry.key.label] += 1
        if entry.key.label.startswith("s"):
            self.states += 1
            self.resumable.add(header.block_hash + header.tags, entry.key.label)

    def row(self, model: str, rank: str, fingerprint: str) -> Row:
        return Row(
            model,
            rank,
            fingerprint,
            self.statuses[Status.GOOD],
            self.states,
            self.taken,
            max(self.prefixes.values(), default=0),
            self.resumable.count(),
            self.resumable.estimated,
            max((boundary for boundary, _ in self.prefixes), default=0),
            self.youngest,
            self.oldest,
            self.statuses[Status.DAMAGED],
            self.statuses[Status.OTHER_VERSION],
            self.statuses[Status.UNFINISHED],
        )


def summarise(verdicts: Iterable[Verdict]) -> list[Row]:
    """One row per fingerprint, sorted by model and rank."""
    tallies: dict[tuple[str, int, int, str], Tally] = defaultdict(Tally)
    for verdict in verdicts:
        key = verdict.entry.key
        tallies[key.model, key.rank, key.world_size, key.fingerprint].add(verdict)
    return [
        tally.row(model, f"{rank}/{world}", fingerprint)
        for (model, rank, world, fingerprint), tally in sorted(tallies.items())
    ]
