# SPDX-License-Identifier: Apache-2.0
"""Shows the counts of both sides in vLLM's ``/metrics``, as ``vllm:lmcache_hybrid_*``.

In each step vLLM collects a :class:`HybridStats` from every rank and from the scheduler, adds
them up, and hands the sum to :class:`HybridPromMetrics` in the process that serves
``/metrics``. So workers' counts are sums over ranks; the scheduler's exist once per engine.
docs/metrics.md explains each metric.
"""

from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_hybrid.config.stores.base import DISK, RAM, REMOTE
from lmcache_hybrid.core.counts import CHECKS

PREFIX = "vllm:lmcache_hybrid_"
BACKENDS = (RAM, DISK, REMOTE)
RECORD_REASONS = (*CHECKS, "gone", "unreadable", "unreachable")
LOAD_REASONS = (
    "unreachable",
    "no_room",
    "unpinned",
    "unhealthy",
    "adapter",
    "asleep",
    "slow",
    "error",
)
# Places where unexpected errors are caught, see :mod:`lmcache_hybrid.core.faults`.
BOTH_PLACES = ("get_kv_connector_stats", "shutdown")
SCHEDULER_PLACES = (
    *BOTH_PLACES,
    "get_num_new_matched_tokens",
    "ask_ranks",
    "release_claims",
    "drop_records",
    "keep_records",
    "update_state_after_alloc",
    "build_connector_meta",
    "plan_save",
    "report_lookup",
    "update_connector_output",
    "register_finished_partial_tail",
    "request_finished",
    "take_events",
    "has_pending_push_work",
    "cleared",
    "reset_cache",
    "reset_failed",
)
RANK_PLACES = (
    *BOTH_PLACES,
    "start_cleaner",
    "serve_lookup",
    "answer_lookup",
    "refresh_records",
    "drop_records",
    "keep_records",
    "adapter_content",
    "reset_store",
    "bind_connector_metadata",
    "give_up_claim",
    "start_load",
    "release_claim",
    "end_load",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_kv_cache_events",
    "unregister_kv_caches",
    "restore_kv_caches",
)
# Seconds. A lookup delays one request, a save delays a step, a load may be long.
LOOKUP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COPY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(frozen=True)
class Metric:
    """One metric and the count it shows.

    Attributes:
        name: without PREFIX, and without the ``_total`` of counters.
        source: ``side.count``, see :mod:`lmcache_hybrid.core.counts`.
        kind: prometheus_client's class.
        help: one sentence.
        labels: names beyond vLLM's own (model_name, engine).
        known: label values that exist from the start, several joined with commas, so
            that the first event is an increase and not a new series.
        buckets: of a histogram, in seconds.
    """

    name: str
    source: str
    kind: type
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _total(name: str, source: str, help: str, label: str = "", known: tuple = ()) -> Metric:
    return Metric(name, source, Counter, help, tuple(label.split(",")) if label else (), known)


