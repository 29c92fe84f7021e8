# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges of the scheduler side and the worker side, the source of all metrics.

A field's metadata are the attributes of its :class:`lmcache_hybrid.metrics.Metric`: the name, if
it is not the field's, the help text, the labels and their values. ``after`` is the scheduler's
count behind which a rank's, and those below it, stand in ``/metrics``.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

from lmcache_hybrid.core.backends import DISK, RAM, REMOTE
from lmcache_hybrid.core.errors import LoadError, RecordError

BACKENDS = (RAM, DISK, REMOTE)
# Why a record is rejected (RecordError.reason).
CHECKS = (
    *("short", "magic", "version", "header", "fingerprint", "key", "length", "checksum", "seal"),
    "wrapper",
)
RECORD_REASONS = (*CHECKS, "gone", "unreadable", "unreachable")
LOAD_REASONS = "unreachable no_room unpinned unhealthy adapter asleep slow error".split()
# Places where unexpected errors are caught, see :mod:`.faults`.
SCHEDULER_PLACES = """
    get_kv_connector_stats shutdown get_num_new_matched_tokens ask_ranks release_claims
    drop_records keep_records update_state_after_alloc build_connector_meta plan_save
    report_lookup update_connector_output register_finished_partial_tail request_finished
    take_events has_pending_push_work cleared reset_cache reset_failed
""".split()
RANK_PLACES = """
    get_kv_connector_stats shutdown start_cleaner serve_lookup answer_lookup refresh_records
    drop_records keep_records adapter_content reset_store bind_connector_metadata give_up_claim
    start_load release_claim end_load wait_for_save get_transfer_results
    build_connector_worker_meta get_kv_connector_kv_cache_events unregister_kv_caches
    restore_kv_caches
""".split()
# Seconds. A lookup delays one request, a save delays a step, a load may be long.
LOOKUP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COPY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


def _total(help: str, **metric: str) -> Any:
    return field(default=0, metadata={"help": help, **metric})


def _level(help: str) -> Any:
    """A gauge."""
    return field(default=0, metadata={"help": help, "level": True})


def _split(help: str, labels: str, known: Iterable[str], **metric: Any) -> Any:
    """A total by one label, or by several that are joined with commas."""
    metric |= {"labels": tuple(labels.split(",")), "known": tuple(known)}
    return field(default_factory=Counter, metadata={"help": help, **metric})


def _observed(help: str, buckets: tuple[float, ...] = COPY_BUCKETS) -> Any:
    return field(default_factory=list, metadata={"help": help, "buckets": buckets})


@dataclass
class SchedulerCounts:
    """Totals since the engine started. Lists hold observations not reported yet."""

    lookups: Counter[str] = _split(
        "Lookups that were answered, by outcome.",
        "outcome",
        ("hit", "miss", "local", "unavailable"),
    )
    lookup_seconds: list[float] = _observed(
        "Time from a lookup to the answer of all ranks.", LOOKUP_BUCKETS
    )
    delayed_lookups: int = _total(
        "Requests whose lookup waited until others held less of LMCache's RAM."
    )
    shared_prefills: int = _total(
        "Requests that waited for a prefix which another request was computing."
    )
    shared_prefill_tokens: int = _total(
        "Prompt tokens that these requests did not compute because of it."
    )
    hits: Counter[str] = _split(
        "Requests that started from LMCache, by the backend of their deepest block.",
        "source",
        BACKENDS,
    )
    # By the backend where rank 0 found them.
    hit_tokens: Counter[str] = _split(
        "Prompt tokens that LMCache promised to these requests, by backend.", "source", BACKENDS
    )
    lost_hits: int = _total(
        "Lookups whose attention pages reach deeper than the deepest boundary with a state."
    )
    lost_tokens: int = _total(
        "Tokens computed although their attention pages are stored: the state is missing.",
        name="lost_hit_tokens",
    )
    granularity_tokens: int = _total(
        "Prompt tokens past the last boundary of their prompt, which no later request can hit."
    )
    skipped_requests: Counter[str] = _split(
        "Requests that are not looked up or not stored, by reason.",
        "reason",
        "short uncacheable adapter skip_reading read_only priority skip_save reset "
        "skipped_step".split(),
    )
    skipped_loads: Counter[str] = _split(
        "Hits that were computed because that is faster (hybrid_load_policy), by backend.",
        "source",
        BACKENDS,
    )
    skipped_load_tokens: Counter[str] = _split(
        "Prompt tokens of these hits past vLLM's own, by backend.", "source", BACKENDS
    )
    loads_in_flight: int = _level("Requests that wait for a load now.")
    failed_loads: int = _total(
        "Requests computed because their load failed on some rank.", name="recomputed_requests"
    )
    failed_tokens: int = _total(
        "Tokens that LMCache had promised to these requests.", name="recomputed_tokens"
    )
    drops: Counter[str] = _split(
        "Requests that asked to drop their prompt's records (lmcache.drop), by outcome.",
        "outcome",
        ("done", "refused", "failed"),
    )
    keeps: Counter[str] = _split(
        "Requests that asked to keep their prompt's records (lmcache.keep), by outcome.",
        "outcome",
        ("done", "refused", "failed"),
    )
    dropped_offers: Counter[str] = _split(
        "States of one group that vLLM handed off and that were not stored, by reason.",
        "reason",
        "not_running not_cached unusable incomplete inside_media beside_others".split(),
    )
    caught_errors: Counter[str] = _split(
        "Errors on the scheduler's side that nobody foresaw, by where they were caught.",
        "place",
        SCHEDULER_PLACES,
        name="scheduler_errors",
    )


