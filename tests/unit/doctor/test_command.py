# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid doctor``: exit codes, and checks that fail, die or hang."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import threading

import pytest
import yaml
from typer.testing import CliRunner

from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.doctor import __main__ as doctor
from lmcache_hybrid.tools.doctor.finding import Finding

from ..helpers import model
from .findings import ERROR, OK, SKIPPED, TRANSFER, WARNING, only

# The package's attribute of that name is the command.
cli_doctor = importlib.import_module("lmcache_hybrid.tools.cli.doctor")


def run(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *args], env={"COLUMNS": "160"})
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    "args",
    [
        ["--", "--max-model-len", "4096"],
        ["--max-model-len", "4096", "MODEL"],
        ["/no/such/model"],
        ["./no/such/model"],
        ["--lmcache-config", "/no/such/file"],
        ["--no-such-option"],
    ],
    ids=str,
)
def test_usage_errors(args):
    run(*args, exit_code=2)


@pytest.mark.parametrize(
    "args, flags",
    [
        ([], []),
        (["--json", "--", "-tp", "2", "--enforce-eager"], ["-tp", "2", "--enforce-eager"]),
        (["--max-model-len", "4k", "--json"], ["--max-model-len", "4k"]),
        (["-dph", "-asc", "2", "-ah"], ["-dph", "-asc", "2", "-ah"]),
        (
            ["--kv-transfer-config", "{}", "--prefix-match-unit", "64", "--", "-tp", "2"],
            ["-tp", "2", "--kv-transfer-config", "{}", "--prefix-match-unit", "64"],
        ),
    ],
    ids=str,
)
def test_what_it_does_not_know_are_flags_of_vllm(monkeypatch, args, flags):
    asked = []
    monkeypatch.setattr(
        cli_doctor, "diagnose", lambda *what: (each for each in asked.append(what) or ())
    )
    run("some/model", *args)
    assert asked == [("some/model", flags)]


@pytest.mark.parametrize("args", [["-h"], ["--help"], ["some/model", "-h", "-tp", "2"]], ids=str)
def test_help_is_a_word_of_its_own(args):
    assert "Check installation, settings, stores and a model" in run(*args)


@pytest.mark.parametrize("status, code", [(OK, 0), (WARNING, 0), (SKIPPED, 0), (ERROR, 1)])
def test_exit_codes(monkeypatch, status, code):
    finding = Finding("disk", status, "A [red]message[/]\x1b[2J.", "Do this.")
    monkeypatch.setattr(cli_doctor, "diagnose", lambda *a: (each for each in [finding]))
    text = run(exit_code=code)
    assert "A [red]message[/]?[2J." in text and "Do this." in text and status.value in text
    assert json.loads(run("--json", exit_code=code)) == [dataclasses.asdict(finding)]


def test_the_whole_of_it(tmp_path):
    """In processes of their own, as a user runs it; also that another process hashes alike."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump({"local_disk": str(tmp_path / "d"), "max_local_disk_size": 0.1}))
    transfer = json.dumps(TRANSFER)
    text = run(
        model("lfm2"), "--lmcache-config", str(file), "--kv-transfer-config", transfer, "--json"
    )
    found = {}
    for finding in json.loads(text):
        found.setdefault(finding["check"], []).append(finding["status"])
    checks = "vLLM", "LMCache", "plugin", "block hash", "block size", "options", "local_disk"
    assert [found[check] for check in checks] == [["ok"]] * len(checks), text


def test_a_check_that_fails_hides_nothing():
    def check_weather(context):
        yield Finding("weather", OK, "Fine.")
        raise RuntimeError("rain\nand wind")

    first, second = doctor.guarded(check_weather, None)
    assert first.status == OK and second.status == ERROR
    assert second.message == "The check itself failed: RuntimeError: rain and wind."


def test_checks_that_die_are_told(monkeypatch):
    """A crash in a library must not look like health."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert json.loads(run("--json", exit_code=1))[-1]["message"].startswith("The checks ended")


CHECKS = """
import sys, time
from pathlib import Path
from lmcache_hybrid.tools.doctor import __main__ as doctor
from lmcache_hybrid.tools.doctor.finding import ok

def findings(model, flags):
    try:
        yield ok("first", "Fine.")
        {then}
    finally:
        time.sleep(0.1)
        Path({mark!r}).touch()

doctor.findings = findings
sys.argv[1:] = sys.argv[3:]  # without -m MODULE
doctor.main()
"""


def checks_that(then: str, tmp_path, monkeypatch):
    """Put these in the place of the checks; returns the file that marks their clean end."""
    mark, code, python = (tmp_path / name for name in ("mark", "checks.py", "python"))
    code.write_text(CHECKS.format(then=then, mark=str(mark)))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return mark


def assert_no_watchdog() -> None:
    """One that still waits would keep this process from ending."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
            assert not thread.is_alive()


def test_who_does_not_want_to_wait_stops_the_checks_gently(tmp_path, monkeypatch):
    mark = checks_that("time.sleep(600)", tmp_path, monkeypatch)
    found = cli_doctor.diagnose(None)
    assert next(found).check == "first"
    assert not mark.exists()
    found.close()  # as Ctrl-C does
    assert mark.exists()
    assert_no_watchdog()


def test_checks_that_hang_are_stopped_gently_and_told(tmp_path, monkeypatch):
    mark = checks_that("time.sleep(600)", tmp_path, monkeypatch)
    found = cli_doctor.diagnose(None)
    assert next(found).check == "first"
    (watchdog,) = (t for t in threading.enumerate() if isinstance(t, threading.Timer))
    watchdog.function(*watchdog.args)
    assert only(found).status == ERROR and mark.exists()


def test_checks_that_cannot_be_stopped_are_killed(tmp_path, monkeypatch):
    mark = checks_that(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); yield ok('deaf', '.');"
        "time.sleep(600)",
        tmp_path,
        monkeypatch,
    )
    monkeypatch.setattr(cli_doctor, "GRACE_SECONDS", 0.1)
    found = cli_doctor.diagnose(None)
    assert [next(found).check for _ in range(2)] == ["first", "deaf"]
    found.close()
    assert not mark.exists()
    assert_no_watchdog()


def test_checks_end_when_nobody_reads_them(tmp_path, monkeypatch):
    """The command was killed: what has begun is cleaned up all the same."""
    then = "while True: yield ok('next', '.')"
    mark = checks_that(then, tmp_path, monkeypatch)
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [tmp_path / "python", "-m", "lmcache_hybrid.tools.doctor", str(write_fd)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(write_fd,),
        text=True,
    )
    os.close(write_fd)
    os.close(read_fd)
    process.communicate('{"model": null, "flags": []}', timeout=60)
    assert process.returncode == 1 and mark.exists()