METRICS = (
    # Lookups, once per engine
    _total(
        "lookups",
        "scheduler.lookups",
        "Lookups that were answered, by outcome.",
        "outcome",
        ("hit", "miss", "local", "unavailable"),
    ),
    Metric(
        "lookup_seconds",
        "scheduler.lookup_seconds",
        Histogram,
        "Time from a lookup to the answer of all ranks.",
        buckets=LOOKUP_BUCKETS,
    ),
    _total(
        "delayed_lookups",
        "scheduler.delayed_lookups",
        "Requests whose lookup waited until others held less of LMCache's RAM.",
    ),
    _total(
        "shared_prefills",
        "scheduler.shared_prefills",
        "Requests that waited for a prefix which another request was computing.",
    ),
    _total(
        "shared_prefill_tokens",
        "scheduler.shared_prefill_tokens",
        "Prompt tokens that these requests did not compute because of it.",
    ),
    _total(
        "hits",
        "scheduler.hits",
        "Requests that started from LMCache, by the backend of their deepest block.",
        "source",
        BACKENDS,
    ),
    _total(
        "hit_tokens",
        "scheduler.hit_tokens",
        "Prompt tokens that LMCache promised to these requests, by backend.",
        "source",
        BACKENDS,
    ),
    _total(
        "lost_hits",
        "scheduler.lost_hits",
        "Lookups whose attention pages reach deeper than the deepest boundary with a state.",
    ),
    _total(
        "lost_hit_tokens",
        "scheduler.lost_tokens",
        "Tokens computed although their attention pages are stored: the state is missing.",
    ),
    _total(
        "granularity_tokens",
        "scheduler.granularity_tokens",
        "Prompt tokens past the last boundary of their prompt, which no later request can hit.",
    ),
    _total(
        "skipped_requests",
        "scheduler.skipped_requests",
        "Requests that are not looked up or not stored, by reason.",
        "reason",
        (
            *("short", "uncacheable", "adapter", "skip_reading", "read_only", "priority"),
            *("skip_save", "reset"),
        ),
    ),
    # Loads
    _total(
        "skipped_loads",
        "scheduler.skipped_loads",
        "Hits that were computed because that is faster (hybrid_load_policy), by backend.",
        "source",
        BACKENDS,
    ),
    _total(
        "skipped_load_tokens",
        "scheduler.skipped_load_tokens",
        "Prompt tokens of these hits past vLLM's own, by backend.",
        "source",
        BACKENDS,
    ),
    Metric(
        "loads_in_flight",
        "scheduler.loads_in_flight",
        Gauge,
        "Requests that wait for a load now.",
    ),
    _total(
        "loaded_states",
        "worker.loaded_states",
        "Boundaries whose states were restored, summed over ranks.",
    ),
    _total(
        "loaded_attention_blocks",
        "worker.loaded_attention",
        "Blocks whose attention pages were restored, summed over ranks.",
    ),
    _total(
        "loaded_window_blocks",
        "worker.loaded_windows",
        "Blocks of window groups that were restored, summed over ranks.",
    ),
    _total("loaded_bytes", "worker.loaded_bytes", "Bytes restored, summed over ranks."),
    Metric(
        "load_seconds",
        "worker.load_seconds",
        Histogram,
        "Time of a request's load on a rank, queueing excluded.",
        buckets=COPY_BUCKETS,
    ),
    Metric(
        "load_wait_seconds",
        "worker.load_wait_seconds",
        Histogram,
        "Time that a load was queued on a rank.",
        buckets=COPY_BUCKETS,
    ),
    _total(
        "failed_loads",
        "worker.failed_loads",
        "Loads that failed on a rank, by reason and by kind of record.",
        "reason,record",
        (
            *map(",".join, product(RECORD_REASONS, ("state", "attention"))),
            *(f"{reason},none" for reason in LOAD_REASONS),
        ),
    ),
    _total(
        "recomputed_requests",
        "scheduler.failed_loads",
        "Requests computed because their load failed on some rank.",
    ),
    _total(
        "recomputed_tokens",
        "scheduler.failed_tokens",
        "Tokens that LMCache had promised to these requests.",
    ),
    # Saves
    _total(
        "saved_states",
        "worker.saved_states",
        "Boundaries whose states were handed to the store, summed over ranks.",
    ),
    _total(
        "saved_attention_blocks",
        "worker.saved_attention",
        "Blocks whose attention pages were handed to the store, summed over ranks.",
    ),
    _total(
        "saved_window_blocks",
        "worker.saved_windows",
        "Blocks of window groups that were handed to the store, summed over ranks.",
    ),
    _total("saved_bytes", "worker.saved_bytes", "Bytes of all these, summed over ranks."),
    Metric(
        "save_seconds",
        "worker.save_seconds",
        Histogram,
        "Time by which saves delayed a step on a rank.",
        buckets=COPY_BUCKETS,
    ),
    _total(
        "skipped_saves",
        "worker.skipped_saves",
        "Saves of one request in one step that stored nothing on a rank, by reason.",
        "reason",
        ("frozen", "unhealthy", "no_room", "reset", "asleep", "adapter", "error"),
    ),
    _total(
        "failed_writes",
        "worker.failed_writes",
        "Records that a backend accepted and failed to write, summed over ranks.",
        "source",
        BACKENDS,
    ),
    _total(
        "rewritten_bytes",
        "worker.rewritten_bytes",
        "Bytes of records that were saved although the backend already held them.",
        "source",
        BACKENDS,
    ),
    # Drops
    _total(
        "drops",
        "scheduler.drops",
        "Requests that asked to drop their prompt's records (lmcache.drop), by outcome.",
        "outcome",
        ("done", "refused", "failed"),
    ),
    _total(
        "dropped_records",
        "worker.dropped_records",
        "Records removed for them, summed over ranks.",
        "source",
        BACKENDS,
    ),
    # Keeps
    _total(
        "keeps",
        "scheduler.keeps",
        "Requests that asked to keep their prompt's records (lmcache.keep), by outcome.",
        "outcome",
        ("done", "refused", "failed"),
    ),
    Metric(
        "kept_bytes",
        "worker.kept_bytes",
        Gauge,
        "Bytes of records that are evicted last now, stored or to be stored, summed over ranks.",
        ("source",),
        (RAM, DISK),
    ),
    # Folders of fs://
    _total(
        "cleaned_records",
        "worker.cleaned_records",
        "Records that this engine deleted from folders of fs:// (hybrid_fs_max_*), by limit.",
        "limit",
        ("age", "size", "unfinished"),
    ),
    _total(
        "cleaned_bytes",
        "worker.cleaned_bytes",
        "Bytes of these records.",
        "limit",
        ("age", "size", "unfinished"),
    ),
    _total(
        "dropped_offers",
        "scheduler.dropped_offers",
        "States of one group that vLLM handed off and that were not stored, by reason.",
        "reason",
        ("not_running", "not_cached", "unusable", "incomplete", "inside_media", "beside_others"),
    ),
    # Both sides
    _total(
        "scheduler_errors",
        "scheduler.caught_errors",
        "Errors on the scheduler's side that nobody foresaw, by where they were caught.",
        "place",
        SCHEDULER_PLACES,
    ),
    _total(
        "rank_errors",
        "worker.caught_errors",
        "The same of ranks, summed over them.",
        "place",
        RANK_PLACES,
    ),
)
# Gauges that are reported as they are; those with a label are reported in changes.
LEVELS = {metric.source for metric in METRICS if metric.kind is Gauge and not metric.labels}


