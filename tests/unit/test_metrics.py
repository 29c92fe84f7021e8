# SPDX-License-Identifier: Apache-2.0
"""Counts, their way through vLLM into ``/metrics``, and LMCache's own metrics."""

import dataclasses
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache.observability import LMCStatsMonitor
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import vllm_patch
from lmcache_hybrid.core.counts import ByLabel, Ledger, SchedulerCounts, WorkerCounts
from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.lmcache_stats import LMCacheMonitor
from lmcache_hybrid.metrics import METRICS, PREFIX, HybridPromMetrics, HybridStats
from lmcache_hybrid.protocol.lookup import LookupRequest, agree
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.storage.rank_lookup import RankLookup
from vllm_patch.connector import LMCacheConnectorV1, UpstreamConnector

from .helpers import PLAN, N, Ranks, engine_config, fill, make_prefix, make_request
from .scheduler_rig import Rig as SchedulerRig
from .scheduler_rig import all_offers, table
from .test_worker import Rig as WorkerRig

vllm_patch.register()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def worker():
    rig = WorkerRig()
    yield rig
    rig.worker.shutdown()


@pytest.fixture
def registry():
    """prometheus_client's own, where vLLM registers; emptied of ours afterwards."""
    before = set(REGISTRY._collector_to_names)
    yield REGISTRY
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def prom(config=None, engines: int = 1) -> KVConnectorProm:
    labels = {index: ["tiny", str(index)] for index in range(engines)}
    return KVConnectorProm(config or engine_config("lfm2"), ["model_name", "engine"], labels)


