# SPDX-License-Identifier: Apache-2.0
"""Of several processes that clean one folder one does, and another goes on when it is killed."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmcache_hybrid.storage.folder.lock_file import CLEANER_LOCK, FolderLock

from ..other_users import ALICE, BOB, GROUP, as_user, needs_root, open_tmp  # noqa: F401
from ..store_box import until

ROOT = Path(__file__).parents[3]
SIZE = 1000
START_SECONDS = 100
# Prints a line for each look at the folder, and for each deleted record. Its threads write whole
# lines: print() writes the end of a line after the line.
CLEANER = """
import os, sys
from lmcache_hybrid.config.folders import FolderLimits
from lmcache_hybrid.storage.folder import cleaner

say = lambda word: os.write(1, word + b"\\n")
files = cleaner.record_files
cleaner.record_files = lambda folder: say(b"look") and files(folder)
folder, limit = sys.argv[1], int(sys.argv[2])
running = cleaner.FolderCleaner(
    [folder], FolderLimits(max_bytes=limit), lambda *_: say(b"deleted"), pause=0.02
)
say(b"ready")
sys.stdin.read()
"""


class Process:
    """One process that cleans, and what it printed so far."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLEANER, str(folder), str(limit)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._ready.wait(START_SECONDS), f"the cleaner does not start: {self.lines[:9]}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in map(str.strip, self.process.stdout):
            self.lines.append(line)
            if line == "ready":
                self._ready.set()

    def count(self, line: str) -> int:
        return self.lines.count(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._reader.join()


@pytest.fixture
def start(tmp_path):
    made: list[Process] = []

    def make(limit: int) -> Process:
        made.append(Process(tmp_path, limit))
        return made[-1]

    yield make
    for process in made:
        process.kill()


def write(folder: Path, first: int, last: int) -> None:
    for number in range(first, last):
        name = f"m@1@0@{number:x}@uint8@hybrid%a0-0123456789abcdef.data"
        (folder / name).write_bytes(bytes(SIZE))


def records(folder: Path) -> int:
    return len(list(folder.glob("*.data")))


@pytest.mark.timeout(300)
def test_one_cleans_and_when_it_is_killed_another_goes_on(start, tmp_path):
    one = start(10 * SIZE)
    until(lambda: one.count("look") > 0, "nobody looked")
    other = start(10 * SIZE)
    write(tmp_path, 0, 40)
    until(lambda: records(tmp_path) <= 10, "nobody cleaned")
    looks = one.count("look")
    until(lambda: one.count("look") > looks, "it does not look again")
    assert one.count("deleted") == 40 - records(tmp_path)
    assert other.count("look") == other.count("deleted") == 0
    one.kill()
    before = records(tmp_path)
    write(tmp_path, 40, 80)
    until(lambda: records(tmp_path) <= 10, "nobody went on")
    until(lambda: other.count("deleted") == before + 40 - records(tmp_path), "not counted")


def test_a_lock_is_held_by_one(tmp_path):
    one, other = FolderLock(str(tmp_path)), FolderLock(str(tmp_path))
    assert one.hold() and one.hold() and not other.hold()
    one.release()
    one.release()
    assert other.hold() and not one.hold()


def test_a_lock_file_that_was_deleted_is_no_lock(tmp_path):
    """Somebody emptied the folder: the next one makes a new file, so the old lock is void."""
    one, other = FolderLock(str(tmp_path)), FolderLock(str(tmp_path))
    assert one.hold()
    (tmp_path / CLEANER_LOCK).unlink()
    assert other.hold() and not one.hold()
    other.release()
    assert one.hold()
    # Its holder makes it anew, too.
    (tmp_path / CLEANER_LOCK).unlink()
    assert one.hold() and not other.hold()


@pytest.mark.parametrize(
    "mode, umask, expected",
    [(0o700, 0o077, 0o600), (0o770, 0o002, 0o664), (0o770, 0o027, 0o640), (0o2770, 0o077, 0o660)],
    ids=oct,
)
def test_who_may_lock(tmp_path, mode, umask, expected):
    """Whoever may read records: in a folder of a group its members, elsewhere by the umask."""
    tmp_path.chmod(mode)
    before = os.umask(umask)
    try:
        assert FolderLock(str(tmp_path)).hold()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / CLEANER_LOCK).stat().st_mode) == expected


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444], ids=oct)
def test_a_lock_file_that_is_there_stays_as_it_is(tmp_path, mode):
    tmp_path.chmod(0o2770)
    (tmp_path / CLEANER_LOCK).touch()
    (tmp_path / CLEANER_LOCK).chmod(mode)
    assert FolderLock(str(tmp_path)).hold()
    assert stat.S_IMODE((tmp_path / CLEANER_LOCK).stat().st_mode) == mode


@needs_root
@pytest.mark.parametrize("mode", [0o770, 0o2770, 0o3770], ids=oct)
@pytest.mark.parametrize("umask", [0o002, 0o027], ids=oct)
def test_users_who_share_a_folder_take_turns(open_tmp, mode, umask):  # noqa: F811
    os.chown(open_tmp, 0, GROUP)
    open_tmp.chmod(mode)
    for user in (ALICE, BOB, ALICE):
        assert as_user(user, FolderLock(str(open_tmp)).hold, umask)
    mine = FolderLock(str(open_tmp))
    assert mine.hold() and as_user(BOB, lambda: [FolderLock(str(open_tmp)).hold()]) == [False]


@pytest.mark.parametrize("make", [os.link, os.mkfifo, os.mkdir], ids=lambda make: make.__name__)
def test_what_is_no_file_of_its_own_is_no_lock_and_stays_as_it_is(tmp_path, make):
    """Another member of the group may have linked a private file there."""
    tmp_path.chmod(0o2770)
    private, there = tmp_path / "private", tmp_path / CLEANER_LOCK
    private.touch(0o600)
    make(private, there) if make is os.link else make(there, 0o600)
    before = [path.stat().st_mode for path in (private, there)]
    with pytest.raises(OSError):
        FolderLock(str(tmp_path)).hold()
    assert [path.stat().st_mode for path in (private, there)] == before


def test_a_lock_file_deleted_before_it_is_opened_is_made_by_the_next_call(tmp_path, monkeypatch):
    one, made = FolderLock(str(tmp_path)), []
    with monkeypatch.context() as patch:
        patch.setattr(one, "_create", lambda: made.append(None))
        assert not one.hold() and made
    assert one.hold()


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / CLEANER_LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        FolderLock(str(tmp_path)).hold()
    assert os.listdir(tmp_path) == [CLEANER_LOCK]
