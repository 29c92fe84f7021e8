# SPDX-License-Identifier: Apache-2.0
"""What ``make test`` and ``make test-all`` select, and what they say at the end."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from typer import BadParameter, Exit

from tests import run, turns
from tests.servers import wait_for

KNOWN = {"a": 100.0, "b": 60.0, "c": 50.0, "d": 1.0, "e": 1.0}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_file_is_in_one_shard(count):
    files = run.test_files()
    parts = [run.shard(files, {}, index + 1, count) for index in range(count)]
    assert sorted(sum(parts, [])) == files and len(files) > 100
    assert all(parts)


def test_shards_take_equally_long_by_the_recorded_durations():
    assert run.shard([*KNOWN], KNOWN, 1, 2) == ["a", "d", "e"]
    assert run.shard([*KNOWN], KNOWN, 2, 2) == ["b", "c"]


def test_a_file_that_was_never_timed_is_neither_first_nor_last():
    assert run.longest_first(["d", "new", "a"], KNOWN) == ["a", "new", "d"]


@pytest.mark.parametrize("text", ["", "4", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b"])
def test_what_is_no_part_is_refused_in_one_sentence(text):
    with pytest.raises(BadParameter, match="is no part of the tests; write 1/4"):
        run.parse_shard(text)


def test_all_leaves_out_no_mark_and_the_quick_run_leaves_out_slow():
    files = ["tests/unit/test_run.py", "tests/e2e/test_hits.py"]
    mark, *quick = run.arguments(files, everything=False)
    assert mark == "-m=not slow" and quick == run.arguments(files, everything=True)
    assert quick[-2:] == files


def test_those_that_run_alone_come_when_others_are_short():
    files = run.in_order(run.test_files())
    mark = f"mark.{turns.MARK}"
    alone = [at for at, file in enumerate(files) if mark in (run.ROOT / file).read_text()]
    assert sorted(files) == run.test_files() and "tests/e2e/test_scale.py" in files[alone[0] :]
    assert alone == list(range(alone[0], alone[-1] + 1))
    assert files[alone[0] - 1] < "tests/unit/test_" <= files[alone[-1] + 1]


@pytest.mark.timeout(60)
def test_nothing_runs_beside_a_test_that_runs_alone(tmp_path: Path, monkeypatch):
    """Nor does that wait for ever while others come one after the other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running: Counter[str] = Counter()
    over = threading.Event()

    def run_others(worker: str) -> None:
        while not over.is_set():
            with turns.turn(alone=False):
                running[worker] = 1
                time.sleep(0.01)
                running[worker] = 0

    workers = [threading.Thread(target=run_others, args=(name,)) for name in "abc"]
    for worker in workers:
        worker.start()
    try:
        for _ in range(5):
            wait_for(lambda: running.total() > 1, "others do not run side by side", 20)
            with turns.turn(alone=True):
                before = running.total()
                time.sleep(0.05)
                assert before == running.total() == 0
    finally:
        over.set()
        for worker in workers:
            worker.join()


def test_a_run_is_summed_up_with_its_slowest_tests(tmp_path: Path):
    """From what pytest-xdist really writes: fixtures count, and so do tests that fail."""
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n"
        "@pytest.fixture\n"
        "def slow(): time.sleep(0.2)\n"
        "def test_slow(slow): pass\n"
        "@pytest.mark.parametrize('n', range(6))\n"
        "def test_quick(n): pass\n"
        "def test_wrong(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_not_here(): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o"]
    command += ["junit_family=xunit1", "-n2", "--dist=loadfile", f"--rootdir={tmp_path}"]
    subprocess.run([*command, "."], cwd=tmp_path, capture_output=True)
    results = run.Results()
    results.read(report)
    results.read(tmp_path / "of a run that was killed")
    assert results.counts == {"passed": 7, "failed": 1, "skipped": 1}
    assert results.by_file().keys() == {"test_it.py"}
    first, slowest, *others = results.summary("make test", 544.6).splitlines()
    assert first == "make test: 7 passed, 1 failed, 1 skipped in 9 min 5 s. The slowest:"
    assert slowest.split()[1:] == ["s", "test_it.py::test_slow"] and len(others) == 4


def test_a_part_without_files_is_no_success(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(run, "LAST", tmp_path / "tests.json")
    with pytest.raises(Exit) as ended:
        run.main(everything=False, part="900/900", record=False)
    assert ended.value.exit_code == run.NO_TESTS
    assert capsys.readouterr().err == "make test 900/900 selects no test.\n"


@pytest.mark.slow
def test_a_run_that_is_ended_ends_its_pytest(tmp_path: Path):
    """As ``make`` does with SIGTERM."""
    pid = tmp_path / "pid"
    (tmp_path / "test_it.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def test_long():\n"
        f"    Path({str(pid)!r}).symlink_to(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    arguments = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'files'}", str(tmp_path)]
    arguments += ["--numprocesses=1"]
    code = "from pathlib import Path; from tests.run import run_pytest\n"
    code += f"raise SystemExit(-run_pytest({arguments}, Path({str(tmp_path)!r}, 'report')))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=run.ROOT, stdout=subprocess.PIPE)
    wait_for(lambda: pid.is_symlink() or process.poll() is not None, "no test runs", 60)
    process.terminate()
    said, _ = process.communicate()
    assert process.returncode == signal.SIGTERM
    assert b"Ended while it ran: test_it.py::test_long" in said
    wait_for(lambda: not Path("/proc", os.readlink(pid)).exists(), "its worker goes on", 20)


def run_files(tmp_path: Path, files: dict[str, str], *more: str) -> subprocess.Popen[str]:
    """pytest on these files, as in a run."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = run.arguments(sorted(files), everything=True)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", *more, *given],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_run_ends_when_a_worker_crashes(tmp_path: Path):
    """pytest-xdist would wait for ever where the worker had done a file before."""
    good, crash = "def test_good(): pass\n", "import os\ndef test_crash(): os.abort()\n"
    files = {f"test_{number}.py": good for number in range(6)} | {"test_3.py": crash}
    process = run_files(tmp_path, files)
    try:
        said, stacks = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "crashed while running 'test_3.py::test_crash'" in said
    assert "in test_crash" in stacks


@pytest.mark.slow
def test_a_test_that_its_timeout_cannot_end_is_ended(tmp_path: Path):
    """As a call into C that never returns: no handler of a signal runs."""
    stuck = (
        "import signal, time\n"
        "def test_stuck():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "    time.sleep(60)\n"
    )
    process = run_files(tmp_path, {"test_it.py": stuck}, "--timeout=1")
    watch = run.Watch(process.pid, limit=2.0)
    while process.poll() is None:
        watch.end_stuck()
        time.sleep(0.1)
    said, stacks = process.communicate()
    assert "crashed while running 'test_it.py::test_stuck'" in said
    assert "in test_stuck" in stacks  # where it was