def value(registry, name: str, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": "0", **labels}
    return registry.get_sample_value(PREFIX + name, labels)


# Counting


def test_a_report_is_what_was_counted_since_the_last_one():
    ledger = Ledger("scheduler", SchedulerCounts())
    assert ledger.report() is None
    with ledger as counts:
        counts.lookups.add("hit", 2)
        counts.lost_tokens += 5
        counts.lookup_seconds.append(0.5)
        counts.loads_in_flight = 3
    assert ledger.report() == {
        "scheduler.lookups": {"hit": 2},
        "scheduler.lost_tokens": 5,
        "scheduler.lookup_seconds": [0.5],
        "scheduler.loads_in_flight": 3,
    }
    assert ledger.report() is None
    with ledger as counts:
        counts.lookups.add("miss")
        counts.loads_in_flight = 1
    assert ledger.report() == {"scheduler.lookups": {"miss": 1}, "scheduler.loads_in_flight": 1}
    assert ledger.counts.lookups == {"hit": 2, "miss": 1}  # totals stay
    assert ledger.counts.lookup_seconds == []


def test_nothing_is_lost_between_threads():
    ledger, seen, times = Ledger("worker", WorkerCounts()), 0, 0

    def count() -> None:
        for _ in range(2000):
            with ledger as counts:
                counts.loaded_bytes += 1
                counts.load_seconds.append(1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or ledger._changed:
        news = ledger.report() or {}
        seen += news.get("worker.loaded_bytes", 0)
        times += len(news.get("worker.load_seconds", ()))
    assert seen == times == 8000


def test_what_a_backend_counts_during_a_report_is_reported_once():
    """Its writers count under a lock of their own."""

    class Busy(ByLabel):
        def items(self):
            self.add("LocalDiskBackend")  # a write fails just now
            return super().items()

    ledger, seen = Ledger("worker", WorkerCounts(failed_writes=Busy())), ByLabel()
    for _ in range(2):
        ledger.counts.failed_writes.add("RemoteBackend")
        with ledger as counts:
            counts.saved_bytes += 1
        for label, times in ledger.report().get("worker.failed_writes", {}).items():
            seen.add(label, times)
    assert seen == ledger.counts.failed_writes


def test_a_step_that_does_nothing_takes_no_lock_and_makes_no_stats(worker):
    rig = SchedulerRig()
    for ledger in (rig.scheduler.ledger, worker.worker.ledger):
        ledger._lock = None  # any use of it raises
    request = make_request(tokens=N - 1)
    for _ in range(3):
        assert rig.scheduler.step(SimpleNamespace(**empty_step(request))) == NOTHING
        worker.worker.start_loads(NOTHING)
        worker.worker.save(NOTHING)
        worker.worker.results(set(), False)
        assert rig.scheduler.ledger.report() is worker.worker.ledger.report() is None


def empty_step(request) -> dict:
    """A decode step of one request."""
    return {
        "kv_connector_block_state": None,
        "num_scheduled_tokens": {request.request_id: 1},
        "total_num_scheduled_tokens": 1,
    }


# What the scheduler side counts


def test_a_hit_counts_its_tokens_by_source():
    request = make_request(tokens=5 * N + 1)
    rig = SchedulerRig().holds(request, 5, 4)
    near = {key for key in rig.ranks.stores[0].records if key.boundary <= 2 * N}
    locate = rig.ranks.stores[0].locate
    rig.ranks.stores[0].locate = lambda keys, deadline: {
        key: "near" if key in near else "far" for key in locate(keys, deadline)
    }
    assert rig.match(request, 0) == (4 * N, True)
    assert rig.match(request, N) == (3 * N, True), "vLLM has found a block of its own since"
    rig.scheduler.allocated(request, table(request), 3 * N)
    counts = rig.scheduler.counts
    assert counts.hits == {"far": 1}
    assert counts.hit_tokens == {"near": N, "far": 2 * N}
    assert (counts.lost_hits, counts.lost_tokens) == (1, N)
    assert counts.loads_in_flight == 1
    rig.loaded(request)
    assert counts.loads_in_flight == counts.failed_loads == 0


@pytest.mark.parametrize(
    "attention, states, computed, outcome, lost",
    [
        (0, (), 0, "miss", 0),
        (3, (), 0, "miss", 3),  # pages without a state
        (3, (2,), 0, "hit", 1),
        (3, (3,), 0, "hit", 0),
        (3, (2,), 2 * N, "miss", 1),
        (3, (), 3 * N, "local", 0),  # vLLM has it all: nothing is lost
        (2, (), 3 * N, "local", 0),
    ],
)
def test_outcomes_and_what_was_lost(attention, states, computed, outcome, lost):
    # Four whole blocks, but the last token is never restored: three at most.
    request = make_request(tokens=4 * N)
    rig = SchedulerRig().holds(request, attention, *states)
    rig.match(request, computed)
    counts = rig.scheduler.counts
    assert counts.lookups == {outcome: 1}
    assert (counts.lost_hits, counts.lost_tokens) == (lost > 0, lost * N)
    assert len(counts.lookup_seconds) == 1 and 0 <= counts.lookup_seconds[0] < 60


def test_pages_past_the_last_token_or_a_load_limit_are_not_lost():
    request = make_request(tokens=4 * N)
    rig = SchedulerRig().holds(request, 4, 3)
    assert rig.match(request) == (3 * N, True)
    assert rig.scheduler.counts.lost_tokens == 0
    rig = SchedulerRig(max_tokens_per_load=2 * N).holds(request, 4, 2)
    assert rig.match(request) == (2 * N, True)
    assert rig.scheduler.counts.lost_tokens == 0


def test_a_rank_without_a_verdict_is_told_from_a_miss():
    rig = SchedulerRig(ranks=2)
    rig.ranks.silent = True
    rig.match(make_request("one"))
    rig.ranks.silent = False
    rig.ranks.stores[1].readable = lambda: False
    rig.match(make_request("two"))
    assert rig.scheduler.counts.lookups == {"unavailable": 2}


def test_a_failed_load_counts_what_it_promised_and_an_aborted_one_does_not():
    one, two = make_request("one"), make_request("two")
    rig = SchedulerRig().holds(one, 3, 3)
    rig.admit(one, N)
    rig.admit(two)
    counts = rig.scheduler.counts
    assert counts.loads_in_flight == 2
    rig.scheduler.finished(two)
    rig.loaded(one, failed=True)
    assert (counts.failed_loads, counts.failed_tokens, counts.loads_in_flight) == (1, 2 * N, 1)
    rig.loaded(two, failed=True)
    assert (counts.failed_loads, counts.failed_tokens, counts.loads_in_flight) == (1, 2 * N, 0)


@pytest.mark.parametrize(
    "reason, request_, options",
    [
        ("short", {"tokens": N - 1}, {}),
        ("read_only", {}, {"save": False}),
        ("priority", {"priority": 5}, {"priority_limit": 4}),
        ("skip_save", {"params": {"lmcache.skip_save": True}}, {}),
        ("uncacheable", {"params": {"lmcache.tag.user": "a@b"}}, {}),
    ],
)
def test_skipped_requests(reason, request_, options):
    rig, request = SchedulerRig(**options), make_request(**request_)
    for _ in range(2):  # once per request
        rig.match(request)
    assert rig.scheduler.counts.skipped_requests == {reason: 1}


def test_offers_that_come_again_are_no_loss():
    request = make_request(tokens=3 * N + 1)
    rig = SchedulerRig()
    rig.match(request)
    rig.forward(request, 3 * N, all_offers(3))
    rig.forward(request, 1, all_offers(3))
    assert not rig.scheduler.counts.dropped_offers


# What the worker side counts


def test_saves_and_loads(worker):
    worker.worker.save(worker.save_metadata())
    worker.run(worker.load(start=1))
    counts = worker.worker.counts
    assert (counts.saved_attention, counts.saved_states) == (3, 1)
    assert (counts.loaded_attention, counts.loaded_states) == (2, 1)
    assert 0 < counts.loaded_bytes < counts.saved_bytes
    assert [len(t) for t in (counts.save_seconds, counts.load_seconds)] == [1, 1]
    assert counts.load_wait_seconds[0] >= 0
    assert not counts.failed_loads and not counts.skipped_saves


def test_why_a_load_failed(worker):
    worker.saved()
    load = worker.load("a")
    worker.lookup.drop("a")
    worker.run(load)  # its records are not pinned any more
    worker.store.fetch = lambda claim, keys: (_ for _ in ()).throw(OSError("no such thing"))
    worker.run(worker.load("b"))
    assert worker.worker.counts.failed_loads == {"unpinned,none": 1, "error,none": 1}
    assert worker.worker.counts.load_seconds == []  # only of those that came


def test_saves_that_store_nothing(worker):
    worker.store.readable = worker.store.writable = lambda: False
    worker.saved()
    worker.store.readable = lambda: True
    worker.saved()
    assert worker.worker.counts.skipped_saves == {"unhealthy": 1, "frozen": 1}


# LMCache's own metrics


@pytest.fixture
def lmcache() -> LMCStatsMonitor:
    return LMCStatsMonitor()


def test_lmcache_counts_what_its_engine_would(worker, lmcache):
    monitor = LMCacheMonitor(lmcache)
    worker.worker._monitor = worker.lookup._monitor = monitor
    worker.saved()
    worker.run(worker.load("good", start=1))
    lost = worker.load("bad")
    worker.store.clear()
    worker.run(lost)
    stats = lmcache.get_stats_and_clear()
    assert (stats.interval_store_requests, stats.interval_stored_tokens) == (1, 3 * N)
    assert (stats.interval_lookup_requests, stats.interval_lookup_tokens) == (2, 6 * N)
    assert stats.interval_lookup_hits == 6 * N
    assert (stats.interval_retrieve_requests, stats.interval_requested_tokens) == (2, 5 * N)
    assert stats.interval_hit_tokens == 2 * N
    for times in (stats.time_to_lookup, stats.time_to_retrieve):
        assert len(times) == 2 and all(0 < seconds < 60 for seconds in times)
    assert len(stats.time_to_store) == 1 and 0 < stats.store_speed[0] < 1e9
    left = (lmcache.lookup_requests, lmcache.retrieve_requests, lmcache.store_requests)
    assert left == ({}, {}, {})  # nothing stays open in LMCache


def test_a_skipped_save_is_not_stored_for_lmcache_either(worker, lmcache):
    worker.worker._monitor = LMCacheMonitor(lmcache)
    worker.store.reserve = lambda size: None
    worker.saved()
    assert lmcache.get_stats_and_clear().interval_store_requests == 0


def test_a_metric_that_fails_fails_nothing_else(worker):
    """LMCache's monitor asserts; an exception in a load would end the worker's step."""

    def broken(*args):
        raise AssertionError("not this one")

    names = [name for name in vars(LMCStatsMonitor) if name.startswith("on_")]
    monitor = LMCacheMonitor(SimpleNamespace(**dict.fromkeys(names, broken)))
    worker.worker._monitor = worker.lookup._monitor = monitor
    worker.saved()
    assert not worker.run(worker.load()).failed_recving
    lost = worker.load("lost")
    worker.store.clear()
    assert worker.run(lost).failed_recving == {"lost"}
    counts = worker.worker.counts
    assert (counts.saved_states, counts.loaded_states) == (1, 1) and not counts.skipped_saves
    worker.assert_clean()


def test_further_rounds_of_a_lookup_and_drops_are_not_lookups(lmcache):
    """Ranks that hold different boundaries are asked again."""
    ranks, prefix = Ranks(2), make_prefix(6)
    ranks.lookups[0] = RankLookup(PLAN, ranks.stores[0], LMCacheMonitor(lmcache))
    fill(ranks.stores[0], prefix, 6, (2, 6))
    fill(ranks.stores[1], prefix, 6, (2,))
    assert agree(ranks.ask, LookupRequest("r", prefix, 6, 0)).boundary == 2
    assert len(ranks.questions) == 2
    ranks.lookups[0].answer(LookupRequest("r", prefix, 0, 0))
    ranks.stores[0].readable = lambda: False  # LMCache does not count those either
    ranks.lookups[0].answer(LookupRequest("r", prefix, 6, 0))
    stats = lmcache.get_stats_and_clear()
    assert (stats.interval_lookup_requests, stats.interval_lookup_hits) == (1, 6 * N)


# Through vLLM


def fields_of(side: str, counts: type) -> set[str]:
    return {f"{side}.{field.name}" for field in dataclasses.fields(counts)}


def test_every_count_is_a_metric_and_the_other_way_round():
    sources = [metric.source for metric in METRICS]
    assert len(set(sources)) == len(sources)
    assert set(sources) == fields_of("scheduler", SchedulerCounts) | fields_of(
        "worker", WorkerCounts
    )
    for metric in METRICS:
        counts = {"scheduler": SchedulerCounts, "worker": WorkerCounts}
        side, name = metric.source.split(".")
        default = getattr(counts[side](), name)
        expected = Histogram if isinstance(default, list) else Counter
        assert metric.kind is (Gauge if metric.source == "scheduler.loads_in_flight" else expected)
        assert bool(metric.labels) == isinstance(default, dict), metric.name


def test_every_reason_that_can_be_counted_exists_from_the_start():
    """A counter that appears with its first event shows no increase."""
    known = {metric.name: set(metric.known) for metric in METRICS}
    files = (f for f in ROOT.glob("lmcache_hybrid/**/*.py") if "tools" not in f.parts)
    code = "\n".join(file.read_text() for file in files)
    offers = set(re.findall(r'drop_offers\("(\w+)"', code))
    assert len(offers) == 3 and offers == known["dropped_offers"]
    assert RecordError("checksum", "").kind == LoadError("").kind == "none"
    words = set(re.findall(r'LoadError\(\s*f?"[^"]*"(?:\s*f"[^"]*")*,\s*"(\w+)"', code))
    assert words >= {"unpinned", "length", "unhealthy", "unreachable"}
    words |= set(re.findall(r'RecordError\("(\w+)"', code)) | {"gone", "unreadable", "no_room"}
    assert words | {"error"} == {label.split(",")[0] for label in known["failed_loads"]}


def test_sums_over_ranks_the_scheduler_and_steps():
    """As vLLM does it: ranks first, then the scheduler's, then what was logged since."""
    outputs = []
    for seconds in (0.5, 0.25):
        stats = HybridStats(
            {"worker.saved_bytes": 10, "worker.failed_loads": {"gone,state": 1}}
            | {"worker.load_seconds": [seconds]}
        )
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
        outputs.append(output)
    total = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_stats
    total = total.aggregate(
        HybridStats({"scheduler.loads_in_flight": 2, "scheduler.lookups": {"hit": 1}})
    )
    step = {
        "worker.saved_bytes": 20,
        "worker.failed_loads": {"gone,state": 2},
        "worker.load_seconds": [0.5, 0.25],
        "scheduler.loads_in_flight": 2,
        "scheduler.lookups": {"hit": 1},
    }
    assert total.data == step
    later = HybridStats({"scheduler.loads_in_flight": 0, "scheduler.lookups": {"miss": 3}})
    summed = LMCacheConnectorV1.build_kv_connector_stats(step).aggregate(later)
    assert summed.data["scheduler.loads_in_flight"] == 0
    assert summed.data["scheduler.lookups"] == {"hit": 1, "miss": 3}
    assert step["scheduler.lookups"] == {"hit": 1}, "another logger's interval was changed"
    assert summed.reduce()["lookups"] == 4 and summed.reduce()["mean_load_ms"] == 375.0


def test_stats_survive_the_way_to_the_api_server(worker):
    worker.saved()
    worker.run(worker.load())
    data = HybridStats(worker.worker.ledger.report()).to_dict()
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=data))
    frames = MsgpackEncoder().encode(sent)
    received = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert received.scheduler_stats.kv_connector_stats == data
    assert data["worker.loaded_states"] == 1


