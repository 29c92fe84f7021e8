# SPDX-License-Identifier: Apache-2.0
"""Two engines in one folder of local_disk: the second one says so."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from lmcache_hybrid.storage.folder.folder_use import FolderUse, in_use
from lmcache_hybrid.storage.folder.lock_file import ENGINE_LOCK

from ..store_box import Box

WORDS = "is in use by another engine"


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks only files that are open for writing."""
    real = fcntl.flock

    def flock(number: int, how: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{number}"):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_second_engine_in_the_folder_is_told(tmp_path: Path, hybrid_log) -> None:
    first = Box("disk", tmp_path, None)
    assert WORDS not in hybrid_log.text
    second = Box("disk", tmp_path, None)
    assert hybrid_log.text.count(WORDS) == 1
    assert f"remote_url: fs://localhost:0{tmp_path}" in hybrid_log.text
    second.close()
    first.close()
    hybrid_log.clear()
    Box("disk", tmp_path, None).close()
    assert WORDS not in hybrid_log.text and not os.listdir(tmp_path)


def test_the_first_engine_is_told_when_it_starts_again(tmp_path: Path, hybrid_log) -> None:
    first = Box("disk", tmp_path, None)
    second = Box("disk", tmp_path, None)
    first.close()
    hybrid_log.clear()
    Box("disk", tmp_path, None).close()
    assert hybrid_log.text.count(WORDS) == 1 and in_use(str(tmp_path))
    second.close()
    assert not in_use(str(tmp_path))


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    use = FolderUse(str(tmp_path))
    assert use.hold()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        use.release()
        assert not in_use(str(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_ranks_of_one_engine_share_it(tmp_path: Path, hybrid_log) -> None:
    ranks = [Box("disk", tmp_path, None, rank=rank) for rank in (0, 1)]
    for each in ranks:
        each.close()
    assert WORDS not in hybrid_log.text


def test_on_nfs_a_file_is_locked(tmp_path: Path, nfs) -> None:
    first, second = FolderUse(str(tmp_path)), FolderUse(str(tmp_path))
    assert first.hold() and not second.hold()
    assert os.listdir(tmp_path) == [ENGINE_LOCK]
    first.release()
    assert second.hold()
    second.release()


def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch, hybrid_log) -> None:
    def no_locks(number: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError):
        FolderUse(str(tmp_path)).hold()
    Box("disk", tmp_path, None).close()
    assert WORDS not in hybrid_log.text


def test_who_takes_the_folder_at_the_same_moment_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    real, refused = fcntl.flock, []

    def flock(number: int, how: int) -> None:
        if how & fcntl.LOCK_SH and len(refused) < 2:
            refused.append(how)
            raise BlockingIOError
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    use = FolderUse(str(tmp_path))
    assert use.hold() and len(refused) == 2
    assert in_use(str(tmp_path)), "it has the lock"
    use.release()


def test_who_keeps_the_folder_alone_is_not_waited_for_long(tmp_path: Path) -> None:
    number = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    assert FolderUse(str(tmp_path)).hold() is False
    os.close(number)
