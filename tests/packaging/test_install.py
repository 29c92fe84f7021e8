# SPDX-License-Identifier: Apache-2.0
"""Upgrade and uninstall with pip and uv. ``make release-check`` does it beside vLLM."""

import sys
import venv
from pathlib import Path

import pytest

from tests.packaging.building import build_older, run


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = build_older(tmp_path_factory.mktemp("older") / "source").glob("*.whl")
    return wheel


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_upgrade_and_uninstall_leave_no_file(
    tool: str, older: Path, wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    if tool == "uv":
        pip = [sys.executable, "-m", "uv", "pip"]

    def installer(command: str, *arguments: str | Path) -> None:
        of = ["--python", python] if tool == "uv" else []
        run([*pip, command, *of, *arguments], tmp_path)

    def files() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if not path.is_dir()}

    before = files()
    installer("install", "--no-deps", "--no-index", older)
    assert any(path.name == "gone.py" for path in files())
    installer("install", "--no-deps", "--no-index", "--upgrade", wheel)
    run([python, "-c", "import lmcache_hybrid, vllm_patch"], tmp_path, PATH="/usr/bin:/bin")
    there = files()
    assert not any(path.stem.startswith("gone") for path in there)
    assert tmp_path / "bin/lmcache-hybrid" in there
    installer("uninstall", *(["--yes"] if tool == "pip" else []), "lmcache-hybrid")
    assert files() - before <= {tmp_path / ".lock"}  # that of uv
