# SPDX-License-Identifier: Apache-2.0
"""The answers that a vLLM without LMCache gives."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.engine import Answer, Engine
from tests.e2e.prompts import Case, cases
from tests.e2e.short_models import make_short_model

FAMILIES = ("qwen3_next", "granite4", "lfm2", "falcon_h1")


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
    model = make_short_model(family, model_dir)
    with Engine(model, **options) as engine:
        size = engine.info["block_size"]
        golden = Golden(family, model, size, engine.info["groups"], cases(size))
        for case in golden.cases:
            engine.forget()
            golden.cold[case.name] = engine.ask(list(case.asked))
            if case.stored != case.asked:
                engine.forget()
                engine.ask(list(case.stored))
            golden.warm[case.name] = engine.ask(list(case.asked))
    return golden


def assert_close(one: Answer, other: Answer, name: str) -> None:
    """The same answer to a prompt that was alone and to one in a batch.

    In a batch chunks are cut elsewhere, and vLLM alone, without any connector, then
    differs by up to 0.056 from one prompt at a time (measured with the prompts of
    test_many_at_once; bfloat16). So 0.1 is allowed, and tokens are compared up to the
    first step whose two best are closer than that.
    """
    for step, token in enumerate(one.tokens):
        best, second = sorted(one.logprobs[step].values())[-1:-3:-1]
        if best - second < 0.1:
            break
        assert other.tokens[step] == token, name
        assert abs(other.logprobs[step][str(token)] - best) < 0.1, name
