# SPDX-License-Identifier: Apache-2.0
"""Scripts with their engine in their own process, at module level: they end; two engines in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model

# tests/unit/test_threads.py and test_scales.py cover the promises; here vLLM's and LMCache's own
# threads are met, and vLLM's own order of registering.
pytestmark = [pytest.mark.engine, pytest.mark.slow]

HEAD = """
import gc
import sys
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def make(model):
    transfer = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    llm = LLM(
        model=model,
        kv_transfer_config=transfer,
        max_model_len=2048,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        seed=0,
    )
    # vLLM 0.32 replaces its kernels for CPUs at each engine's start, and cannot do so once LMCache
    # has imported numba; they are replaced already.
    from vllm.triton_utils import dispatcher

    dispatcher._rebind_kernels = lambda pairs: None
    return llm


def ask(llm):
    prompt = {"prompt_token_ids": [number % 100 for number in range(1500)]}
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0))
    assert llm.reset_prefix_cache()
    print("cached:", output.num_cached_tokens)

"""
ONE = """
llm = make(sys.argv[1])
ask(llm)
ask(llm)
"""
ONE_AFTER_THE_OTHER = f"""{ONE}
del llm
gc.collect()
llm = make(sys.argv[2])
ask(llm)
ask(llm)
"""
SIDE_BY_SIDE = """
first = make(sys.argv[1])
ask(first)
try:
    make(sys.argv[2])
except ValueError as error:
    print("refused:", error)
ask(first)
"""


def run(script: str, *models: Path) -> list[str]:
    """What the script printed itself."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, *map(str, models)],
        env=os.environ
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("cached:", "refused:"))]


def cached(told: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in told if line.startswith("cached:")]


def test_it_ends_and_has_hit(tmp_path: Path) -> None:
    cold, warm = cached(run(ONE, make_model("lfm2", tmp_path / "model")))
    assert cold == 0 and warm > 1000


def test_a_second_model_after_the_first_hits(tmp_path: Path) -> None:
    models = [make_model(family, tmp_path / family) for family in ("lfm2", "granite4")]
    first, _, second, warm = cached(run(ONE_AFTER_THE_OTHER, *models))
    assert first == second == 0 and warm > 1000


def test_a_second_engine_beside_the_first_is_refused(tmp_path: Path) -> None:
    """The first goes on: vLLM would have given the second one's KV cache to its connector."""
    models = [make_model(family, tmp_path / family) for family in ("lfm2", "granite4")]
    told = run(SIDE_BY_SIDE, *models)
    assert sum("serves one engine of a process" in line for line in told) == 1
    cold, warm = cached(told)
    assert cold == 0 and warm > 1000
