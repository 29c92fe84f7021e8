# SPDX-License-Identifier: Apache-2.0
"""Builds this project, as tests and ``make release-check`` do."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__")


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """Standard output of a command that succeeds, in this environment where none is given."""
    result = subprocess.run(
        command, cwd=cwd, env=environment or None, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy_sources(folder: Path) -> Path:
    """Copy the project to a folder of its own: a build leaves files behind."""
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    return folder


def build(source: Path) -> Path:
    """Folder of an sdist and of the wheel that was built out of it."""
    run([sys.executable, "-m", "build", "--no-isolation"], source)
    return source / "dist"


def build_older(folder: Path) -> Path:
    """As :func:`build`, of this tree as an older version that has a module more, ``gone``."""
    copy_sources(folder)
    init = folder / "lmcache_hybrid/__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.1"', init.read_text()))
    folder.joinpath("lmcache_hybrid/gone.py").write_text("")
    return build(folder)
