# SPDX-License-Identifier: Apache-2.0
"""Programs that are run by hand find what they import."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "soak"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soak.py", "kv_events.py"])
def test_a_soak_shows_its_options(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK / name), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--seed" in done.stdout, done.stderr[-2000:]
