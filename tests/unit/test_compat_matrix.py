# SPDX-License-Identifier: Apache-2.0
"""The matrix of ``make compat``, and that the supported pairs are within it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_hybrid.upstream import versions
from tests.compat.cells import STAGES, verdict

DOCS = Path(__file__).parents[2] / "docs"


def cells() -> dict[tuple[str | None, str | None], dict]:
    rows = json.loads((DOCS / "generated/compat.json").read_text())["cells"]
    return {(row["vllm"], row["lmcache"]): row for row in rows}


@pytest.mark.parametrize("pair", versions.PAIRS, ids=lambda pair: "-".join(pair.releases))
def test_a_pair_is_one_on_which_every_stage_passed(pair: versions.Pair) -> None:
    cell = cells()[pair.releases]
    states = {stage: cell["outcomes"][stage]["state"] for stage in STAGES}
    assert set(states.values()) == {"yes"}, states
    assert cell["kernels"] == pair.kernels


def test_the_page_says_the_pairs() -> None:
    by_vllm: dict[str, list[str]] = {}
    for pair in versions.PAIRS:
        by_vllm.setdefault(pair.vllm, []).append(pair.lmcache)
    text = "; ".join(f"vLLM {v} with LMCache {' or '.join(by_vllm[v])}" for v in by_vllm)
    assert f"**{text}**" in (DOCS / "compat.md").read_text()


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
