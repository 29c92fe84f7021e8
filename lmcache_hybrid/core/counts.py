# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges of the scheduler side and the worker side, the source of all metrics.

:mod:`lmcache_hybrid.metrics` says what each count is called in ``/metrics``.
"""

import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lmcache_hybrid.core.errors import LoadError, RecordError

# Why a record is rejected (RecordError.reason).
CHECKS = (
    *("short", "magic", "version", "header", "fingerprint", "key", "length", "checksum", "seal"),
    "wrapper",
)
# Marks a gauge.
LEVEL = {"level": True}


def _split() -> Any:
    """A total by one label, or by several that are joined with commas."""
    return field(default_factory=Counter)


def _observed() -> Any:
    return field(default_factory=list)


@dataclass
class SchedulerCounts:
    """Totals since the engine started. Lists hold observations not reported yet.

    Attributes:
        lookups: answered ones by outcome: hit, miss, local (vLLM holds all that can be
            restored) or unavailable (a rank gave no answer).
        lookup_seconds: from the request to its result.
        delayed_lookups: requests that were looked up later than vLLM asked, because waiting
            requests pinned too much of LMCache's RAM.
        shared_prefills: requests that waited for a prefix which another one was computing.
        shared_prefill_tokens: that they did not compute because of it.
        hits: requests that started from LMCache, by the backend of their last block.
        hit_tokens: tokens loaded for them, by the backend where rank 0 found them.
        lost_hits: lookups whose attention pages reach deeper than any boundary that can
            be restored.
        lost_tokens: how much deeper, in tokens.
        skipped_loads: hits that are computed because that is faster, by the backend of their
            last block.
        skipped_load_tokens: their tokens.
        loads_in_flight: gauge of requests that wait for a load.
        failed_loads: requests whose load failed on some rank.
        failed_tokens: tokens to be loaded for them, which are computed instead.
        granularity_tokens: of cacheable prompts, past their last boundary and without the last
            token: no later request can hit them.
        dropped_offers: states that vLLM handed off and that were not stored, by reason.
        skipped_requests: requests that are not looked up, or not stored (any more), by reason.
        drops: requests that asked to drop their records, by outcome: done, refused or failed.
        keeps: requests that asked to keep their records, by outcome: done, refused or failed.
        caught_errors: unexpected errors, by where they were caught: :mod:`.faults`.
    """

    lookups: Counter[str] = _split()
    lookup_seconds: list[float] = _observed()
    delayed_lookups: int = 0
    shared_prefills: int = 0
    shared_prefill_tokens: int = 0
    hits: Counter[str] = _split()
    hit_tokens: Counter[str] = _split()
    lost_hits: int = 0
    lost_tokens: int = 0
    skipped_loads: Counter[str] = _split()
    skipped_load_tokens: Counter[str] = _split()
    loads_in_flight: int = field(default=0, metadata=LEVEL)
    failed_loads: int = 0
    failed_tokens: int = 0
    granularity_tokens: int = 0
    dropped_offers: Counter[str] = _split()
    skipped_requests: Counter[str] = _split()
    drops: Counter[str] = _split()
    keeps: Counter[str] = _split()
    caught_errors: Counter[str] = _split()


@dataclass
class WorkerCounts:
    """Totals of one rank since it started. Lists hold observations not reported yet.

    Attributes:
        saved_attention: blocks; each is one record per attention group.
        saved_windows: pages of window groups.
        saved_states: boundaries; each is one record per state group.
        saved_bytes: of all these.
        save_seconds: time by which saves delayed one step, all its requests together. Excludes
            asynchronous device copies.
        skipped_saves: saves of one request in one step that stored nothing, by reason.
        failed_writes: records that a backend accepted and could not write, by backend. The
            store's own counter, written under the store's lock; reported when something else
            here changes.
        rewritten_bytes: of saved records that a backend already held, by backend; written like
            failed_writes.
        loaded_attention, loaded_windows, loaded_states, loaded_bytes: as above.
        load_seconds: of one request's load, from its start to its end.
        load_wait_seconds: from the step that asked for the load to its start.
        failed_loads: by reason and kind of the record at fault, see :func:`failure_label`.
        dropped_records: removed because a request asked for it, by backend.
        kept_bytes: gauge of the bytes that are evicted last, by backend, whether stored yet or not;
            reported in changes.
        cleaned_records, cleaned_bytes: deleted from the folders of ``fs://``, by reason.
        caught_errors: as the scheduler's.
    """

    saved_attention: int = 0
    saved_windows: int = 0
    saved_states: int = 0
    saved_bytes: int = 0
    save_seconds: list[float] = _observed()
    skipped_saves: Counter[str] = _split()
    failed_writes: Counter[str] = _split()
    rewritten_bytes: Counter[str] = _split()
    loaded_attention: int = 0
    loaded_windows: int = 0
    loaded_states: int = 0
    loaded_bytes: int = 0
    load_seconds: list[float] = _observed()
    load_wait_seconds: list[float] = _observed()
    failed_loads: Counter[str] = _split()
    dropped_records: Counter[str] = _split()
    kept_bytes: Counter[str] = _split()
    cleaned_records: Counter[str] = _split()
    cleaned_bytes: Counter[str] = _split()
    caught_errors: Counter[str] = _split()

    @property
    def rejected_records(self) -> int:
        """Failed loads whose record did not pass its checks."""
        return sum(n for label, n in self.failed_loads.items() if label.split(",")[0] in CHECKS)


def failure_label(error: BaseException) -> str:
    """Label a failed load ``reason,kind``: why it failed, and on which kind of record."""
    if not isinstance(error, (LoadError, RecordError)):
        return "error,none"
    return f"{error.reason},{error.kind}"


C = TypeVar("C", SchedulerCounts, WorkerCounts)


class Ledger(Generic[C]):
    """Counts of one side, reported as changes. Thread-safe.

    Count inside ``with ledger as counts:``, which holds the lock: keep it short.

    Attributes:
        counts: to read; change it only inside ``with``.
    """

    def __init__(self, side: str, counts: C) -> None:
        """Start at zero.

        Args:
            side: ``scheduler`` or ``worker``, the first part of the names in reports.
        """
        self.counts: C = counts
        self._side = side
        self._lock = threading.Lock()
        self._changed = False
        self._reported = self._totals()

    def __enter__(self) -> C:
        self._lock.acquire()
        return self.counts

    def __exit__(self, *exc: object) -> None:
        self._changed = True
        self._lock.release()

    def report(self) -> dict[str, Any] | None:
        """Counter deltas, gauge values and drained observations since the last call.

        Returns:
            By ``side.name``; None where nothing changed.
        """
        if not self._changed:  # every step asks, most have counted nothing
            return None
        news: dict[str, Any] = {}
        with self._lock:
            self._changed = False
            # Compare copies: a backend's writers count without our lock.
            before, self._reported = self._reported, self._totals()
            for each in dataclasses.fields(self.counts):
                value, name = self._reported[each.name], f"{self._side}.{each.name}"
                if isinstance(value, list):
                    if value:
                        news[name] = value.copy()
                        value.clear()
                elif value == before[each.name]:
                    continue
                elif isinstance(value, dict):
                    old = before[each.name]
                    changes = {label: n - old.get(label, 0) for label, n in value.items()}
                    news[name] = {label: change for label, change in changes.items() if change}
                else:
                    is_level = "level" in each.metadata
                    news[name] = value if is_level else value - before[each.name]
        return news or None

    def _totals(self) -> dict[str, Any]:
        values = vars(self.counts).items()
        return {name: dict(v) if isinstance(v, dict) else v for name, v in values}
