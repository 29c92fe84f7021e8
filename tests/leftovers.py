# SPDX-License-Identifier: Apache-2.0
"""Leaves the machine as the tests found it, however they end: success, Ctrl-C, SIGTERM, SIGKILL.

A test session has a temporary folder of its own. A guard, which is a process of its own, waits for
the session's end, kills the session's processes that are left, and removes the folder. Shared
memory goes with them: multiprocessing's resource tracker unlinks it once its users are dead.
"""

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# LMCache makes it empty, outside of the temporary folder.
PROMETHEUS = Path("/tmp/lmcache_prometheus")
# Never killed: it ends with the processes that it serves, and unlinks their shared memory.
TRACKER = "multiprocessing.resource_tracker"
# Nor are a fork server and its forks worth a word: they are there until their parent ends.
SILENT = "multiprocessing.forkserver"
KILL_SECONDS = 10.0


class Session:
    """A temporary folder for this process and all that it starts, until it ends.

    Paths of sockets have at most 107 characters, so the folder's name is short.
    """

    def __init__(self) -> None:
        self._owner, self._folder = os.getpid(), tempfile.mkdtemp(prefix="lh-")
        os.chmod(self._folder, 0o711)  # users of their own, which some tests have, come through
        made = [] if PROMETHEUS.exists() else [str(PROMETHEUS)]
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", __file__, self._folder, str(self._owner), *made],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # neither Ctrl-C nor who kills our group reaches it
        )
        # What is started knows the folder from its environment, what is only forked from this.
        os.open(self._folder, os.O_RDONLY)
        os.environ["TMPDIR"] = tempfile.tempdir = self._folder
        os.environ["SPT_NOENV"] = "1"  # vLLM's process titles would overwrite the environment
        atexit.register(self._end)

    def kill(self) -> str:
        """Kill what the tests have left; returns command lines.

        Python waits at its end for processes of multiprocessing's, before :meth:`_end`.
        """
        assert self._guard.stdin and self._guard.stdout
        self._guard.stdin.write("\n")
        self._guard.stdin.flush()
        return self._guard.stdout.readline().strip()

    def _end(self) -> None:
        if os.getpid() == self._owner:  # not a fork
            self._guard.communicate()


def guard(folder: str, owner: int, made: list[str]) -> None:
    """Kill when asked; once ``owner`` or standard input has ended, clean up.

    Args:
        made: empty folders to remove, too.
    """
    end = os.pidfd_open(owner)
    while end not in select.select([sys.stdin, end], [], [])[0] and sys.stdin.readline():
        killed = _kill(folder, owner)
        print(", ".join(command for command in killed if SILENT not in command), flush=True)
    _kill(folder, owner)
    remove(folder)
    for each in made:
        with suppress(OSError):  # not there, or no longer empty
            os.rmdir(each)


def remove(folder: str) -> None:
    """Remove a folder with all that is in it, as far as it can be removed."""
    for path, folders, _ in os.walk(folder):
        for each in (os.path.join(path, name) for name in folders):
            if not os.path.islink(each):
                os.chmod(each, 0o700)  # tests make some that cannot be written
    shutil.rmtree(folder, ignore_errors=True)


def _kill(folder: str, owner: int) -> list[str]:
    """Kill the session's processes; returns their command lines."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + KILL_SECONDS
    while (left := _processes(folder, owner)) and time.monotonic() < deadline:
        killed |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return list(killed.values())


def _processes(folder: str, owner: int) -> dict[int, str]:
    """Command lines of the session's processes but ``owner``, by pid."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            command = words.decode(errors="replace").strip()
            # One that has ended has no command line.
            if not command or TRACKER in command or int(process.name) == owner:
                continue
            if folder.encode() in (process / "environ").read_bytes() or _holds(process, folder):
                found[int(process.name)] = command[:80]
    return found


def _holds(process: Path, folder: str) -> bool:
    """Whether a process has the folder open, or writes its output to a file there.

    Valkey overwrites its environment with its title.
    """
    for file in process.glob("fd/*"):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(file)
            if target == folder or file.name in ("1", "2") and target.startswith(f"{folder}/"):
                return True
    return False


if __name__ == "__main__":
    guard(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
