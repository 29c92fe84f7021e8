# SPDX-License-Identifier: Apache-2.0
"""Programs that are run by hand find what they import."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soak", "kv_events"])
def test_a_soak_shows_its_options(name: str) -> None:
    command = [sys.executable, "-m", f"tests.soak.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--seed" in done.stdout, done.stderr[-2000:]
