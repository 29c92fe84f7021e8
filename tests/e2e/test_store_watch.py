# SPDX-License-Identifier: Apache-2.0
"""A real engine says where records are kept, and why nothing is stored or hit."""

import random
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.blocks import block_size
from tests.e2e.engine import Engine

# tests/unit/test_store_watch.py covers it in `make test`.
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def hurry() -> None:
    """Warn earlier than after minutes of prompts."""
    from lmcache_hybrid.scheduler import store_watch

    store_watch.PROMPTS, store_watch.LOOKUPS, store_watch.SETTLE_SECONDS = 20, 20, 0.0


def test_an_engine_says_what_stops_it_and_when_that_is_over(model_dir: Path) -> None:
    rng = random.Random(0)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[rng.randrange(32, 127) for _ in range(tokens)] for _ in range(count)]

    model = make_model("lfm2", model_dir / "lfm2")
    size = block_size(model)
    with Engine(model, {"local_cpu": True}, prepare=hurry) as engine:
        assert "LMCache keeps records in RAM (about " in engine.log
        assert f"Prompts longer than {size} tokens hit, at multiples of {size}." in engine.log
        for each in prompts(20, size - 1):
            engine.ask(each, max_tokens=1)
        assert "LMCache has stored nothing of the last 20 prompts" in engine.log
        assert f"20 are too short, a prompt hits from {size + 1} tokens on" in engine.log
        assert "LMCache stores prompts again." not in engine.log
        (first,) = prompts(1, 3 * size + 4)
        engine.ask(first)
        engine.settle()
        engine.ask_many(prompts(20, size + 1), max_tokens=1)
        engine.settle()
        assert "LMCache stores prompts again." in engine.log
        assert "none of the last 20 lookups led to a load" in engine.log
        assert "of 20 nothing was found" in engine.log
        engine.forget()
        assert engine.ask(first).external == 3 * size
        assert "LMCache serves hits again." in engine.log
        assert engine.log.count("See docs/troubleshooting.md, 'No hits at all'.") == 2
