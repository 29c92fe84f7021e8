# SPDX-License-Identifier: Apache-2.0
"""Reports of the ranks on the records that they hold, for KV cache events."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.distributed.kv_events import KVConnectorKVEvents

# Where a rank would load a record from, the nearest first.
RAM, DISK, REMOTE = 0, 1, 2
Tier = int


class RecordName(NamedTuple):
    """Names a record on any rank.

    Attributes:
        group: KV cache group index.
        block_hash: 32 bytes, see :func:`lmcache_hybrid.core.keys.wide_hash`.
        tags: digest of the tags that keep requests apart.
    """

    group: int
    block_hash: bytes
    tags: bytes


@dataclass(frozen=True)
class RankReport:
    """What changed on one rank since its last report.

    Attributes:
        rank: from 0.
        epoch: number of store resets when the records were stored.
        changes: (record, nearest tier that holds it), None where it is gone.
        serving: whether the rank loads records now.
        writing: whether writes are in flight, so that another report follows.
    """

    rank: int
    epoch: int
    changes: tuple[tuple[RecordName, Tier | None], ...]
    serving: bool
    writing: bool


class RankReports(KVConnectorKVEvents):
    """Carries the reports of a step from the workers to the scheduler.

    vLLM joins the ranks' events with :meth:`add_events`. Its own aggregation keeps only events on
    which the ranks agree; ours may report at different steps, so all reports are kept and
    :mod:`lmcache_hybrid.scheduler.event_prefixes` combines them.
    """

    def __init__(self, reports: Sequence[RankReport]) -> None:
        self.reports = list(reports)

    def add_events(self, events: Sequence[Any]) -> None:
        self.reports.extend(events)

    def aggregate(self) -> "RankReports":
        return self

    def increment_workers(self, count: int = 1) -> None:
        return

    def get_all_events(self) -> list[Any]:
        return self.reports

    def get_number_of_workers(self) -> int:
        return len({report.rank for report in self.reports})

    def clear_events(self) -> None:
        self.reports.clear()
