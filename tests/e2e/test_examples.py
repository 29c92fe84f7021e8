# SPDX-License-Identifier: Apache-2.0
"""The examples run as written."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.two_cores]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "example",
    ["offline", "serve_openai", "redis_two_engines", "prefill_decode", "kv_events_router"],
)
def test_every_example_runs(example: str) -> None:
    result = subprocess.run(
        [sys.executable, f"examples/{example}.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "OK" in result.stdout