class HybridStats(KVConnectorStats):
    """Counter deltas, gauge values and observations of one step.

    ``data`` holds numbers, strings, lists and dicts only, because it is sent to other
    processes, see :meth:`lmcache_hybrid.core.counts.Ledger.report`.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "HybridStats":
        """Add another rank's, the scheduler's, or a later step's. Mutates ``self``."""
        for name, value in other.data.items():
            mine = self.data.get(name)
            if mine is None or name in LEVELS:
                self.data[name] = value
            elif isinstance(value, dict):
                labels = mine.keys() | value.keys()
                self.data[name] = {each: mine.get(each, 0) + value.get(each, 0) for each in labels}
            else:
                self.data[name] = mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs for an interval."""
        times = self._of("worker.load_seconds", [])
        return {
            "lookups": sum(self._of("scheduler.lookups", {}).values()),
            "hit_tokens": sum(self._of("scheduler.hit_tokens", {}).values()),
            "lost_hit_tokens": self._of("scheduler.lost_tokens", 0),
            "recomputed_requests": self._of("scheduler.failed_loads", 0),
            "loaded_mb": round(self._of("worker.loaded_bytes", 0) / 1e6, 1),
            "mean_load_ms": round(1e3 * fmean(times), 2) if times else 0.0,
            "saved_mb": round(self._of("worker.saved_bytes", 0) / 1e6, 1),
        }

    def _of(self, name: str, default: Any) -> Any:
        return self.data.get(name, default)


def counts_of(stats: KVConnectorStats | None) -> dict[str, Any]:
    """Return the ranks' counts, also from a MultiConnector's statistics."""
    if stats is None or isinstance(stats, HybridStats):
        return {} if stats is None else stats.data
    several = stats.data.values()  # of a MultiConnector
    return next((each.data for each in several if isinstance(each, HybridStats)), {})


class HybridPromMetrics(KVConnectorPromMetrics):
    """Registers METRICS with vLLM's registry and labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {}
        # A backend's name is the user's and may contain commas.
        self._commas = {metric.source: len(metric.labels) - 1 for metric in METRICS}
        for metric in METRICS:
            options: dict[str, Any] = {}
            if metric.kind is Histogram:
                options["buckets"] = list(metric.buckets)
            elif metric.kind is Gauge:
                options["multiprocess_mode"] = "sum" if metric.labels else "mostrecent"
            self._metrics[metric.source] = metric_types[metric.kind](
                name=PREFIX + metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **options,
            )
        for engine in per_engine_labelvalues:
            for metric in METRICS:
                for label in metric.known or ("",):
                    self._child(metric.source, engine, label)

    def _child(self, source: str, engine: int, label: str = "") -> Any:
        values = label.split(",", self._commas[source]) if label else ()
        return self._metrics[source].labels(*self.per_engine_labelvalues[engine], *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for source, value in transfer_stats_data.items():
            if isinstance(value, dict):
                for label, increase in value.items():
                    self._child(source, engine_idx, label).inc(increase)
            elif isinstance(value, list):
                child = self._child(source, engine_idx)
                for seconds in value:
                    child.observe(seconds)
            elif source in LEVELS:
                self._child(source, engine_idx).set(value)
            else:
                self._child(source, engine_idx).inc(value)
