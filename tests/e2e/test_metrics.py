# SPDX-License-Identifier: Apache-2.0
"""What a real engine exports, and that dashboard and alerts ask for nothing else."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import records
from tests.e2e.engine import Engine
from tests.e2e.promql import Exported, names, of_alerts, of_dashboard

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "examples" / "observability" / "dashboard.json"
ALERTS = ROOT / "examples" / "observability" / "alerts.yaml"
OURS = "vllm:lmcache_hybrid_"
SAMPLE = 'one_total{engine="0",reason="gone"} 1\ntwo{engine="0"} 2\n'


@pytest.mark.parametrize(
    "expression, problems",
    [
        ('sum by (engine) (rate(one_total{reason="gone"}[5m])) > 0', []),
        ("one_total / clamp_min(two, 1e-9)", []),
        ("rate(one[$__rate_interval])", ["no metric one"]),
        ('one_total{reason="went"}', ["no one_total with reason=went"]),
        ('one_total{reason!="went"}', ["no one_total with reason=went"]),
        ('one_total{reason=~"gone|went"}', ["no one_total with reason=went"]),
        ('one_total{engine=~"$engine"}', []),
        ('one_total{rank=~"$rank"}', ["no one_total with rank=$rank"]),
        ('one_total{cause="gone"}', ["no one_total with cause=gone"]),
        ("sum by (engine, rank) (two)", ["no label rank"]),
        ("sum by (reason) (two)", ["no label reason"]),
        ("sum without (rank) (two)", ["no label rank"]),
        ("one_total / ignoring (reason) group_left () two", []),
        ("one_total / ignoring (cause) group_left () two", ["no label cause"]),
        ('sum by (namespace, pod, instance) (two{instance=~"$instance"})', []),
        ("up == 1 unless on (job, instance) two", []),
        ("up == 1 unless on (job, rank) two", ["no label rank"]),
        ("two and three", ["no metric three"]),
    ],
)
def test_the_check_finds_what_is_not_exported(expression: str, problems: list[str]) -> None:
    assert Exported(SAMPLE).problems(expression) == problems


@pytest.mark.parametrize("expression", ["1 > 0", "", "sum(rate([5m]))", "total(two)"])
def test_the_check_does_not_pass_what_it_cannot_read(expression: str) -> None:
    with pytest.raises(ValueError):
        names(expression)


def test_every_panel_and_alert_is_read() -> None:
    board, alerts = of_dashboard(BOARD), of_alerts(ALERTS)
    assert len(board) > 20 and all(board.values()) and len(alerts) > 5


def test_panels_follow_the_variables_and_alerts_keep_the_replica() -> None:
    """``sum`` alone, or by some labels, would make one alert of all replicas."""
    for title, expressions in of_dashboard(BOARD).items():
        for selector in (each for e in expressions for each in names(e).selectors):
            values = {value for _, _, value in selector[1]}
            is_variable = title in ("model", "instance", "engine")
            assert is_variable or {"$model", "$instance"} <= values, (title, selector)
    for alert, (expression,) in of_alerts(ALERTS).items():
        assert names(expression).selectors  # of functions known, which delta() is not
        assert not re.search(r"\b(sum|min|max|count)\b(?! without \()", expression), alert


@dataclass(frozen=True)
class Run:
    """A run of one engine: three hits of which two loads fail, two misses more, one short prompt.

    Attributes:
        size: N, tokens per block; hits are of three blocks.
        exported: all metrics at its end.
        worker: counts of the worker side.
        vllm: vLLM's own counters.
        log: what the engine logged.
    """

    size: int
    exported: Exported
    worker: dict[str, int]
    vllm: dict[str, float]
    log: str

    def ours(self, name: str, **labels: str) -> float:
        return self.exported.value(OURS + name, **labels)


@pytest.fixture(scope="module")
def run(lfm2: Path, tmp_path_factory) -> Run:
    """What the engine did is known from outside, so that each count can be checked."""
    folder = tmp_path_factory.mktemp("records")
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{folder}"}
    with Engine(lfm2, config) as engine:
        size = engine.info["block_size"]
        prompt, other = two_prompts(size)

        def state_of(ids: list[int]) -> Path:
            """Compute and store a prompt; the file of its first state."""
            before = set(folder.glob("*.data"))
            assert engine.ask(ids).external == 0
            engine.settle()
            engine.forget()
            new = sorted({*folder.glob("*.data")} - before)
            return next(file for file in new if "%s0-" in file.name)

        damaged, lost = state_of(prompt), state_of(other)
        # A hit, and a prompt that branches off where nobody left a state.
        assert engine.ask(prompt).external == 3 * size
        engine.forget()
        assert engine.ask(prompt[: 2 * size] + other[: size + 1]).external == 0
        # A record that is damaged, one that goes after its lookup, and a prompt too short.
        engine.forget()
        damaged.write_bytes(records.flipped(damaged.read_bytes()))
        assert engine.ask(prompt).cached == 0
        engine.settle()
        engine.forget()
        assert engine.ask_held(other, lost.unlink).cached == 0
        engine.ask(prompt[: size - 1])
        exported, worker = Exported(engine.exported()), engine.counts()["worker"]
        return Run(size, exported, worker, engine.metrics(), engine.log)


@pytest.mark.engine
def test_a_real_run_exports_what_dashboard_and_alerts_ask_for(run: Run) -> None:
    problems = {
        title: found
        for title, expressions in (of_dashboard(BOARD) | of_alerts(ALERTS)).items()
        if (found := [each for e in expressions for each in run.exported.problems(e)])
    }
    assert not problems


@pytest.mark.engine
def test_exported_lookups_and_loads_are_those_that_were_made(run: Run) -> None:
    ours, size = run.ours, run.size
    assert ours("lookups_total", outcome="hit") == ours("hits_total", source="RemoteBackend") == 3
    assert ours("hit_tokens_total", source="RemoteBackend") == 9 * size
    assert ours("hits_total") == 3 and ours("hit_tokens_total") == 9 * size
    assert ours("lookups_total", outcome="miss") == 3
    assert ours("lost_hits_total") == 1 and ours("lost_hit_tokens_total") == 2 * size
    assert ours("failed_loads_total", reason="checksum", record="state") == 1
    assert ours("failed_loads_total", reason="gone", record="state") == 1
    assert ours("failed_loads_total") == ours("recomputed_requests_total") == 2
    assert ours("recomputed_tokens_total") == 6 * size
    assert ours("loaded_states_total") == 1 and ours("loaded_attention_blocks_total") == 3
    assert ours("load_seconds_count") == ours("load_wait_seconds_count") == 1
    assert ours("lookup_seconds_count") == ours("lookups_total")
    assert ours("skipped_requests_total", reason="short") == ours("skipped_requests_total") == 1
    assert ours("loads_in_flight") == 0 == ours("dropped_offers_total")


@pytest.mark.engine
def test_exported_bytes_and_records_are_those_that_the_worker_counts(run: Run) -> None:
    assert run.ours("saved_bytes_total") == run.worker["saved_bytes"] > 0
    assert run.ours("saved_states_total") == run.worker["saved_states"] > 2
    assert run.ours("saved_attention_blocks_total") == run.worker["saved_attention"] > 6
    assert run.ours("loaded_bytes_total") == run.worker["loaded_bytes"] > 0


@pytest.mark.engine
def test_counters_of_vllm_and_lmcache_tell_the_same_run(run: Run) -> None:
    """vLLM's does not know that loads failed."""
    size, value = run.size, run.exported.value
    assert run.vllm["external_prefix_cache_hits"] == 9 * size
    assert value("lmcache:num_lookup_requests_total") == run.ours("lookups_total")
    assert value("lmcache:num_lookup_hits_total") == 9 * size
    assert value("lmcache:num_retrieve_requests_total") == 3
    assert value("lmcache:num_requested_tokens_total") == 9 * size
    assert value("lmcache:num_hit_tokens_total") == 3 * size
    assert value("lmcache:num_stored_tokens_total") == run.worker["saved_attention"] * size


@pytest.mark.engine
def test_each_request_is_logged_once_and_each_failed_load_warned_of_once(run: Run) -> None:
    assert len(re.findall("INFO.*Reqid: ", run.log)) == run.ours("lookups_total")
    assert len(re.findall("WARNING.*Reqid: ", run.log)) == 2


def two_prompts(size: int) -> list[list[int]]:
    """Two prompts of three blocks and a bit each."""
    rng = random.Random(16)
    return [[rng.randrange(32, 127) for _ in range(3 * size + 40)] for _ in range(2)]
