# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner with asynchronous scheduling: what a GPU takes by default.

Triton kernels run in Triton's interpreter, so prompts are few and short. What is
compared with what is the same as in test_families.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import faults
import pytest
import v2
from conftest import FAMILIES
from engine import Answer, Engine
from golden import assert_close
from prompts import Case, v2_cases

from lmcache_hybrid.tinymodels import make_model

pytestmark = pytest.mark.engine

TOKENS = 4


def start(model: Path, lmcache: dict | None = None, **options) -> Engine:
    return Engine(model, lmcache, runner="v2", **options)


def check_runner(engine: Engine) -> None:
    """It is V2, and schedules ahead of the forward as on a GPU."""
    assert engine.info["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert engine.info["scheduler"] == "AsyncScheduler"
    assert engine.info["batches_ahead"] == 2


def ask(engine: Engine, ids: tuple[int, ...]) -> Answer:
    return engine.ask(list(ids), TOKENS)


def hit_of(case: Case, size: int) -> int:
    """Tokens of ``case`` in whole blocks of ``size``, without the last token."""
    return (len(case.stored) - 1) // size * size


@dataclass(frozen=True)
class Own:
    """What vLLM answers on this runner from its own prefix cache, by name of case."""

    model: Path
    block_size: int
    cases: list[Case]
    answers: dict[str, Answer]


@pytest.fixture(scope="module", params=FAMILIES)
def own(request: pytest.FixtureRequest, model_dir: Path) -> Own:
    model = make_model(request.param, model_dir / request.param)
    with start(model) as engine:
        check_runner(engine)
        size = engine.info["block_size"]
        own = Own(model, size, v2_cases(size), {})
        for case in own.cases:
            ask(engine, case.stored)
            own.answers[case.name] = ask(engine, case.asked)
            assert own.answers[case.name].cached == hit_of(case, size)
    return own


def check_hits(engine: Engine, own: Own, cases: list[Case]) -> None:
    """Each case hits as deep as in vLLM's own cache, and its answer is the same."""
    before = engine.counts()
    for case in cases:
        engine.forget()
        answer, expected = ask(engine, case.asked), own.answers[case.name]
        assert answer.external == answer.cached == expected.cached, case.name
        assert answer.output == expected.output, case.name
    after = engine.counts()
    hits = [case for case in cases if hit_of(case, own.block_size)]
    assert after["worker"]["loaded_states"] - before["worker"]["loaded_states"] == len(hits) > 0
    assert after["worker"]["failed_loads"] == after["scheduler"]["failed_loads"] == 0
    check_nothing_held(engine)


def check_nothing_held(engine: Engine) -> None:
    """Nothing outlives the requests but vLLM's null block."""
    live = engine.counts()["live"]
    assert live.pop("used_blocks") == 1
    assert not any(live.values()), live


def store_all(engine: Engine, own: Own) -> None:
    for case in own.cases:
        engine.forget()
        assert ask(engine, case.stored).cached == 0, f"{case.name} hit before it was stored"
    engine.settle()
    assert engine.counts()["worker"]["skipped_saves"] == 0


def repeated(own: Own) -> list[Case]:
    """Without those that left a deeper boundary when they were asked."""
    return [case for case in own.cases if case.asked == case.stored]


def test_ram_and_fs_after_a_restart(own: Own, tmp_path: Path) -> None:
    config = {"local_cpu": True, "remote_url": f"fs://localhost:0{tmp_path}"}
    with start(own.model, config) as engine:
        check_runner(engine)
        store_all(engine, own)
        check_hits(engine, own, own.cases)
        assert engine.reads().keys() == {"LocalCPUBackend"}
        engine.settle()
    with start(own.model, config) as engine:
        check_runner(engine)
        check_hits(engine, own, repeated(own))
        assert "RemoteBackend" in engine.reads()
