# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism on real engines: two ranks share each attention block's tokens.

Two kernels are stand-ins (``spread.py``). The rest is vLLM's: which rank holds which token, block
tables, hashes, its own prefix cache, copies between blocks, states.
"""

import random
import time
from pathlib import Path

import pytest

from lmcache_hybrid.storage.record_format import MAGIC, read_header
from lmcache_hybrid.tools import tiny_families
from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Answer, Engine
from tests.marks import slow

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.two_cores]

TOKENS = 4


@pytest.fixture
def model(model_dir: Path, monkeypatch) -> Path:
    """vLLM lets only ranks with the same KV heads share a block: one head for two ranks."""
    monkeypatch.setitem(tiny_families.FAMILIES["qwen3_next"].config, "num_key_value_heads", 1)
    return make_model("qwen3_next", model_dir / "qwen3_next_one_head")


def start(model: Path, config: dict | None, interleave: int = 1, dcp: int = 2) -> Engine:
    return Engine(
        model,
        config,
        tensor_parallel_size=2,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        worker_cls="tests.e2e.spread.SpreadWorker",
        max_num_seqs=4,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )


def prompts_of(size: int) -> list[list[int]]:
    """Their last multiples of N end an attention block of 2 N, or lie inside one."""
    rng, lengths = random.Random(5), (size + 1, 2 * size + 9, 3 * size + 17, 5 * size)
    return [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]


def wait_for_writes(folder: Path) -> None:
    """Until no file has come for a second."""
    before = -1
    while (files := len(list(folder.glob("*.data")))) != before:
        before = files
        time.sleep(1)


def check(engine: Engine, prompts: list[list[int]], cold: list[Answer], size: int) -> None:
    """All hit at their last multiple of N, and are answered to the last bit as without a hit."""
    for ids, first in zip(prompts, cold, strict=True):
        engine.forget()
        again = engine.ask(ids, TOKENS)
        assert again.external == again.cached == (len(ids) - 1) // size * size
        assert again.output == first.output, f"{len(ids)} tokens"


@pytest.mark.parametrize("interleave", [1, *slow(16)])
def test_ranks_that_share_blocks_hit_at_multiples_of_n(
    interleave: int, model: Path, tmp_path: Path
) -> None:
    config = {"remote_url": f"fs://localhost:0{tmp_path}"}
    with start(model, {**config, "local_cpu": True}, interleave) as engine:
        size = engine.info["block_size"]
        prompts = prompts_of(size)
        cold = [engine.ask(ids, TOKENS) for ids in prompts]
        assert not any(answer.cached for answer in cold)
        for ids, first in zip(prompts, cold, strict=True):
            own = engine.ask(ids, TOKENS)
            assert own.external == 0 and own.cached == (len(ids) - 1) // size * size
            assert own.output == first.output
        check(engine, prompts, cold, size)
        together = (engine.forget(), engine.ask_many(prompts, TOKENS))[1]
        assert sum(answer.cached for answer in together) == 10 * size
        assert [answer.tokens for answer in together] == [answer.tokens for answer in cold]
        wait_for_writes(tmp_path)
    records = {}
    for file in tmp_path.glob("*.data"):
        data = file.read_bytes()
        records[file.name] = read_header(data[data.index(MAGIC) :])
    for rank in "01":
        own = [header for name, header in records.items() if name.split("@")[2] == rank]
        assert {header.boundary % (2 * size) for header in own} == {0, size}
    with start(model, {**config, "local_cpu": False}, interleave) as engine:
        check(engine, prompts, cold, size)
        assert engine.metrics()["lmcache_hybrid_failed_loads"] == 0
    # Others hold other tokens under the same hashes.
    for other, dcp in ((4, 2), (1, 1)):
        with start(model, {**config, "local_cpu": False}, other, dcp) as engine:
            answer = engine.ask(prompts[-1], TOKENS)
            assert answer.cached == 0 and answer.tokens == cold[-1].tokens
