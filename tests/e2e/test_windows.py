# SPDX-License-Identifier: Apache-2.0
"""Window attention beside full attention (Gemma-3), with vLLM's hybrid KV cache manager on."""

import pytest

from tests.e2e.engine import Engine
from tests.e2e.golden import Golden, record_golden

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# What a user writes to have such a model served here.
HMA = {"disable_hybrid_kv_cache_manager": False}


@pytest.fixture(scope="module")
def gemma(model_dir) -> Golden:
    return record_golden("gemma3", model_dir, **HMA)


def check(engine: Engine, golden: Golden, again: bool = False) -> None:
    """Every prompt is a hit as deep as vLLM's own, with the same answer to the last bit.

    ``again``: by then the extended prompts have left deeper boundaries themselves.
    """
    kinds, size = engine.info["groups"], engine.info["group_bytes"]
    for case in golden.cases:
        if again and case.asked != case.stored:
            continue
        engine.forget()
        before = engine.counts()["worker"]
        answer = engine.ask(list(case.asked))
        after = engine.counts()["worker"]
        warm = golden.warm[case.name]
        assert answer.external == answer.cached == warm.cached > 0, case.name
        assert answer.output == warm.output, case.name
        # The window of 128 tokens is one block.
        blocks = answer.external // golden.block_size
        assert after["loaded_bytes"] - before["loaded_bytes"] == sum(
            bytes_ * (blocks if kind == "FullAttentionSpec" else 1)
            for kind, bytes_ in zip(kinds, size)
        )
    live = engine.counts()["live"]
    assert live["tracked"] == live["claims"] == live["pinned"] == live["held"] == 0
    assert engine.counts()["worker"]["failed_loads"] == 0


def test_gemma3_from_ram_and_after_a_restart(gemma: Golden, tmp_path) -> None:
    assert set(gemma.groups) == {"FullAttentionSpec", "SlidingWindowSpec"}
    config = {"local_cpu": True, "remote_url": f"fs://localhost:0{tmp_path}"}
    with Engine(gemma.model, config, **HMA) as engine:
        assert engine.info["hma"] and engine.info["groups"] == gemma.groups
        for case in gemma.cases:
            engine.forget()
            assert engine.ask(list(case.stored)).cached == 0, case.name
        engine.settle()
        check(engine, gemma)
        engine.settle()
    with Engine(gemma.model, config, **HMA) as engine:
        check(engine, gemma, again=True)
        assert engine.reads()["RemoteBackend"] > 0
