# SPDX-License-Identifier: Apache-2.0
"""Pages that two real ranks hold alike: one stores them, both restore them.

No model with MLA runs on vLLM's CPU backend. One KV head over two ranks stands in for it: both
hold the same keys and values, though vLLM does not say so, and states are sharded as ever.
"""

import dataclasses
from pathlib import Path

import pytest
from engine import Engine
from prompts import cases
from records import is_state

from lmcache_hybrid.core import groups
from lmcache_hybrid.tools.tiny_models import FAMILIES, make_model

pytestmark = pytest.mark.engine


def say_so() -> None:
    """Have attention count as equal on all ranks, in every process of the engine."""
    groups._is_replicated = lambda spec: spec.num_kv_heads == 1


OPTIONS = {
    "tensor_parallel_size": 2,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    "prepare": say_so,
}


@pytest.fixture
def one_head(monkeypatch, tmp_path: Path) -> Path:
    family = FAMILIES["qwen3_next"]
    one = dataclasses.replace(family, config={**family.config, "num_key_value_heads": 1})
    monkeypatch.setitem(FAMILIES, "qwen3_next", one)
    return make_model("qwen3_next", tmp_path / "model")


@pytest.mark.two_cores
def test_one_rank_stores_what_both_restore(one_head: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{folder}"}
    with Engine(one_head, config, **OPTIONS) as engine:
        size = engine.info["block_size"]
        prompts = [list(case.stored) for case in cases(size)[:3]]
        cold = [engine.ask(ids) for ids in prompts]
        assert not any(answer.cached for answer in cold)
    files = list(folder.glob("*.data"))
    pages = [file for file in files if not is_state(file)]
    blocks = sum(len(ids) // size for ids in prompts)
    assert len(pages) == blocks and {file.name.split("@")[2] for file in pages} == {"0"}
    unique = blocks * size * 2 * 2 * 64 * 2  # two layers' keys and values, one head, bfloat16
    assert sum(file.stat().st_size for file in pages) <= 1.01 * unique
    states = [file.name.split("@")[2] for file in files if is_state(file)]
    assert states.count("0") == states.count("1") > 0
    with Engine(one_head, config, **OPTIONS) as engine:
        for ids, first in zip(prompts, cold, strict=True):
            again = engine.ask(ids)
            assert again.external == (len(ids) - 1) // size * size
            assert again.output == first.output
        metrics = engine.metrics()
        assert metrics["lmcache_hybrid_hits"] == len(prompts)
        # Both ranks loaded every page.
        assert metrics["lmcache_hybrid_loaded_attention_blocks"] == 2 * sum(
            (len(ids) - 1) // size for ids in prompts
        )
