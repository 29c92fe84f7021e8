# SPDX-License-Identifier: Apache-2.0
"""The examples run as written."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hub import MODEL, Hub

from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = [pytest.mark.engine, pytest.mark.two_cores]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "example", ["offline", "redis_two_engines", "prefill_decode", "kv_events_router"]
)
def test_every_example_runs(example: str) -> None:
    _run(example)


def test_a_server_gets_its_model_from_the_hub(model_dir: Path, tmp_path: Path) -> None:
    """``vllm serve org/name``, as in the README: LMCache stores and restores under that name."""
    with Hub(make_model("qwen3_next", model_dir / "qwen3_next"), tmp_path) as hub:
        _run("serve_openai", "--model", MODEL, environment=hub.environment)


def _run(example: str, *arguments: str, environment: Mapping[str, str] = {}) -> None:  # noqa: B006
    result = subprocess.run(
        [sys.executable, f"examples/{example}.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "OK" in result.stdout
