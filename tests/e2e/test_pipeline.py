# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: each stage stores the pages and states of its layers, and a hit needs all."""

import random
from pathlib import Path

import pytest
from engine import Answer, Engine
from records import DiskShelf
from test_scale import check_close

from lmcache_hybrid.storage.record import Header, read_header
from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = [pytest.mark.engine, pytest.mark.two_cores]

N = 256
STAGES = {
    "pipeline_parallel_size": 2,
    "worker_cls": "pipeline.StageWorker",
    # A state at the end of every block.
    "max_num_batched_tokens": N,
    "prefix_cache_retention_interval": None,
    "env": {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # The second stage has no layer of Qwen3-Next's first state group.
        "VLLM_PP_LAYER_PARTITION": "5,3",
    },
}


def header(shelf: DiskShelf, name: str) -> Header:
    return read_header(shelf.read(name))


def of_stage(shelf: DiskShelf, stage: int, label: str) -> list[str]:
    """Names of a stage's records of one group."""
    own = [name for name in shelf.names() if name.split("@")[1:3] == ["2", str(stage)]]
    return sorted(name for name in own if f"%{label}-" in name)


def check_all_hit(engine: Engine, prompts: list[list[int]], cold: list[Answer]) -> None:
    for ids, first in zip(prompts, cold, strict=True):
        engine.forget()
        again = engine.ask(ids)
        assert again.external == again.cached == (len(ids) - 1) // N * N > 0
        assert again.output == first.output, f"{len(ids)} tokens"


def fill(engine: Engine) -> tuple[list[list[int]], list[Answer]]:
    """Store prompts of one to four blocks; vLLM's own cache and the store bring the same."""
    rng = random.Random(5)
    lengths = (N + 1, 2 * N, 3 * N + 17, 4 * N + 5)
    prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
    cold = [engine.ask(ids) for ids in prompts]
    assert not any(answer.cached for answer in cold)
    for ids, first in zip(prompts, cold, strict=True):
        local = engine.ask(ids)
        assert local.external == 0 and local.cached > 0 and local.output == first.output
    check_all_hit(engine, prompts, cold)
    # Steps of several requests are in flight at once, loads beside them.
    engine.forget()
    together = engine.ask_many(prompts)
    assert together[0].external == sum((len(ids) - 1) // N * N for ids in prompts)
    for answer, first in zip(together, cold, strict=True):
        check_close(answer, first)
    return prompts, cold


def test_two_stages_and_a_record_that_one_of_them_lost(model_dir: Path, tmp_path: Path) -> None:
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    config = {"local_disk": str(tmp_path), "max_local_disk_size": 1}
    shelf = DiskShelf(tmp_path)
    with Engine(model, config, **STAGES) as engine:
        assert engine.info["block_size"] == N
        prompts, cold = fill(engine)
    for label in ("s0", "a3"):
        stages = [of_stage(shelf, stage, label) for stage in (0, 1)]
        assert len(stages[0]) == len(stages[1]) > 0
    assert {header(shelf, name).length for name in of_stage(shelf, 1, "s0")} == {0}
    # The second stage loses its record of the last prompt's deepest state.
    deepest = [n for n in of_stage(shelf, 1, "s0") if header(shelf, n).boundary == 4 * N]
    assert len(deepest) == 1
    shelf.remove(deepest[0])
    with Engine(model, config, **STAGES) as engine:
        check_all_hit(engine, prompts[:-1], cold[:-1])
        again = engine.ask(prompts[-1])
        assert again.external == 3 * N and again.output == cold[-1].output
        metrics = engine.metrics()
        assert metrics["lmcache_hybrid_hit_tokens"] == metrics["external_prefix_cache_hits"]
        assert metrics["lmcache_hybrid_failed_loads"] == 0
