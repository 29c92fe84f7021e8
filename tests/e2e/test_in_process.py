# SPDX-License-Identifier: Apache-2.0
"""A script with its engine in its own process, at module level, ends by itself."""

import os
import subprocess
import sys

import pytest

from lmcache_hybrid.tools.tiny_models import make_model

# tests/unit/test_threads.py covers the promise; here vLLM's and LMCache's own threads are met.
pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = """
import sys
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

transfer = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
llm = LLM(
    model=sys.argv[1],
    kv_transfer_config=transfer,
    max_model_len=2048,
    kv_cache_memory_bytes=256 << 20,
    enforce_eager=True,
    seed=0,
)
prompt = {"prompt_token_ids": [number % 100 for number in range(1500)]}
for _ in range(2):
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0))
    assert llm.reset_prefix_cache()
    print("cached:", output.num_cached_tokens)
"""


def test_it_ends_and_has_hit(tmp_path):
    model = make_model("lfm2", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        env=os.environ
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("cached:")]
    assert told[0] == "cached: 0" and int(told[1].split()[1]) > 1000
