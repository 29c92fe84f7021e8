# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) over two ranks: its pages are equal on both, and shared stores get one."""

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from lmcache_hybrid.storage.record_format import read_header
from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e import standins
from tests.e2e.engine import Engine
from tests.e2e.records import RedisShelf

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.two_cores]

# Not from latent.py, which installs these where it is imported.
NEEDED = ("torchvision", "latent_attention", "delta_attention")
RANKS = {
    "tensor_parallel_size": 2,
    "worker_cls": "tests.e2e.latent.LatentWorker",
    "prepare": partial(standins.install, NEEDED),
    "max_num_seqs": 4,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


def fields(name: str) -> tuple[str, str]:
    """Rank and group's label in a record's name."""
    return name.split("@")[2], name.rpartition("%")[2].split("-")[0]


def test_one_rank_stores_latent_pages_for_both(model_dir: Path, redis_url: str) -> None:
    shelf = RedisShelf(Redis.from_url(redis_url))
    model = make_model("kimi_linear", model_dir / "kimi_linear")
    config, rng = {"local_cpu": False, "remote_url": redis_url}, random.Random(7)
    with Engine(model, config, **RANKS) as engine:
        size, groups = engine.info["block_size"], engine.info["groups"]
        lengths = (size + 1, 2 * size + 9, 3 * size + 17)
        prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
        cold = [engine.ask(ids, 4) for ids in prompts]
        assert not any(answer.cached for answer in cold)
    latent = groups.index("MLAAttentionSpec")
    stored = Counter(map(fields, shelf.names()))
    # One record of each block's latent pages, and one of each rank's states.
    assert stored.pop(("0", f"a{latent}")) == sum(length // size for length in lengths)
    states = [f"s{group}" for group in range(len(groups)) if group != latent]
    assert sorted(stored) == sorted((rank, label) for rank in "01" for label in states)
    assert len(set(stored.values())) == 1
    # The last page of the last prompt is lost: neither rank finds it.
    pages = [name for name in shelf.names() if fields(name) == ("0", f"a{latent}")]
    deepest = [name for name in pages if read_header(shelf.read(name)).boundary == 3 * size]
    assert len(deepest) == 1
    shelf.remove(deepest[0])
    with Engine(model, config, **RANKS) as engine:
        engine.rewrites = True  # the states behind that page
        for ids, first, hit in zip(prompts, cold, (size, 2 * size, 0), strict=True):
            again = engine.ask(ids, 4)
            assert again.external == again.cached == hit
            assert again.output == first.output
        assert engine.metrics()["lmcache_hybrid_failed_loads"] == 0
