# SPDX-License-Identifier: Apache-2.0
"""Sessions of streaming input on a real engine: V2 runner and asynchronous scheduling.

vLLM discards the last token of each part but the last; when the next part comes, the step that
computes it is in flight.
"""

import random

import pytest

from tests.e2e.engine import Answer, Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 3
NO_SAVE = {"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}


def make_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def test_parts_are_answered_as_whole_prompts_and_hit_by_others(lfm2):
    with Engine(lfm2, {}, runner="v2") as engine:
        assert engine.info["scheduler"] == "AsyncScheduler"
        size = engine.info["block_size"]
        first, more = make_prompt(size + 5, 1), make_prompt(size + 9, 2)
        parts = engine.call("session", parts=[first, more], max_tokens=TOKENS)
        one, two = (Answer(**part) for part in parts)
        prompt = [*first, *one.tokens[:-1], *more]
        engine.settle()
        engine.forget()
        restored = engine.ask(prompt, TOKENS, **NO_SAVE)
        counts = engine.counts()
    assert restored.external == restored.cached == 2 * size
    assert counts["live"]["tracked"] == counts["live"]["claims"] == counts["live"]["pinned"] == 0
    with Engine(lfm2, runner="v2") as plain:
        assert plain.ask(first, TOKENS).output == one.output
        whole = plain.ask(prompt, TOKENS)
        assert whole.cached == size, "it starts where the session's second part does"
        assert whole.output == two.output
        assert plain.ask(prompt, TOKENS).output == restored.output
