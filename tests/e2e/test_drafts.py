# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on vLLM's GPU kernels, which Triton interprets.

vLLM alone answers the same with drafts as without; behind a restored prefix it accepts as
many of them as behind its own hit.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import drafting
import pytest
from engine import Answer, Engine

pytestmark = pytest.mark.engine

TOKENS = 24
COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
KINDS = {"ngram": drafting.NGRAM, "mtp": drafting.MTP}


@dataclass(frozen=True)
class Drafted:
    """An answer, and its drafts by vLLM's own counters."""

    answer: Answer
    made: float
    accepted: float

    @property
    def same(self) -> tuple:
        """What must not depend on where the prefix came from."""
        return self.answer.output, self.made, self.accepted


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return drafting.make_drafting_model(model_dir)


@pytest.fixture(scope="module")
def without(model: Path) -> tuple[list[int], list[int]]:
    """A prompt past a boundary, and what vLLM answers without drafts and connector."""
    with start(model) as engine:
        rng = random.Random(5)
        prompt = [rng.randrange(32, 127) for _ in range(engine.info["block_size"] + 30)]
        return prompt, engine.ask(prompt, TOKENS).tokens


def start(model: Path, lmcache: dict | None = None, **options) -> Engine:
    options = {**drafting.OPTIONS, **options}
    return Engine(model, lmcache, runner="v2", prepare=drafting.prepare, **options)


def ask(engine: Engine, prompt: list[int]) -> Drafted:
    before = engine.metrics()
    answer = engine.ask(prompt, TOKENS)
    after = engine.metrics()
    return Drafted(answer, *(after[name] - before.get(name, 0) for name in COUNTERS))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_a_restored_prefix(kind: str, model: Path, without: tuple) -> None:
    prompt, tokens = without
    with start(model, {"local_cpu": True}, speculative_config=KINDS[kind]) as engine:
        assert engine.info["runner"] == "vllm.v1.worker.gpu.model_runner"
        assert engine.info["scheduler"] == "AsyncScheduler"
        size = engine.info["block_size"]
        cold = ask(engine, prompt)
        assert cold.answer.cached == 0 and cold.answer.tokens == tokens
        assert 0 < cold.accepted < cold.made
        own = ask(engine, prompt)
        # With MTP vLLM gives up the last block of its own hits.
        assert own.answer.cached == (0 if kind == "mtp" else size)
        engine.settle()
        engine.forget()
        restored = ask(engine, prompt)
        assert restored.answer.external == restored.answer.cached == size
        assert restored.same == own.same == cold.same
        counts = engine.counts()
        assert counts["worker"]["loaded_states"] == 1
        assert counts["worker"]["failed_loads"] == counts["scheduler"]["failed_loads"] == 0
        # And with states lost the answer is another one: the test can see them.
        engine.call("fault", name="lose_states")
        engine.forget()
        lost = ask(engine, prompt)
        assert lost.answer.external == size and lost.answer.output != own.answer.output
