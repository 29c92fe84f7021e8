# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: each stage stores the pages and states of its layers, and a hit needs all."""

import random
from pathlib import Path

import pytest
from redis import Redis

from lmcache_hybrid.storage.record_format import Header, read_header
from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e import v2
from tests.e2e.blocks import block_size
from tests.e2e.engine import Answer, Engine
from tests.e2e.records import DiskShelf, FolderShelf, RedisShelf, Shelf
from tests.e2e.test_scale import check_close

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.two_cores]


def options(size: int, shards: int) -> dict:
    """Of an engine with two stages of ``shards`` ranks each; blocks have ``size`` tokens."""
    return {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": shards,
        "worker_cls": "tests.e2e.pipeline.StageWorker",
        # A state at the end of every block.
        "max_num_batched_tokens": size,
        "prefix_cache_retention_interval": None,
        "env": {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0|1"] * shards),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            # The second stage has no layer of Qwen3-Next's first state group.
            "VLLM_PP_LAYER_PARTITION": "5,3",
        },
    }


def header(shelf: Shelf, name: str) -> Header:
    return read_header(shelf.read(name))


def of_rank(shelf: Shelf, rank: int, label: str) -> list[str]:
    """Names of a rank's records of one group."""
    own = [name for name in shelf.names() if name.split("@")[2] == str(rank)]
    return sorted(name for name in own if f"%{label}-" in name)


def check_all_hit(engine: Engine, prompts: list[list[int]], cold: list[Answer], size: int) -> None:
    for ids, first in zip(prompts, cold, strict=True):
        engine.forget()
        again = engine.ask(ids)
        assert again.external == again.cached == (len(ids) - 1) // size * size > 0
        assert again.output == first.output, f"{len(ids)} tokens"


def fill(engine: Engine, size: int) -> tuple[list[list[int]], list[Answer]]:
    """Store prompts of one to four blocks; vLLM's own cache and the store bring the same."""
    rng = random.Random(5)
    lengths = (size + 1, 2 * size, 3 * size + 17, 4 * size + 5)
    prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
    cold = [engine.ask(ids) for ids in prompts]
    assert not any(answer.cached for answer in cold)
    for ids, first in zip(prompts, cold, strict=True):
        local = engine.ask(ids)
        assert local.external == 0 and local.cached > 0 and local.output == first.output
    check_all_hit(engine, prompts, cold, size)
    # Steps of several requests are in flight at once, loads beside them.
    engine.forget()
    together = engine.ask_many(prompts)
    assert together[0].external == sum((len(ids) - 1) // size * size for ids in prompts)
    for answer, first in zip(together, cold, strict=True):
        check_close(answer, first)
    return prompts, cold


@pytest.mark.parametrize("shards", [1, 2])
def test_two_stages_and_a_record_that_one_rank_lost(
    shards: int, model_dir: Path, tmp_path: Path, redis_url: str
) -> None:
    """Stages of one rank keep records on disk, stages of two in Redis."""
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    if shards == 1:
        config = {"local_disk": str(tmp_path), "max_local_disk_size": 1}
        shelf: Shelf = DiskShelf(tmp_path)
    else:
        config = {"local_cpu": False, "remote_url": redis_url}
        shelf = RedisShelf(Redis.from_url(redis_url))
    size = block_size(model)
    with Engine(model, config, **options(size, shards)) as engine:
        # vLLM offers the state of a prompt that ends with a block, for which no lookup asks.
        engine.rewrites = True
        assert engine.info["block_size"] == size
        prompts, cold = fill(engine, size)
    for label in ("s0", "a3"):
        counts = {len(of_rank(shelf, rank, label)) for rank in range(2 * shards)}
        assert len(counts) == 1 and counts.pop() > 0
    for rank in range(shards, 2 * shards):
        assert {header(shelf, name).length for name in of_rank(shelf, rank, "s0")} == {0}
    # The last rank loses its record of the last prompt's deepest state.
    states = of_rank(shelf, 2 * shards - 1, "s0")
    deepest = [name for name in states if header(shelf, name).boundary == 4 * size]
    assert len(deepest) == 1
    shelf.remove(deepest[0])
    with Engine(model, config, **options(size, shards)) as engine:
        engine.rewrites = True  # on the rank that has lost nothing
        check_all_hit(engine, prompts[:-1], cold[:-1], size)
        again = engine.ask(prompts[-1])
        assert again.external == 3 * size and again.output == cold[-1].output
        metrics = engine.metrics()
        assert metrics["lmcache_hybrid_hit_tokens"] == metrics["external_prefix_cache_hits"]
        assert metrics["lmcache_hybrid_failed_loads"] == 0


def test_two_stages_on_the_v2_runner(model_dir: Path, tmp_path: Path) -> None:
    """With asynchronous scheduling, as on a GPU."""
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    size, rng = block_size(model), random.Random(6)
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path}"}
    stages = {
        "runner": "v2",
        "pipeline_parallel_size": 2,
        "worker_cls": "tests.e2e.pipeline.StageWorker",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **v2.OF_RANKS},
    }
    lengths = (size + 57, 2 * size + 9)
    prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
    with Engine(model, config, **stages) as engine:
        assert "Using V2 Model Runner" in engine.log
        assert engine.info["scheduler"] == "AsyncScheduler"
        cold = [engine.ask(ids, 3) for ids in prompts]
        assert not any(answer.cached for answer in cold)
        for ids, first, hit in zip(prompts, cold, (size, 2 * size), strict=True):
            engine.forget()
            again = engine.ask(ids, 3)
            assert again.external == again.cached == hit and again.output == first.output
    # The second stage loses a state of the longer prompt.
    shelf = FolderShelf(tmp_path)
    states = of_rank(shelf, 1, "s0")
    deepest = [name for name in states if header(shelf, name).boundary == 2 * size]
    assert len(deepest) == 1
    shelf.remove(deepest[0])
    with Engine(model, config, **stages) as engine:
        engine.rewrites = True  # on the rank that has lost nothing
        for ids, first, hit in zip(prompts, cold, (size, 0), strict=True):
            again = engine.ask(ids, 3)
            assert again.external == again.cached == hit and again.output == first.output