@dataclass
class WorkerCounts:
    """Totals of one rank since it started. Lists hold observations not reported yet."""

    loaded_states: int = _total(
        "Boundaries whose states were restored, summed over ranks.", after="loads_in_flight"
    )
    loaded_attention: int = _total(
        "Blocks whose attention pages were restored, summed over ranks.",
        name="loaded_attention_blocks",
    )
    loaded_windows: int = _total(
        "Blocks of window groups that were restored, summed over ranks.",
        name="loaded_window_blocks",
    )
    loaded_bytes: int = _total("Bytes restored, summed over ranks.")
    load_seconds: list[float] = _observed("Time of a request's load on a rank, queueing excluded.")
    load_wait_seconds: list[float] = _observed("Time that a load was queued on a rank.")
    # See failure_label.
    failed_loads: Counter[str] = _split(
        "Loads that failed on a rank, by reason and by kind of record.",
        "reason,record",
        (
            *map(",".join, product(RECORD_REASONS, ("state", "attention"))),
            *(f"{reason},none" for reason in LOAD_REASONS),
        ),
    )
    saved_states: int = _total(
        "Boundaries whose states were handed to the store, summed over ranks.",
        after="failed_tokens",
    )
    saved_attention: int = _total(
        "Blocks whose attention pages were handed to the store, summed over ranks.",
        name="saved_attention_blocks",
    )
    saved_windows: int = _total(
        "Blocks of window groups that were handed to the store, summed over ranks.",
        name="saved_window_blocks",
    )
    saved_bytes: int = _total("Bytes of all these, summed over ranks.")
    # Of all requests of a step together; excludes asynchronous device copies.
    save_seconds: list[float] = _observed("Time by which saves delayed a step on a rank.")
    skipped_saves: Counter[str] = _split(
        "Saves of one request in one step that stored nothing on a rank, by reason.",
        "reason",
        "frozen unhealthy no_room reset asleep adapter error".split(),
    )
    # These two are the store's own, written under its lock; reported when something else here
    # changes.
    failed_writes: Counter[str] = _split(
        "Records that a backend accepted and failed to write, summed over ranks.",
        "source",
        BACKENDS,
    )
    rewritten_bytes: Counter[str] = _split(
        "Bytes of records that were saved although the backend already held them.",
        "source",
        BACKENDS,
    )
    dropped_records: Counter[str] = _split(
        "Records removed for them, summed over ranks.", "source", BACKENDS, after="drops"
    )
    # A gauge that is reported in changes.
    kept_bytes: Counter[str] = _split(
        "Bytes of records that are evicted last now, stored or to be stored, summed over ranks.",
        "source",
        (RAM, DISK),
        level=True,
        after="keeps",
    )
    cleaned_records: Counter[str] = _split(
        "Records that this engine deleted from folders of fs:// (hybrid_fs_max_*), by limit.",
        "limit",
        ("age", "size", "unfinished"),
    )
    cleaned_bytes: Counter[str] = _split(
        "Bytes of these records.", "limit", ("age", "size", "unfinished")
    )
    caught_errors: Counter[str] = _split(
        "The same of ranks, summed over them.",
        "place",
        RANK_PLACES,
        name="rank_errors",
        after="caught_errors",
    )


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
