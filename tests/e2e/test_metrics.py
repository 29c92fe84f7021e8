# SPDX-License-Identifier: Apache-2.0
"""What a real engine exports, and that dashboard and alerts ask for nothing else."""

import random
import re
from pathlib import Path

import faults
import pytest
from engine import Engine
from promql import Exported, names, of_alerts, of_dashboard

from lmcache_hybrid.tools.tiny_models import make_model

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


@pytest.mark.engine
def test_a_real_run_exports_what_dashboard_and_alerts_ask_for(model_dir: Path, tmp_path) -> None:
    model = make_model("lfm2", model_dir / "lfm2")
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path}"}

    def records() -> set[Path]:
        return set(tmp_path.glob("*.data"))

    with Engine(model, config) as engine:
        size = engine.info["block_size"]
        prompt, other = two_prompts(size)

        def state_of(ids: list[int]) -> Path:
            """Compute and store a prompt; the file of its first state."""
            before = records()
            assert engine.ask(ids).external == 0
            engine.settle()
            engine.forget()
            return next(file for file in sorted(records() - before) if "%s0-" in file.name)

        damaged, lost = state_of(prompt), state_of(other)
        # A hit, and a prompt that branches off where nobody left a state.
        assert engine.ask(prompt).external == 3 * size
        engine.forget()
        assert engine.ask(prompt[: 2 * size] + other[: size + 1]).external == 0
        # A record that is damaged, one that goes after its lookup, and a prompt too short.
        engine.forget()
        damaged.write_bytes(faults.flipped(damaged.read_bytes()))
        assert engine.ask(prompt).cached == 0
        engine.settle()
        engine.forget()
        assert engine.ask_held(other, lost.unlink).cached == 0
        engine.ask(prompt[: size - 1])

        exported, totals = Exported(engine.exported()), engine.counts()
        metrics, reported = engine.metrics(), engine.log
    problems = {
        title: found
        for title, expressions in (of_dashboard(BOARD) | of_alerts(ALERTS)).items()
        if (found := [each for e in expressions for each in exported.problems(e)])
    }
    assert not problems

    def ours(name: str, **labels: str) -> float:
        return exported.value(OURS + name, **labels)

    # Once more what the tests have seen from outside.
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
    # The same totals as the counts that every other test reads.
    worker = totals["worker"]
    assert ours("saved_bytes_total") == worker["saved_bytes"] > 0
    assert ours("saved_states_total") == worker["saved_states"] > 2
    assert ours("saved_attention_blocks_total") == worker["saved_attention"] > 6
    assert ours("loaded_bytes_total") == worker["loaded_bytes"] > 0
    # vLLM's own counter, which does not know that loads failed, and LMCache's.
    assert metrics["external_prefix_cache_hits"] == 9 * size
    assert exported.value("lmcache:num_lookup_requests_total") == ours("lookups_total")
    assert exported.value("lmcache:num_lookup_hits_total") == 9 * size
    assert exported.value("lmcache:num_retrieve_requests_total") == 3
    assert exported.value("lmcache:num_requested_tokens_total") == 9 * size
    assert exported.value("lmcache:num_hit_tokens_total") == 3 * size
    stored = exported.value("lmcache:num_stored_tokens_total")
    assert stored == worker["saved_attention"] * size
    # One line per request, whatever became of it; warnings for the two that failed.
    assert len(re.findall("INFO.*Reqid: ", reported)) == ours("lookups_total")
    assert len(re.findall("WARNING.*Reqid: ", reported)) == 2


def two_prompts(size: int) -> list[list[int]]:
    """Of three blocks and a bit."""
    rng = random.Random(16)
    return [[rng.randrange(32, 127) for _ in range(3 * size + 40)] for _ in range(2)]
