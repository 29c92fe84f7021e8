# SPDX-License-Identifier: Apache-2.0
"""The matrix of ``make compat``, and that the supported range is within it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.compat.cells import STAGES, verdict
from vllm_patch import versions

DOCS = Path(__file__).parents[2] / "docs"


def within(version: str | None, bounds: tuple[str, str]) -> bool:
    return version is not None and Version(bounds[0]) <= Version(version) < Version(bounds[1])


def test_the_range_is_what_ran_end_to_end() -> None:
    cells = json.loads((DOCS / "compat.json").read_text())["cells"]
    inside = [
        cell
        for cell in cells
        if within(cell["vllm"] or versions.VLLM_RANGE[0], versions.VLLM_RANGE)
        and within(cell["lmcache"] or versions.LMCACHE_RANGE[0], versions.LMCACHE_RANGE)
    ]
    assert inside
    for cell in inside:
        states = {stage: cell["outcomes"][stage]["state"] for stage in STAGES}
        assert set(states.values()) == {"yes"}, (cell["vllm"], cell["lmcache"], states)
    for package, bounds in (
        ("vllm", versions.VLLM_RANGE),
        ("lmcache", versions.LMCACHE_RANGE),
    ):
        tested = sorted(Version(cell[package]) for cell in inside)
        assert str(tested[0]) == bounds[0]
        # Fixes of the newest one tested are let in, its next release is not.
        size = 2 if package == "vllm" else 3
        assert Version(bounds[1]).release[:size] == next_release(tested[-1].release[:size])


def next_release(release: tuple[int, ...]) -> tuple[int, ...]:
    return (*release[:-1], release[-1] + 1)


def test_the_page_says_the_range() -> None:
    assert f"**{versions.supported()}**" in (DOCS / "compat.md").read_text()


@pytest.mark.parametrize(
    "body, state, why",
    [
        ("def test_a(): pass\ndef test_b(): pass", "yes", "2 passed"),
        (
            "def test_a(): pass\ndef test_b(): raise ValueError('3 passed in 1s')",
            "no",
            "1 failed, 1 passed; first test_it.py::test_b: ValueError: 3 passed in 1s",
        ),
        (
            "import nothing_of_this_name",
            "no",
            "1 error; first test_it.py: no message",
        ),
    ],
)
def test_what_pytest_says_is_read(tmp_path: Path, body: str, state: str, why: str) -> None:
    (tmp_path / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-rfE"]
    command += ["-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert verdict(done.returncode, done.stdout) == (state, why)