def test_they_appear_in_vllms_registry(registry):
    shown = prom(engines=2)
    assert isinstance(shown.prom_metrics, HybridPromMetrics)
    assert value(registry, "failed_loads_total", reason="checksum", record="state") == 0
    assert value(registry, "hit_tokens_total", source="RemoteBackend", engine="1") == 0
    for _ in range(2):
        shown.observe(
            {
                "scheduler.hit_tokens": {"RemoteBackend": 10, "RemoteBackend.a,b": 1},
                "scheduler.loads_in_flight": 4,
                "worker.saved_bytes": 7,
                "worker.failed_loads": {"checksum,state": 1},
                "worker.load_seconds": [0.004, 40.0],
            },
            1,
        )
    one = {"engine": "1"}
    assert value(registry, "hit_tokens_total", source="RemoteBackend", **one) == 20
    assert value(registry, "hit_tokens_total", source="RemoteBackend.a,b", **one) == 2
    assert value(registry, "loads_in_flight", **one) == 4
    assert value(registry, "saved_bytes_total", **one) == 14
    assert value(registry, "saved_bytes_total") == 0
    assert value(registry, "failed_loads_total", reason="checksum", record="state", **one) == 2
    assert value(registry, "load_seconds_count", **one) == 4
    assert value(registry, "load_seconds_bucket", le="0.005", **one) == 2
    assert b'engine="1"' in generate_latest(registry)


