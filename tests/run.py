# SPDX-License-Identifier: Apache-2.0
"""Runs the tests, says how long they took and which were slowest: ``make test``."""

import bisect
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import psutil
import typer

from . import turns

ROOT = Path(__file__).parents[1]
# Seconds of each test file, written by ``--record``.
DURATIONS = ROOT / "docs/generated/tests.json"
# Seconds of each test of the last run.
LAST = ROOT / "build/tests.json"
# What a file that was never timed is taken for.
UNKNOWN_SECONDS = 10.0
SLOWEST = 5
# Steps of the simulation with ``--all``; test_simulation.py has the number without.
ALL_STEPS = "200000"
# Workers are looked at so often, and a test that takes longer than the second one is stuck.
LOOK_SECONDS, STUCK_SECONDS = 10.0, 1200.0
# pytest's exit code where nothing was selected.
NO_TESTS = 5


@dataclass
class Results:
    """What a run said, from pytest's JUnit file.

    Attributes:
        seconds: of each test, its fixtures included.
        counts: of tests that passed, failed and were skipped.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def read(self, report: Path) -> None:
        """Take what pytest wrote, which is nothing if it was killed."""
        if not report.exists():
            return
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('file')}::{case.get('name')}"
            self.seconds[name] = self.seconds.get(name, 0.0) + float(case.get("time", 0))
            marks = {child.tag for child in case}
            failed, skipped = marks & {"failure", "error"}, "skipped" in marks
            self.counts["failed" if failed else "skipped" if skipped else "passed"] += 1

    def by_file(self) -> dict[str, float]:
        """Seconds of each test file."""
        files: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            files[name.partition("::")[0]] += seconds
        return {name: round(files[name], 1) for name in sorted(files)}

    def summary(self, title: str, seconds: float) -> str:
        """The last lines of a run: its duration and its slowest tests."""
        counts = ", ".join(
            f"{self.counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")
        )
        lines = [f"{title}: {counts} in {clock(seconds)}. The slowest:"]
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
        return "\n".join([*lines, *(f"{took:7.1f} s  {name}" for name, took in slowest)])


def clock(seconds: float) -> str:
    """Such as ``9 min 5 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def test_files(root: Path = ROOT) -> list[str]:
    """All test files, relative to the project."""
    return sorted(str(file.relative_to(root)) for file in (root / "tests").rglob("test_*.py"))


def longest_first(files: Sequence[str], known: Mapping[str, float]) -> list[str]:
    """The files in the order in which they are dealt to shards."""
    return sorted(files, key=lambda file: (-known.get(file, UNKNOWN_SECONDS), file))


def shard(files: Sequence[str], known: Mapping[str, float], index: int, count: int) -> list[str]:
    """Part ``index`` of ``count``, from 1 on: each file goes to the part with least to do.

    Whole files, because tests of a file share engines.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    load = [0.0] * count
    for file in longest_first(files, known):
        least = load.index(min(load))
        parts[least].append(file)
        load[least] += known.get(file, UNKNOWN_SECONDS)
    return parts[index - 1]


def in_order(files: Iterable[str]) -> list[str]:
    """The files as they are dealt to workers: engines first, short tests at the end.

    So both cores are busy to the last. Files with tests that run alone come before the last of
    the short ones: no worker waits for long then until the other one has ended its test.
    """
    alone = [file for file in sorted(files) if f"mark.{turns.MARK}" in (ROOT / file).read_text()]
    rest = sorted(set(files) - set(alone))
    at = bisect.bisect(rest, "tests/unit/test_")
    return [*rest[:at], *alone, *rest[at:]]


def arguments(files: Sequence[str], everything: bool) -> list[str]:
    """pytest's."""
    # pytest-xdist 3.8 replaces a worker that crashed and then waits for ever: with files that the
    # worker had done, which have no test left to run. So the run ends with its first crash.
    side_by_side = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    side_by_side.append("--max-worker-restart=0")
    return [*([] if everything else ["-m=not slow"]), *side_by_side, *files]


