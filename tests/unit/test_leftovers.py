# SPDX-License-Identifier: Apache-2.0
"""A test session leaves nothing on the machine, however it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import leftovers
from tests.servers import heed_ctrl_c, wait_for

ROOT = Path(__file__).parents[2]
SECONDS = 100.0
# Leaves behind all that a test can, and says in the file "made" what that is.
LEAVES = """
import json, multiprocessing, os, socket, subprocess, tempfile, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tests import leftovers
import pytest
import redis

def test_leaves_everything(redis_url, tmp_path):
    leftovers.PROMETHEUS.mkdir(exist_ok=True)
    folder = tempfile.mkdtemp()
    Path(folder, "closed").mkdir(mode=0o500)
    Path(folder, "closed", "file").touch()
    for number in range(5_000):  # a session that does not wait for its guard ends before that
        Path(folder, str(number)).touch()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(folder + "/socket")
    listener.listen()
    shared = SharedMemory(create=True, size=1)
    children = [subprocess.Popen(["sleep", "100"], start_new_session=True)]
    for how in ("fork", "forkserver"):
        children.append(multiprocessing.get_context(how).Process(target=time.sleep, args=(100,)))
        # A worker of xdist would wait for them until its controller kills it, 20 seconds later.
        children[-1].daemon = "PYTEST_XDIST_WORKER" in os.environ
        children[-1].start()
    pids = [redis.Redis.from_url(redis_url).info()["process_id"], *(c.pid for c in children)]
    here = Path(__file__).parent
    here.joinpath("new").write_text(json.dumps([pids, folder, shared.name]))
    here.joinpath("new").rename(here / "made")
    assert os.environ["ENDING"] != "failure"
    if os.environ["ENDING"] != "success":
        time.sleep(100)
"""
# LMCache's folder is that of all sessions of a machine; here it is another one.
ELSEWHERE = """
from pathlib import Path
from tests import leftovers
leftovers.PROMETHEUS = Path(__file__).with_name("prometheus")
"""


def test_what_cannot_be_written_is_removed(tmp_path, monkeypatch):
    """The superuser removes it in any case, so this looks at the modes."""
    closed = tmp_path / "outer" / "closed"
    closed.mkdir(parents=True)
    (tmp_path / "outer" / "link").symlink_to("/")
    for folder in (closed, closed.parent):
        folder.chmod(0o500)
    modes: list[int] = []

    def note(path: str, ignore_errors: bool) -> None:
        assert (path, ignore_errors) == (str(tmp_path), True)
        modes.extend(folder.stat().st_mode & 0o777 for folder in (closed, closed.parent))

    monkeypatch.setattr(leftovers.shutil, "rmtree", note)
    leftovers.remove(str(tmp_path))
    assert modes == [0o700, 0o700]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary folder of a machine; short, as sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="m-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def running(pids: list[int]) -> list[int]:
    """Processes that have not ended; one that nobody has waited for has no command line."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def start(folder: Path, temporary: Path, ending: str, workers: int) -> subprocess.Popen:
    """A test session in ``folder``, on a machine of its own."""
    folder.joinpath("test_leaves.py").write_text(LEAVES)
    folder.joinpath("elsewhere.py").write_text(ELSEWHERE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TMPDIR": str(temporary), "ENDING": ending}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    # Files that pytest captures output in would give forks away, too.
    command = [sys.executable, "-m", "pytest", "--capture=no", "-p", "elsewhere"]
    command += ["-p", "tests.conftest"]
    with folder.joinpath("output").open("wb") as output:
        return subprocess.Popen(
            [*command, f"--numprocesses={workers}", "test_leaves.py"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )


def end(session: subprocess.Popen, ending: str) -> None:
    """Wait for the session's end, or bring it about."""
    if ending == "SIGINT":
        os.killpg(session.pid, signal.SIGINT)  # as a terminal does
    elif ending.startswith("SIG"):
        session.send_signal(signal.Signals[ending])
    session.wait(SECONDS)


def soon(condition: Callable[[], bool], what: str) -> None:
    """Fail unless it comes true soon."""
    with suppress(TimeoutError):
        wait_for(condition, what)
    assert condition(), what


@pytest.mark.parametrize(
    ("ending", "workers"),
    [
        ("success", 0),
        ("SIGINT", 0),
        ("SIGTERM", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("success", 2),
                ("failure", 0),
                ("failure", 2),
                ("SIGINT", 2),
                ("SIGKILL", 0),
            )
        ),
    ],
)
def test_nothing_is_left_after(ending: str, workers: int, temporary: Path, tmp_path: Path) -> None:
    session, made = start(tmp_path, temporary, ending, workers), tmp_path / "made"
    wait_for(lambda: made.exists() or session.poll() is not None, "no test ran", SECONDS)
    pids, folder, shared = json.loads(made.read_text())
    try:
        assert folder.startswith(f"{temporary}/") and Path("/dev/shm", shared).exists()
        end(session, ending)
        if ending in ("success", "failure", "SIGINT"):  # else the guard ends after the session
            assert not running(pids) and not list(temporary.iterdir())
            said = (tmp_path / "output").read_text()
            assert "The tests left processes, which were killed: " in said
        soon(lambda: not running(pids), "a process is left")
        soon(lambda: not list(temporary.iterdir()), "the temporary folder holds something")
        soon(lambda: not Path("/dev/shm", shared).exists(), "shared memory is left")
        assert f"{temporary}/" not in Path("/proc/net/unix").read_text()
        soon(lambda: not tmp_path.joinpath("prometheus").exists(), "LMCache's folder is left")
    finally:
        for pid in (session.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
