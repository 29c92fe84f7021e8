# SPDX-License-Identifier: Apache-2.0
"""The way of counts through vLLM into ``/metrics``, and the line that a request logs."""

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import vllm_patch
from lmcache_hybrid.core.counts import SchedulerCounts, WorkerCounts
from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.metrics import METRICS, PREFIX, HybridPromMetrics, HybridStats
from vllm_patch.connector import LMCacheConnectorV1, UpstreamConnector

from .helpers import N, engine_config, make_request
from .scheduler_rig import Rig as SchedulerRig
from .scheduler_rig import table

vllm_patch.register()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry():
    """prometheus_client's registry, which vLLM uses; our metrics leave it afterwards."""
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
        gauges = ("scheduler.loads_in_flight", "worker.kept_bytes")
        assert metric.kind is (Gauge if metric.source in gauges else expected)
        assert bool(metric.labels) == isinstance(default, dict), metric.name


def test_every_reason_that_can_be_counted_exists_from_the_start():
    """A counter that appears with its first event shows no increase."""
    known = {metric.name: set(metric.known) for metric in METRICS}
    files = (f for f in ROOT.glob("lmcache_hybrid/**/*.py") if "tools" not in f.parts)
    code = "\n".join(file.read_text() for file in files)
    offers = set(re.findall(r'drop_offers\("(\w+)"', code))
    assert len(offers) == 6 and offers == known["dropped_offers"]
    assert RecordError("checksum", "").kind == LoadError("").kind == "none"
    words = set(
        re.findall(r'(?:LoadError|__init__)\(\s*f?"[^"]*"(?:\s*f"[^"]*")*,\s*"(\w+)"', code)
    )
    assert words >= {"unpinned", "length", "unhealthy", "unreachable"}
    words |= set(re.findall(r'RecordError\("(\w+)"', code)) | {"gone", "unreadable", "no_room"}
    assert words | {"error"} == {label.split(",")[0] for label in known["failed_loads"]}
    counted = r'caught\(\s*"(\w+)"[^)]*ledger\)|@guarded\([^@]*?\)\n    def (\w+)'
    places = {"".join(found) for found in re.findall(counted, code)}
    assert places == known["scheduler_errors"] | known["rank_errors"]


def test_stats_add_up_over_ranks_the_scheduler_and_steps():
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


def test_metrics_appear_in_vllms_registry(registry):
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


def test_a_request_is_logged_once(worker, hybrid_log):
    """Looked up again after a preemption, and loaded on every rank: still one line."""
    request = make_request()
    rig = SchedulerRig().holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request)
    request.num_computed_tokens = 0
    rig.match(request)
    rig.step()
    assert rig.scheduler.counts.lookups == {"hit": 2}
    worker.saved().run(worker.load())
    (line,) = [r.getMessage() for r in hybrid_log.records if r.levelname != "DEBUG"]
    assert line == (
        f"Reqid: r, Total tokens {3 * N + 1}, Inference Engine computed tokens: 0, "
        f"LMCache hit tokens: {3 * N}, need to load: {3 * N}"
    )


def test_a_promise_that_vllm_leaves_alone_is_no_load(hybrid_log):
    """It has a part of a block itself, or no experts of these tokens."""
    request = make_request()
    rig = SchedulerRig().holds(request, 3, 3)
    assert rig.match(request)[0] == 3 * N
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    rig.step()
    (line,) = [r.getMessage() for r in hybrid_log.records if r.levelname != "DEBUG"]
    assert line.endswith(f"LMCache hit tokens: {3 * N}, need to load: 0")
