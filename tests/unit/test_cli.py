# SPDX-License-Identifier: Apache-2.0
"""Versions, also where vLLM or LMCache is not installed; what benchmarks of a checkout take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lmcache_hybrid import __version__
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.upstream import versions

ROOT = Path(__file__).parents[2]
BENCHMARKS = ("performance", "reuse", "serve", "scale", "steps", "weights")
NAMES = {"vLLM": "vllm", "LMCache": "lmcache"}


def invoke(monkeypatch: pytest.MonkeyPatch, absent: str, *arguments: str) -> Result:
    """Run a command as if a package were not installed."""
    real = versions.installed
    monkeypatch.setattr(
        versions, "installed", lambda *names: None if NAMES[absent] in names else real(*names)
    )
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("absent", NAMES)
@pytest.mark.parametrize(("command", "code"), [(["demo"], 1), (["accept", "MODEL"], 2)])
def test_engines_need_both(
    command: list[str], code: int, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = invoke(monkeypatch, absent, *command)
    assert result.exit_code == code
    assert result.output.startswith(f"{absent} is not installed; run `pip install ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("absent", NAMES)
@pytest.mark.parametrize("allowed", ["0", "1"])
def test_version_says_what_is_not_installed(
    absent: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are missing are beside the point then."""
    monkeypatch.setenv(versions.ALLOW_UNTESTED, allowed)
    result = invoke(monkeypatch, absent, "version")
    found, problem = result.output.splitlines()
    assert result.exit_code == 1 and found.startswith(f"lmcache-hybrid {__version__}, vLLM ")
    assert f"{absent} not installed" in found and "None" not in found
    assert problem.startswith(f"{absent} is not installed; run `pip install ")


@pytest.mark.parametrize("absent", [*NAMES, ""])
def test_versions_for_scripts(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if absent:
        result = invoke(monkeypatch, absent, "version", "--json")
    else:
        result = CliRunner().invoke(app, ["version", "--json"])
    told = json.loads(result.output)
    assert told["lmcache-hybrid"] == __version__ and result.exit_code == bool(told["problem"])
    assert [name for name in NAMES if told[NAMES[name]] is None] == [absent] * bool(absent)
    assert told["problem"] or not absent


def test_the_version_alone_needs_neither() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"lmcache-hybrid {__version__}\n")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_of_a_checkout_say_what_they_take(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"Usage: python -m benchmarks.{name} [OPTIONS]" in said


@pytest.mark.parametrize(
    "name", ["bench", "demo", "doctor", "accept", "inspect", "verify", "purge", "plan", "version"]
)
def test_each_help_has_an_example(name: str) -> None:
    told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
    assert f"Example: lmcache-hybrid {name}" in " ".join(told.split())
