# SPDX-License-Identifier: Apache-2.0
"""Lint, types, docs, imports and lengths, as CI sees them.

A tool that is not installed fails its test.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Words that code and pages do without.
WORDS = "tests/packaging/words.txt"
ROOMS = ("lmcache_hybrid", "vllm_patch", "tests", "benchmarks", "examples")


# `make lint docs` runs these as well.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ruff", "check", "--no-cache", "."], id="ruff check"),
        pytest.param(["ruff", "format", "--no-cache", "--check", "."], id="ruff format"),
        pytest.param(["mypy", "--cache-dir={tmp}"], id="mypy", marks=pytest.mark.slow),
        pytest.param(["mkdocs", "build", "--strict", "--site-dir={tmp}"], id="mkdocs"),
        pytest.param(["codespell_lib", "-D", "-", "-D", WORDS], id="codespell"),
        pytest.param(["tests.packaging.prose"], id="proselint"),
    ],
)
def test_lint_types_and_docs_have_nothing_to_say(command: list[str], tmp_path: Path) -> None:
    arguments = [part.format(tmp=tmp_path) for part in command]
    # The theme's advertisement would hide what mkdocs has to say.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_rooms_import_only_from_rooms_below_them() -> None:
    """The drawing of docs/design.md; its contracts are in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Contracts: 4 kept, 0 broken." in result.stdout, result.stdout + result.stderr


def test_files_have_under_700_lines_and_functions_under_80() -> None:
    """Alarms, not targets: product, tests, benchmarks and examples."""
    found = set()
    for file in (f for room in ROOMS for f in (ROOT / room).rglob("*.py")):
        name, text = str(file.relative_to(ROOT)), file.read_text()
        found |= {name} if len(text.splitlines()) > 700 else set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > 80:
                    found.add(f"{name}: {node.name}")
    assert not found