def test_models_without_states_keep_lmcaches_own_adapter(registry):
    config = engine_config("llama")
    assert prom(config).prom_metrics is None
    assert not [name for name in registry._names_to_collectors if name.startswith(PREFIX)]
    connector = object.__new__(LMCacheConnectorV1)
    connector._hybrid = None
    assert connector.get_kv_connector_stats() is None
    assert LMCacheConnectorV1.build_kv_connector_stats() is None
    assert UpstreamConnector.build_kv_connector_stats({}) is None


def test_vllm_logs_one_line_per_interval():
    lines = []
    logging = KVConnectorLogging(engine_config("lfm2").kv_transfer_config)
    logging.observe({"scheduler.lookups": {"miss": 2}})
    logging.observe({"worker.saved_bytes": 3_000_000})
    for _ in range(2):
        logging.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1, "an interval in which nothing happened has no line"
    assert "lookups=2, hit_tokens=0, lost_hit_tokens=0" in lines[0] and "saved_mb=3.0" in lines[0]


def test_the_docs_name_every_metric_and_no_other():
    documented = set(re.findall(rf"`{PREFIX}(\w+)", (ROOT / "docs" / "metrics.md").read_text()))
    names = {m.name + ("_total" if m.kind is Counter else "") for m in METRICS}
    assert documented == names


# The log


def test_one_line_per_request_at_most(hybrid_log):
    """Looked up again after a preemption, and loaded on every rank: still one line."""
    request = make_request()
    rig = SchedulerRig().holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request)
    request.num_computed_tokens = 0
    rig.match(request)
    assert rig.scheduler.counts.lookups == {"hit": 2}
    worker = WorkerRig()
    worker.saved().run(worker.load())
    worker.worker.shutdown()
    (line,) = [r.getMessage() for r in hybrid_log.records if r.levelname != "DEBUG"]
    assert line == (
        f"Reqid: r, Total tokens {3 * N + 1}, Inference Engine computed tokens: 0, "
        f"LMCache hit tokens: {3 * N}, need to load: {3 * N}"
    )
