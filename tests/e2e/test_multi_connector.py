# SPDX-License-Identifier: Apache-2.0
"""vLLM's own ``OffloadingConnector`` beside ours in a ``MultiConnector``."""

import random
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import CONNECTOR, Engine, EngineDied

pytestmark = pytest.mark.engine

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 128 << 20,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tests.e2e.host_offloading",
    },
}


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("qwen3_next", model_dir / "qwen3_next")


def engine(model: Path, *connectors: dict, **options) -> Engine:
    extra = {"connectors": list(connectors)}
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    return Engine(model, {"local_cpu": True}, transfer, **options)


def prompts(size: int) -> list[list[int]]:
    rng = random.Random(7)
    lengths = (size + 1, 2 * size, 3 * size + 17)
    return [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]


def test_ours_comes_first_and_both_store(model: Path) -> None:
    with engine(model, CONNECTOR, OFFLOADING) as both:
        size = both.info["block_size"]
        for ids in prompts(size):
            cold, local = both.ask(ids), both.ask(ids)
            both.forget()
            again = both.ask(ids)
            assert cold.cached == 0 and local.external == 0
            assert again.external == (len(ids) - 1) // size * size == local.cached
            assert again.output == local.output == cold.output
        metrics = both.metrics()
        assert metrics["lmcache_hybrid_hit_tokens"] == metrics["external_prefix_cache_hits"] > 0
        assert metrics["lmcache_hybrid_failed_loads"] == 0


def test_a_connector_that_knows_one_group_is_refused_at_start(model: Path) -> None:
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    sentence = "ExampleConnector does not know several KV cache groups .*; remove it"
    with pytest.raises(EngineDied, match=sentence), engine(model, CONNECTOR, example):
        pass
