# SPDX-License-Identifier: Apache-2.0
"""Summarizes a store by model, rank and fingerprint."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from lmcache_hybrid.tools.stored.audit import AuditResult, Status

# Max prefixes with states to keep per fingerprint: about 10 MB.
SAMPLE = 1 << 17


@dataclass
class Row:
    """Records of one model, layout and rank, i.e. of one fingerprint; grows while they are read.

    Attributes:
        rank: ``0/2`` is rank 0 of 2.
        records: good ones; the other counts are of bad ones.
        states: good state records.
        bytes: of all, in the store.
        prompts: lower bound of different prompts; see :class:`Tally`.
        resumable: boundaries with the states of all groups, if the model has states.
        estimated: ``resumable`` is estimated from a sample.
        deepest: largest boundary, in tokens.
        youngest, oldest: seconds since a record was written (files) or used (Redis).
    """

    model: str
    rank: str
    fingerprint: str
    records: int = 0
    states: int = 0
    bytes: int = 0
    prompts: int = 0
    resumable: int = 0
    estimated: bool = False
    deepest: int = 0
    youngest: float | None = None
    oldest: float | None = None
    damaged: int = 0
    other_version: int = 0
    unfinished: int = 0


class Resumable:
    """Counts prefixes that have the states of all groups.

    Exact up to SAMPLE prefixes; beyond that an even sample is kept and the count is an estimate,
    so that its memory is bounded.
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


class Tally:
    """Fills one row while a store is read, in bounded memory.

    A record has the hash of its whole prefix, but not the block before it, so prompts cannot be
    counted exactly. But prefixes of one length with different hashes belong to different prompts,
    and a store has one record of each group for each of them: the largest count of one group at
    one boundary is a lower bound.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        # Records by boundary and group.
        self._prefixes: Counter[tuple[int, str]] = Counter()
        self._resumable = Resumable()

    def add(self, verdict: AuditResult) -> None:
        row, entry, header = self._row, verdict.entry, verdict.header
        row.bytes += entry.taken
        row.damaged += verdict.status is Status.DAMAGED
        row.other_version += verdict.status is Status.OTHER_VERSION
        row.unfinished += verdict.status is Status.UNFINISHED
        if entry.age is not None:
            row.youngest = min(entry.age, entry.age if row.youngest is None else row.youngest)
            row.oldest = max(entry.age, row.oldest or 0.0)
        if header is None:
            return
        prefix = header.boundary, entry.key.label
        self._prefixes[prefix] += 1
        row.records += 1
        row.prompts = max(row.prompts, self._prefixes[prefix])
        row.deepest = max(row.deepest, header.boundary)
        if entry.key.label.startswith("s"):
            row.states += 1
            self._resumable.add(header.block_hash + header.tags, entry.key.label)

    def row(self) -> Row:
        """Return the complete row."""
        self._row.resumable = self._resumable.count()
        self._row.estimated = self._resumable.estimated
        return self._row


def summarise(verdicts: Iterable[AuditResult]) -> list[Row]:
    """One row per fingerprint, sorted by model and rank."""
    tallies: dict[tuple[str, int, int, str], Tally] = {}
    for verdict in verdicts:
        key = verdict.entry.key
        of = key.model, key.rank, key.world_size, key.fingerprint
        if of not in tallies:
            tallies[of] = Tally(Row(key.model, f"{key.rank}/{key.world_size}", key.fingerprint))
        tallies[of].add(verdict)
    return [tally.row() for _, tally in sorted(tallies.items())]
