# SPDX-License-Identifier: Apache-2.0
"""A request that must compute its whole prompt stores what is missing, and nothing twice."""

import random
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Engine

# tests/unit/test_admission.py covers the promise in `make test`.
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_prompt_log_probabilities_store_a_prompt_once(model_dir: Path) -> None:
    rng = random.Random(0)
    ids = [rng.randrange(32, 127) for _ in range(3000)]  # more than a step
    with Engine(make_model("lfm2", model_dir / "lfm2"), {"local_cpu": True}) as engine:

        def ask(**sampling) -> tuple[int, int, tuple]:
            """(pages saved, tokens loaded, answer) of the prompt, behind nothing of vLLM's own.

            A state is saved only where none was: none of these bytes was held before.
            """
            engine.forget()
            before = engine.counts()["worker"]["saved_attention"]
            answer = engine.ask(ids, **sampling)
            engine.settle()
            assert engine.call("rewritten") == {}
            return (
                engine.counts()["worker"]["saved_attention"] - before,
                answer.external,
                answer.output,
            )

        saved, loaded, first = ask(prompt_logprobs=1)
        assert saved > 0 == loaded
        saved, loaded, (tokens, _) = ask(prompt_logprobs=1)
        assert (saved, loaded, tokens) == (0, 0, first[0])
        # What it stored is a hit for others.
        saved, loaded, second = ask()
        assert (saved, second) == (0, first) and loaded > 2800
