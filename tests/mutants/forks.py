# SPDX-License-Identifier: Apache-2.0
"""Runs tests in forks of a process that has imported torch, vLLM and pytest, nothing of ours."""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

# Ours, so that a fork takes them from the tree it is told. LMCache is not imported before a
# fork either: its compiled parts must come after vLLM's.
COLD = ("lmcache", "lmcache_hybrid", "vllm_patch", "tests", "benchmarks")
WARM = (
    "torch",
    "pytest",
    "hypothesis",
    "transformers",
    "vllm.engine.arg_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
)
PR_SET_PDEATHSIG = 1
# A test that takes longer counts as one that does not end.
TEST_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of tests said.

    Attributes:
        code: pytest's exit status; -1 when the process was killed or died.
        found: ID of the test that failed as a test should, "" if none did.
        other: "test: reason" of failures that are no find.
        seconds: wall time.
        output: what the run printed.
        files: seconds of the tests of each file.
    """

    code: int
    found: str
    other: list[str]
    seconds: float
    output: str
    files: dict[str, float] = dataclasses.field(default_factory=dict)


def warm() -> None:
    """Import what every run needs."""
    for name in WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Run:
    """One pytest session in a forked process group of its own.

    The parent calls ``poll`` until it returns an outcome; the whole group is dead then.
    """

    def __init__(self, tree: Path, scratch: Path, tests: list[str], limit: float) -> None:
        """Fork and start.

        Args:
            tree: copy of the project whose code and tests run.
            scratch: folder for the tests' files and what they print.
            tests: files or test IDs, relative to ``tree``.
            limit: seconds after which the run is killed.
        """
        self._scratch, self._limit = scratch, limit
        self._began = time.monotonic()
        scratch.mkdir(parents=True, exist_ok=True)
        for name in ("result.json", "output"):
            (scratch / name).unlink(missing_ok=True)
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _child(tree, scratch, tests)

    def poll(self) -> Outcome | None:
        """The outcome once the run has ended or was out of time, else None."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        late = time.monotonic() - self._began > self._limit
        if not pid and not late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self._pid, 0)
        return self._outcome("the run did not end" if late else f"wait status {status}")

    def _outcome(self, otherwise: str) -> Outcome:
        seconds = time.monotonic() - self._began
        output = (self._scratch / "output").read_text(errors="replace")
        try:
            result = json.loads((self._scratch / "result.json").read_text())
        except FileNotFoundError:
            return Outcome(-1, "", [otherwise], seconds, output)
        return Outcome(output=output, seconds=seconds, **result)


def _child(tree: Path, scratch: Path, tests: list[str]) -> None:
    """Run the tests and end the process; never returns."""
    code = 1
    try:
        os.setsid()
        # Whoever kills the parent ends this too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _turn_to(tree)
        import pytest

        from tests.mutants.watch import Watch

        watch = Watch()
        code = pytest.main(_options(scratch, tests), plugins=[watch])
        result = {"code": int(code), "found": watch.found, "other": watch.other}
        result["files"] = watch.files
        written = scratch / "result.new"
        written.write_text(json.dumps(result))
        written.replace(scratch / "result.json")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _options(scratch: Path, tests: list[str]) -> list[str]:
    options = ["-q", "--no-header", "--tb=short", "-m", "not engine and not slow", "--durations=0"]
    options += ["-p", "no:cacheprovider", "-o", "addopts=", "-o", f"timeout={TEST_SECONDS}"]
    return [*options, f"--basetemp={scratch / 'tmp'}", *tests]


def _turn_to(tree: Path) -> None:
    """Make ``tree`` the place that our packages come from, here and in processes started here."""
    for name in [n for n in sys.modules if n.split(".")[0] in COLD]:
        del sys.modules[name]
    root = str(Path(__file__).parents[2])
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", root))]
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)
