# SPDX-License-Identifier: Apache-2.0
"""Shows the counts of both sides in vLLM's ``/metrics``, as ``vllm:lmcache_hybrid_*``.

In each step vLLM collects a :class:`HybridStats` from every rank and from the scheduler, adds
them up, and hands the sum to :class:`HybridPromMetrics` in the process that serves
``/metrics``. So workers' counts are sums over ranks; the scheduler's exist once per engine.
docs/metrics.md explains each metric.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from statistics import fmean
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_hybrid.core.counts import SchedulerCounts, WorkerCounts

PREFIX = "vllm:lmcache_hybrid_"


@dataclass(frozen=True)
class Metric:
    """One metric and the count it shows.

    Attributes:
        source: ``side.count``, see :mod:`lmcache_hybrid.core.counts`.
        kind: prometheus_client's class.
        name: without PREFIX, and without the ``_total`` of counters.
        help: one sentence.
        labels: names beyond vLLM's own (model_name, engine).
        known: label values that exist from the start, several joined with commas, so
            that the first event is an increase and not a new series.
        buckets: of a histogram, in seconds.
        level: whether it is a gauge.
    """

    source: str
    kind: type
    name: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    level: bool = False


def _metric(side: str, count: Field) -> Metric:
    told: dict[str, Any] = {"name": count.name} | count.metadata
    told.pop("after", None)
    kind = Histogram if "buckets" in told else Gauge if "level" in told else Counter
    return Metric(f"{side}.{count.name}", kind, **told)


def _metrics() -> Iterator[Metric]:
    """Yield the scheduler's, and behind each those of ranks that follow it."""
    followers, after = defaultdict(list), ""
    for count in fields(WorkerCounts):
        after = count.metadata.get("after", after)
        followers[after].append(_metric("worker", count))
    for count in fields(SchedulerCounts):
        yield _metric("scheduler", count)
        yield from followers[count.name]


METRICS = tuple(_metrics())
# Gauges that are reported as they are; those with a label are reported in changes.
LEVELS = {metric.source for metric in METRICS if metric.level and not metric.labels}


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
