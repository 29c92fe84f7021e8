# SPDX-License-Identifier: Apache-2.0
"""Copies of the project in which defects are planted."""

import contextlib
import hashlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.defect import Defect

ROOT = Path(__file__).parents[2]
# What decides how a run ends.
DECIDES = ("benchmarks/", "lmcache_hybrid/", "vllm_patch/", "tests/", "pyproject.toml")


def tracked() -> list[str]:
    """What git tracks or would track, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = filter(None, listed.stdout.split("\0"))
    return sorted(name for name in names if (ROOT / name).is_file())


def digest() -> str:
    """Name of everything that decides how a run ends."""
    total = hashlib.sha256()
    for name in tracked():
        if name.startswith(DECIDES):
            total.update(f"{name}\0{(ROOT / name).stat().st_size}\0".encode())
            total.update((ROOT / name).read_bytes())
    return total.hexdigest()


def copy_tree(target: Path) -> None:
    """Copy what git tracks to ``target``."""
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((ROOT / name).read_bytes())


_ages = itertools.count(1)


@contextlib.contextmanager
def planted(tree: Path, defect: Defect | None) -> Iterator[None]:
    """Plant a defect in ``tree``, and take it out again.

    Raises:
        ValueError: its text is not there exactly once; mend the list then.
    """
    before: dict[Path, tuple[str, os.stat_result]] = {}
    try:
        for file, old, new in defect.edits if defect else ():
            path = tree / file
            text = path.read_text()
            if text.count(old) != 1:
                raise ValueError(f"{defect.name}: {file} holds {text.count(old)} times {old!r}")
            before.setdefault(path, (text, path.stat()))
            path.write_text(text.replace(old, new))
            # Compiled files are told apart by size and whole seconds.
            age = time.time() + 10 * next(_ages)
            os.utime(path, (age, age))
        yield
    finally:
        for path, (text, stat) in before.items():
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
