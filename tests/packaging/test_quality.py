# SPDX-License-Identifier: Apache-2.0
"""Lint, types and docs as CI sees them. A tool that is not installed fails its test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ruff", "check", "--no-cache", "."], id="ruff check"),
        pytest.param(["ruff", "format", "--no-cache", "--check", "."], id="ruff format"),
        pytest.param(["mypy", "--cache-dir={tmp}"], id="mypy"),
        pytest.param(["mkdocs", "build", "--strict", "--site-dir={tmp}"], id="mkdocs"),
    ],
)
def test_clean(command: list[str], tmp_path: Path) -> None:
    arguments = [part.format(tmp=tmp_path) for part in command]
    # Its theme's advertisement would hide what it has to say.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_rooms_import_only_from_rooms_below_them() -> None:
    """The drawing of docs/design.md; its contracts are in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Contracts: 4 kept, 0 broken." in result.stdout, result.stdout + result.stderr
