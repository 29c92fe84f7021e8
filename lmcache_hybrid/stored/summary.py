# SPDX-License-Identifier: Apache-2.0
"""What a store holds, by model, rank and fingerprint."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_hybrid.stored.audit import Status, Verdict


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
    deepest: int
    youngest: float | None
    oldest: float | None
    damaged: int
    other_version: int
    unfinished: int


@dataclass
class Tally:
    """Counts of one fingerprint while a store is read.

    A record knows the hash of its whole prefix, but not the block before it. So prompts
    cannot be told one by one; but prefixes of the same length with different hashes
    belong to different prompts, which gives a lower bound.
    """

    statuses: Counter[Status] = field(default_factory=Counter)
    taken: int = 0
    states: int = 0
    youngest: float | None = None
    oldest: float | None = None
    # Prefixes by boundary; state groups by prefix.
    prefixes: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    groups: dict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, verdict: Verdict) -> None:
        entry, header = verdict.entry, verdict.header
        self.statuses[verdict.status] += 1
        self.taken += entry.taken
        if entry.age is not None:
            self.youngest = min(entry.age, entry.age if self.youngest is None else self.youngest)
            self.oldest = max(entry.age, self.oldest or 0.0)
        if header is None:
            return
        prefix = header.block_hash + header.tags
        self.prefixes[header.boundary].add(prefix)
        if entry.key.label.startswith("s"):
            self.states += 1
            self.groups[prefix].add(entry.key.label)

    def row(self, model: str, rank: str, fingerprint: str) -> Row:
        every = set().union(*self.groups.values())
        return Row(
            model,
            rank,
            fingerprint,
            self.statuses[Status.GOOD],
            self.states,
            self.taken,
            max((len(prefixes) for prefixes in self.prefixes.values()), default=0),
            sum(groups == every for groups in self.groups.values()),
            max(self.prefixes, default=0),
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