def run_pytest(given: list[str], report: Path) -> int:
    """pytest's exit code. Ctrl-C reaches pytest too, so it is waited for; SIGTERM is handed on."""
    # xunit1 has each test's file.
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    process = subprocess.Popen([*command, *given], cwd=ROOT)

    watch = Watch(process.pid)

    def end(*_: object) -> None:
        print(f"\nEnded while it ran: {', '.join(watch.tests()) or 'no test'}", flush=True)
        process.terminate()

    signal.signal(signal.SIGTERM, end)
    while True:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            watch.end_stuck()
        except KeyboardInterrupt:
            continue


class Watch:
    """Ends workers of pytest-xdist whose test does not end, where its timeout is stuck as well.

    Such a worker prints all its stacks and aborts; pytest-xdist says that the test crashed. A timer
    in the worker itself would lock up its forks.
    """

    def __init__(self, pid: int, limit: float = STUCK_SECONDS) -> None:
        """Watch the children of process ``pid``."""
        self._pid, self._limit = pid, limit
        # By worker: its test, and since when it runs.
        self._since: dict[int, tuple[str, float]] = {}

    def tests(self) -> list[str]:
        """Those that the workers are in."""
        return sorted(self._running().values())

    def _running(self) -> dict[int, str]:
        """The test of each worker, from the title that pytest-xdist gives it."""
        running, found = "[pytest-xdist running] ", {}
        with contextlib.suppress(psutil.Error):
            for worker in psutil.Process(self._pid).children():
                title = " ".join(worker.cmdline())
                if title.startswith(running):
                    found[worker.pid] = title.removeprefix(running)
        return found

    def end_stuck(self) -> None:
        """Look at the workers; call it again and again."""
        now, before = time.monotonic(), self._since
        self._since = {}
        for pid, test in self._running().items():
            test_before, since = before.get(pid, ("", now))
            self._since[pid] = test, since if test_before == test else now
            if now - self._since[pid][1] > self._limit:
                print(f"\n{test} does not end: its worker is aborted", flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)


def no_compiler() -> str | None:
    """What is not here of what torch compiles with in some engines' tests."""
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) and headers.exists():
        return None
    missing = headers if shutil.which(compiler) else compiler
    version = "python{}.{}-dev".format(*sys.version_info)
    return f"{missing} is not here; install g++ and {version}, with which torch compiles in tests."


def parse_shard(text: str) -> tuple[int, int]:
    """``2/4`` as (2, 4); ``typer.BadParameter`` for what is no part of a whole."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"{text!r} is no part of the tests; write 1/4 for the first of 4")
    return int(match[1]), int(match[2])


def main(
    everything: Annotated[bool, typer.Option("--all", help="Tests marked slow, too.")] = False,
    part: Annotated[str, typer.Option("--shard", help="Only part i/n, such as 1/4.")] = "1/1",
    record: Annotated[bool, typer.Option(help=f"Write {DURATIONS.relative_to(ROOT)}.")] = False,
) -> None:
    """Run the tests that answer in ten minutes, or all. Ends with 0 if some ran and none failed."""
    index, count = parse_shard(part)
    if problem := no_compiler():
        print(problem, file=sys.stderr)
        raise typer.Exit(1)
    known = json.loads(DURATIONS.read_text())["files"] if DURATIONS.exists() else {}
    files = in_order(shard(test_files(), known, index, count))
    title = ("make test-all" if everything else "make test") + (f" {part}" if count > 1 else "")
    if everything:
        os.environ.setdefault("SIM_STEPS", ALL_STEPS)
    # Dozens of interpreters would compile everything again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    results, began = Results(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Without files pytest would take all that there are.
        code = abs(run_pytest(arguments(files, everything), report)) if files else NO_TESTS
        results.read(report)
    seconds = time.monotonic() - began
    LAST.parent.mkdir(exist_ok=True)
    LAST.write_text(json.dumps(results.seconds, indent=1) + "\n")
    if record and everything and count == 1 and not code:
        table = {
            "command": "python -m tests.run --all --record",
            "seconds": round(seconds),
            "cores": len(os.sched_getaffinity(0)),
            "files": results.by_file(),
        }
        DURATIONS.write_text(json.dumps(table, indent=1) + "\n")
    print(results.summary(title, seconds), flush=True)
    if code == NO_TESTS:
        print(f"{title} selects no test.", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
