# SPDX-License-Identifier: Apache-2.0
"""Of prompts that arrive together, one computes the prefix that all share."""

import random

import pytest

from tests.e2e.engine import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# No multiple of N: steps have room for a token more, so vLLM asks for those that wait.
STEP = {"max_num_batched_tokens": 2000}
STEPS = 3  # to the end of what is shared


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def test_who_has_waited_answers_as_behind_vllms_own_hit(lfm2):
    """The first one ends where its prefix does: in one step with it the last bits would differ."""
    with Engine(lfm2, **STEP) as plain:
        size = plain.info["block_size"]
        shared = (2 * 2000 // size + 3) * size
        prompts = [text(shared, 0) + text(2 * size + 9, seed) for seed in (1, 2)]
        plain.ask(prompts[0][: shared + 1])
        right = plain.ask(prompts[1])
    assert right.cached == shared
    with Engine(lfm2, {}, **STEP) as engine:
        first = {"prompt_token_ids": prompts[0], "abort": STEPS}
        (answer,) = engine.ask_many([first, prompts[1]])
        counts = engine.counts()["scheduler"]
    assert answer.cached == shared and answer.external == 0
    assert counts["shared_prefills"] == 1 and counts["shared_prefill_tokens"] == shared
    assert answer.output == right.output


@pytest.mark.parametrize("share", [True, False])
def test_three_prompts_that_arrive_together(lfm2, share):
    option = {"kv_connector_extra_config": {"lmcache.hybrid_share_prefills": share}}
    with Engine(lfm2, {}, option, **STEP) as engine:
        engine.rewrites = not share  # each stores the prefix
        size = engine.info["block_size"]
        shared = (2 * 2000 // size + 3) * size
        prompts = [text(shared, 0) + text(2 * size + 9, seed) for seed in (1, 2, 3)]
        answers = engine.ask_many(prompts)
        engine.settle()
        counts, metrics = engine.counts(), engine.metrics()
        own, restored = [engine.ask(prompt) for prompt in prompts], []
        for prompt in prompts:
            engine.forget()
            restored.append(engine.ask(prompt))
    cached = sorted(answer.cached for answer in answers)
    waited = metrics.get("lmcache_hybrid_shared_prefills", 0)
    assert counts["scheduler"]["shared_prefills"] == waited == 2 * share
    assert counts["live"]["claims"] == counts["live"]["pinned"] == 0
    if share:
        assert cached == [0, shared, shared]
    else:
        assert sum(cached) < 2 * shared
    for hit, again in zip(own, restored, strict=True):
        assert hit.external == 0 and again.external == again.cached == hit.cached
        assert again.cached == shared + 2 * size
        assert again.output == hit.output
