# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.reuse.checkpoints``: each T stores the states that it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import own_core

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_more_states_for_a_smaller_t(tmp_path: Path) -> None:
    out = tmp_path / "checkpoints.json"
    command = [sys.executable, "-m", "benchmarks.reuse.checkpoints", "--out", out, "--rounds", "1"]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": own_core()}
    done = subprocess.run(
        [*map(str, command), "--family", "lfm2"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    states = {row["interval"]: row["states"] for row in json.loads(out.read_text())["rows"]}
    assert [states[blocks] for blocks in (0, 8, 4, 2, 1)] == [1, 3, 5, 10, 20]
    assert states["chunk"] > 1
