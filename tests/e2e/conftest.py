# SPDX-License-Identifier: Apache-2.0
"""Engines and the answers that a vLLM without LMCache gives."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine import Answer, Engine  # noqa: E402
from prompts import Case, cases  # noqa: E402

FAMILIES = ("qwen3_next", "granite4", "falcon_h1", "lfm2")


@dataclass
class Golden:
    """What vLLM answers by itself.

    Attributes:
        cold: with nothing cached.
        warm: after ``case.stored``, from vLLM's own prefix cache. Its prefill splits
            where ours does after a load, so ours must equal it to the last bit.
    """

    family: str
    model: Path
    block_size: int
    groups: list[str]
    cases: list[Case]
    cold: dict[str, Answer] = field(default_factory=dict)
    warm: dict[str, Answer] = field(default_factory=dict)


def record_golden(family: str, model_dir: Path, **options) -> Golden:
    from lmcache_hybrid.tinymodels import make_model

    model = make_model(family, model_dir / family)
    with Engine(model, **options) as engine:
        size = engine.info["block_size"]
        golden = Golden(family, model, size, engine.info["groups"], cases(size))
        for case in golden.cases:
            engine.forget()
            golden.cold[case.name] = engine.ask(list(case.asked))
            engine.forget()
            engine.ask(list(case.stored))
            golden.warm[case.name] = engine.ask(list(case.asked))
    return golden


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=pytest.mark.xdist_group(f)) for f in FAMILIES],
)
def golden(request: pytest.FixtureRequest, model_dir: Path) -> Golden:
    return record_golden(request.param, model_dir)
