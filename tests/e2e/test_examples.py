# SPDX-License-Identifier: Apache-2.0
"""The examples run as written."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.processes import Forked, own_core, run_script
from tests.hub import MODEL, Hub

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_the_example_of_one_engine_runs() -> None:
    _run("offline")


def test_a_server_gets_its_model_from_the_hub(model_dir: Path, tmp_path: Path) -> None:
    """``vllm serve org/name``, as in the README: LMCache stores and restores under that name."""
    with Hub(make_model("qwen3_next", model_dir / "qwen3_next"), tmp_path) as hub:
        _run("serve_openai", "--model", MODEL, environment=hub.environment)


def _run(example: str, *arguments: str, environment: Mapping[str, str] = {}) -> None:  # noqa: B006
    result = subprocess.run(
        [sys.executable, f"examples/{example}.py", *arguments],
        cwd=ROOT,
        env={**_own_environment(), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "OK" in result.stdout


@pytest.mark.parametrize(
    "example", ["redis_two_engines", "prefill_decode", "kv_events_router", "agent"]
)
def test_every_example_of_several_engines_runs(example: str, tmp_path: Path) -> None:
    """Forked, its engines too: up to seven processes would import vLLM."""
    log, script = tmp_path / "log", ROOT / f"examples/{example}.py"
    code = Forked(log, _own_environment(), run_script, str(script)).wait()
    output = log.read_text(errors="replace")
    assert code == 0, output[-6000:]
    assert "OK" in output.split()


def _own_environment() -> dict[str, str]:
    """An engine of an example takes two cores by default; another worker has one of them."""
    return {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": own_core()}
