# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid bench`` on a tiny model: three servers, and vLLM's own client."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.processes import own_core

# tests/unit/test_bench.py covers what it asks and says.
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_it_measures_hits_and_none_without_lmcache(model_dir: Path, tmp_path: Path) -> None:
    model, out = make_model("lfm2", model_dir / "lfm2"), tmp_path / "bench.json"
    command = [Path(sys.executable).with_name("lmcache-hybrid"), "bench", model, "--out", out]
    command += ["--documents", "2", "--tokens", "1024", "--output-tokens", "4"]
    command += ["--", "--max-model-len", "2048", "--enforce-eager"]
    environment = os.environ | {
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": own_core(),
    }
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "another question to each document: first token" in done.stdout
    found = {(row["arm"], row["round"]): row for row in json.loads(out.read_text())["rounds"]}
    assert not any(row["failed"] for row in found.values())
    for (arm, title), row in found.items():
        hits = arm == "with LMCache" and title not in ("new documents", "the same prompts at once")
        assert (row["loaded"] > 0) == hits, row
        assert (row["own"] > 0) == (title == "the same prompts at once"), row
    assert found["with LMCache", "documents after a restart"]["loaded"] > 0.5
    assert not list(Path(tempfile.gettempdir()).glob("lmcache-hybrid-bench-*"))
