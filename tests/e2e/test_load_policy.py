# SPDX-License-Identifier: Apache-2.0
"""``lmcache.hybrid_load_policy`` on a Redis behind a link that is too slow, and then is not."""

import random
from urllib.parse import urlsplit

import pytest

from tests.e2e.engine import Engine
from tests.e2e.narrow import narrow_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = 6
FASTER = {"kv_connector_extra_config": {"lmcache.hybrid_load_policy": "faster"}}


def make_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def ask_all(engine: Engine, prompts: list[list[int]]) -> list:
    answers = []
    for ids in prompts:
        engine.forget()
        answers.append(engine.ask(ids))
    return answers


def test_hits_behind_a_slow_link_are_computed(lfm2, redis_url):
    port = urlsplit(redis_url).port
    # What a load that was given up leaves on the link, four pieces of 16 KiB, passes in less than
    # a lookup waits.
    with narrow_port(port, 1e5) as slow, Engine(lfm2) as plain:
        config = {"local_cpu": False, "remote_url": f"redis://127.0.0.1:{slow}"}
        config["blocking_timeout_secs"] = 60
        with Engine(lfm2, config, FASTER) as engine:
            size = engine.info["block_size"]
            prompts = [make_prompt(3 * size + 7, seed) for seed in range(PROMPTS)]
            meant = ask_all(plain, prompts)
            stored = []
            for _ in range(2):
                answers = ask_all(engine, prompts)
                engine.settle(120)
                stored.append(engine.counts()["worker"]["saved_attention"])
                for answer, right in zip(answers, meant, strict=True):
                    assert answer.tokens == right.tokens
            counts, first = engine.counts(), ask_all(engine, prompts[:1])[0]
    assert first.external == 0
    # The first try of the backend is given up early; it says what the others would take.
    assert counts["scheduler"]["hits"] == counts["scheduler"]["failed_loads"] == 1
    assert counts["worker"]["failed_loads"] == 1
    assert stored[0] == stored[1] > 0, "what came too late is stored again"
    assert counts["scheduler"]["skipped_loads"] == PROMPTS - 1
    assert counts["live"]["claims"] == counts["live"]["pinned"] == 0


def test_hits_behind_a_fast_link_are_loaded(lfm2, redis_url):
    config = {"local_cpu": False, "remote_url": redis_url}
    with Engine(lfm2, config, FASTER) as engine:
        size = engine.info["block_size"]
        prompts = [make_prompt(12 * size + 7, seed) for seed in range(PROMPTS)]
        ask_all(engine, prompts)
        engine.settle()
        again = ask_all(engine, prompts)
        counts = engine.counts()
    assert again[0].external == 12 * size
    # Whether a tiny model computes faster than Redis answers is the machine's business.
    assert counts["scheduler"]["hits"] + counts["scheduler"]["skipped_loads"] == PROMPTS
