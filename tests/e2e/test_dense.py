# SPDX-License-Identifier: Apache-2.0
"""A model that is not hybrid: LMCache's own adapter behind vLLM's class, from start to hit.

LMCache has code that copies KV caches for accelerators only, so on CPU it gives up there and
computes. One test goes to that point; the other puts a connector in that place which copies
blocks on CPU. All else is LMCache's, of the release that is installed.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from lmcache_hybrid.tools.tiny_models import make_model
from lmcache_hybrid.upstream.lmcache_home import NEW, OLD, take
from tests.e2e.engine import Engine
from tests.e2e.golden import assert_close

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MOVED = Version(Version(version("lmcache")).base_version) >= Version("0.5.7")
ADAPTER = f"{NEW if MOVED else OLD}.integration.vllm.vllm_v1_adapter"
OLD_ADAPTER = f"{OLD}.integration.vllm.vllm_v1_adapter"
CHUNK = 256  # tokens; two blocks of vLLM's on CPU
LMCACHE = {"local_cpu": True, "chunk_size": CHUNK, "lookup_timeout_ms": 1000}
PROMPT = [32 + i * i % 90 for i in range(700)]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("llama", model_dir / "llama")


def assert_lmcaches_adapter(engine: Engine) -> None:
    """It runs, from the home that this release keeps it in, which is said once."""
    assert f":{ADAPTER})" in engine.log  # LMCache's log names its modules
    assert "LMCache serves hybrid groups" not in engine.log
    assert engine.log.count(f"has moved {OLD_ADAPTER} to {ADAPTER}") == MOVED
    assert engine.log.count("has moved") == MOVED


def test_without_a_device_lmcache_gives_up_where_it_would_copy_and_computes(model) -> None:
    with Engine(model) as engine:
        expected = engine.ask(PROMPT)
    with Engine(model, LMCACHE) as engine:
        for _ in range(2):
            engine.forget()
            answer = engine.ask(PROMPT)
            assert answer.cached == answer.external == 0
            assert answer.output == expected.output
        assert_lmcaches_adapter(engine)
        # LMCache's own sentences; with a connector for CPU the next test says all there is.
        assert "RuntimeError: No supported cpu connector found." in engine.log
        assert "System will operate in degraded mode (recompute)" in engine.log


def test_a_dense_model_hits_what_lmcache_stored(model) -> None:
    with Engine(model, LMCACHE, prepare=copy_blocks) as engine:
        cold = engine.ask(PROMPT)
        engine.forget()
        other = engine.ask(PROMPT[1:])
        assert cold.cached == other.cached == 0
        engine.forget()
        warm = engine.ask(PROMPT)
        assert warm.cached == warm.external == len(PROMPT) // CHUNK * CHUNK
        # Resumed in the middle, which rounds otherwise on some processors.
        assert_close(cold, warm, "warm")
        assert warm.tokens[0] == cold.tokens[0] and cold.output != other.output
        assert_lmcaches_adapter(engine)
        assert "degraded mode" not in engine.log


def copy_blocks() -> None:
    """Let LMCache make a :func:`block_connector` where it has no connector of its own.

    As late as vLLM makes its side of it: imported earlier, LMCache's libraries trip vLLM.
    """
    create_vllms = KVConnectorFactory.create_connector

    def create(*args, **kwargs):
        lmcaches = sys.modules[take("v1.gpu_connector", "CreateGPUConnector").__module__]
        lmcaches.CreateGPUConnector = lambda config, metadata, *_, **__: block_connector(
            metadata.kv_shape
        )
        return create_vllms(*args, **kwargs)

    KVConnectorFactory.create_connector = create


def block_connector(kv_shape: tuple[int, ...]):
    """A connector of LMCache's that copies whole blocks of vLLM's KV cache as they are."""
    base = take("v1.gpu_connector.mock_gpu_connector", "MockGPUConnector")

    class BlockConnector(base):
        def batched_from_gpu(self, memory_objs, starts, ends, **kwargs) -> None:
            for stored, cache, blocks in self.layers(memory_objs, starts, ends, **kwargs):
                stored.copy_(cache[blocks].view(-1))

        def batched_to_gpu(self, memory_objs, starts, ends, **kwargs) -> None:
            for stored, cache, blocks in self.layers(memory_objs, starts, ends, **kwargs):
                cache[blocks] = stored.view(len(blocks), *cache.shape[1:])

        def layers(self, memory_objs, starts, ends, slot_mapping, kvcaches, **_):
            """(LMCache's memory, vLLM's cache of (blocks, heads, tokens, ...), block ids)."""
            for memory, start, end in zip(memory_objs, starts, ends):
                parts = memory.tensor.view(-1).chunk(len(kvcaches))
                for stored, cache in zip(parts, kvcaches):
                    size = cache.shape[2]
                    yield stored, cache, slot_mapping[start:end:size] // size

    return BlockConnector(kv_shape)
