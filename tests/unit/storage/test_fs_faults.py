# SPDX-License-Identifier: Apache-2.0
"""Folders whose disk or file server fails, hangs or is full; of ``local_disk``, too.

The system's own functions are replaced where they fail: no test can make a disk fail, or have a
file server hang, on every machine.
"""

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from lmcache.v1 import memory_management

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage import hidden_records
from lmcache_hybrid.storage.folder import record_io
from lmcache_hybrid.storage.folder.record_files import WRAPPER_BYTES, wrapper_of
from lmcache_hybrid.storage.remote import fs

from ..helpers import put
from ..store_box import KEYS, LARGE, SIZE, Box, N, until
from .test_fs_connector import assert_whole, connector_of

MANY = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(32)]
LEFT = [key for key in KEYS if key != KEYS[1]]
folders = pytest.mark.parametrize("kind", ["fs", "disk"])


def failing(function: Callable, code: int, path: str, times: int = 1 << 30) -> Callable:
    """A function of the system that fails for one file."""
    left = [times]

    def fails(first, *args, **kwargs):
        name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
        if str(name) == path and left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return function(first, *args, **kwargs)

    return fails


def load_fails(box: Box, keys=KEYS) -> str:
    with pytest.raises((LoadError, RecordError)) as failed:
        box.read(keys)
    return failed.value.reason


# Unreadable is not damaged


@folders
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENFILE, errno.ESTALE])
def test_a_record_that_cannot_be_read_stays_and_is_a_miss(box, monkeypatch, kind, code):
    box = box(kind).write()
    path = str(box.path(KEYS[1]))
    stored = box.raw(KEYS[1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(os.open, code, path))
        assert load_fails(box) == "unreadable"
        for _ in range(3):
            assert list(box.store.locate(KEYS)) == LEFT, "promised again"
        assert_whole(box, LEFT)
    assert list(box.store.locate(KEYS)) == LEFT
    assert box.raw(KEYS[1]) == stored
    monkeypatch.setattr(hidden_records, "HIDDEN_SECONDS", -1.0)
    box.store._damaged.unreadable(box.store.engine_key(KEYS[1]), box.store.locate(LEFT)[LEFT[0]])
    assert_whole(box)
    box.assert_pool_is_free()


def test_a_read_that_breaks_off_in_the_middle_damages_nothing(box, monkeypatch):
    monkeypatch.setattr(record_io, "STEP_BYTES", 100)
    box = box("fs").write()
    path, readv, parts = str(box.path(KEYS[1])), os.readv, []

    def breaks(number, buffers):
        if os.readlink(f"/proc/self/fd/{number}") == path:
            parts.append(1)
            if len(parts) == 3:
                raise OSError(errno.EIO, "of the test")
        return readv(number, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", breaks)
        assert load_fails(box) == "unreadable"
    assert list(box.store.locate(KEYS)) == LEFT
    box.write([KEYS[1]])
    assert_whole(box)
    box.assert_pool_is_free()


@folders
def test_a_process_without_free_files_deletes_none(box, kind):
    """EMFILE, the real one: one load failed and one of four files was gone."""
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(KEYS))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(LoadError):
            box.fetch(claim, KEYS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(box.path(key).exists() for key in KEYS)
    box.store._damaged.clear()
    assert_whole(box)


def test_a_file_that_was_replaced_on_its_server_is_opened_again(box, monkeypatch):
    """ESTALE: another engine wrote the record between a lookup of its name and a read."""
    box = box("fs").write()
    path = str(box.path(KEYS[1]))
    for function in ("open", "readv", "stat"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing(getattr(os, function), errno.ESTALE, path, 1))
            assert_whole(box)
    box.assert_pool_is_free()


def test_a_file_that_goes_between_lookup_and_read_is_gone(box):
    box = box("fs").write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.remove(KEYS[1])
    with pytest.raises(LoadError) as failed:
        box.fetch(claim, KEYS)
    assert failed.value.reason == "gone"
    assert_whole(box, LEFT)
    box.write([KEYS[1]])
    assert list(box.store.locate(KEYS)) == KEYS, "hidden, although it was written anew"


@pytest.mark.parametrize("size", [0, 10, WRAPPER_BYTES, WRAPPER_BYTES + 50, 1 << 16])
def test_a_file_of_the_wrong_size_is_damaged_and_deleted(box, size):
    box = box("fs").write()
    path = box.path(KEYS[1])
    path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
    assert load_fails(box) == "wrapper"
    assert not path.exists() and list(box.store.locate(KEYS)) == LEFT
    box.assert_pool_is_free()


def test_a_file_that_is_larger_than_any_record_is_damaged_and_deleted(box):
    """Although LMCache's header fits."""
    box = box("fs").write()
    size = 1 << 16
    box.path(KEYS[1]).write_bytes(wrapper_of(size) + bytes(size))
    assert load_fails(box) == "wrapper"
    assert not box.path(KEYS[1]).exists()
    box.assert_pool_is_free()


def test_a_damaged_record_that_is_replaced_meanwhile_stays(box, monkeypatch):
    """Another engine stored it anew after the read failed."""
    box = box("fs").write()
    whole = box.path(KEYS[1]).read_bytes()
    box.path(KEYS[1]).write_bytes(whole[:50])
    fate = record_io.fate

    def later(path: str, largest: int) -> record_io.Fate:
        box.path(KEYS[1]).write_bytes(whole)
        return fate(path, largest)

    monkeypatch.setattr(record_io, "fate", later)
    assert load_fails(box) == "unreadable"
    assert box.path(KEYS[1]).read_bytes() == whole


def test_a_folder_that_cannot_be_searched_is_empty_with_one_warning(box, monkeypatch, hybrid_log):
    box = box("fs").write()
    stat = os.stat
    for key in KEYS:
        monkeypatch.setattr(os, "stat", failing(os.stat, errno.EACCES, str(box.path(key))))
    for _ in range(3):
        assert box.store.locate(KEYS) == {}
    assert len([r for r in hybrid_log.records if "cannot be looked for" in r.getMessage()]) == 1
    monkeypatch.setattr(os, "stat", stat)
    assert_whole(box)


# Full


@pytest.mark.parametrize("function", ["open", "writev", "close", "replace"])
def test_a_full_disk_is_counted_and_costs_no_record(box, monkeypatch, hybrid_log, function):
    """On NFS the server may say so when the file is closed."""
    box = box("fs").write(KEYS[:1])
    call = getattr(os, function)

    def full(first, *args, **kwargs):
        name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
        if "-writing-" in str(name) and function != "open" or "O_EXCL" in opened(args):
            if function == "close":
                call(first)
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(first, *args, **kwargs)

    def opened(args) -> str:
        return "O_EXCL" if function == "open" and args and args[0] & os.O_EXCL else ""

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        put(box.store, KEYS, SIZE)
        until(lambda: box.store.failed_writes["RemoteBackend"] == len(KEYS), "not counted")
    until(lambda: box.used() == box.start, "failed writes keep their buffers")
    assert [path.name for path in box.folder.iterdir()] == [box.path(KEYS[0]).name]
    assert_whole(box, KEYS[:1])
    assert len([r for r in hybrid_log.records if "cannot be written" in r.getMessage()]) == 1
    box.write()
    assert_whole(box)


# A file server that hangs


@contextmanager
def hangs(monkeypatch, function: str) -> Iterator[set[int]]:
    """A function of the system that does not return; gives the threads that are in it."""
    call, answers, inside = getattr(os, function), threading.Event(), set()

    def waits(*args, **kwargs):
        if threading.current_thread().name.startswith("hybrid-fs-"):
            inside.add(threading.get_ident())
            answers.wait(60)
        return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, waits)
        try:
            yield inside
        finally:
            answers.set()


def test_lookups_that_hang_miss_and_keep_a_fixed_number_of_threads(box, monkeypatch, hybrid_log):
    box = box("fs", blocking_timeout_secs=0.2).write()
    monkeypatch.setattr(fs, "LEAST_ASKED", 1)
    monkeypatch.setattr("lmcache_hybrid.storage.silent_lookups.PAUSE_SECONDS", 0.0)
    with hangs(monkeypatch, "stat") as inside:
        for _ in range(20):
            assert box.store.locate(MANY) == {}
        assert len(inside) == fs.ASKERS
        assert connector_of(box)._askers._jobs.qsize() <= fs.ASKERS, "questions pile up"
    assert "did not answer a cache lookup in time" in hybrid_log.text
    until(lambda: len(box.store.locate(KEYS)) == len(KEYS), "lookups do not recover")
    assert_whole(box)


def test_reads_that_hang_keep_a_fixed_number_of_buffers_and_lookups_miss(box, monkeypatch):
    box = box("fs", blocking_timeout_secs=0.2).write(MANY)
    monkeypatch.setattr("lmcache_hybrid.storage.silent_lookups.PAUSE_SECONDS", 0.0)
    claims = [box.store.claim(dict.fromkeys(MANY, "RemoteBackend")) for _ in range(3)]
    with hangs(monkeypatch, "readv") as inside:
        for claim in claims:
            for at in range(0, len(MANY), 8):
                with pytest.raises(LoadError) as failed:
                    box.store.fetch(claim, MANY[at : at + 8])
                assert failed.value.reason == "unreachable"
            claim.made = time.monotonic()  # as if it had been promised just now
        assert len(inside) == fs.READERS
        until(lambda: connector_of(box)._reading.stuck(0.2), "nobody notices")
        assert box.store.locate(MANY) == {}, "promised, although no read ends"
        held = box.used() - box.start
        assert 0 < held <= fs.READERS * (1 << 13)
    until(lambda: box.used() == box.start, "late reads keep their memory")
    until(lambda: len(box.store.locate(MANY)) == len(MANY), "lookups do not recover")
    assert_whole(box, MANY)
    assert all(box.path(key).exists() for key in MANY)


def test_a_slow_read_does_not_hold_up_those_behind_it(box, monkeypatch):
    """It ends once all others have begun."""
    box = box("fs").write(MANY)
    readv, slow = os.readv, str(box.path(MANY[0]))
    begun, all_begun = set(), threading.Event()

    def reads(number, buffers):
        path = os.readlink(f"/proc/self/fd/{number}")
        begun.add(path)
        if len(begun) == len(MANY):
            all_begun.set()
        if path == slow:
            assert all_begun.wait(20), "nothing is read meanwhile"
        return readv(number, buffers)

    monkeypatch.setattr(os, "readv", reads)
    assert_whole(box, MANY)
    box.assert_pool_is_free()


def test_after_a_read_that_failed_no_more_begin(box, monkeypatch):
    box = box("fs").write(MANY)
    box.remove(MANY[0])
    get, asked, failed_first = box.backend.get_blocking, [], threading.Event()

    def asks(key):
        asked.append(key)
        memory = get(key)
        if memory is None:
            failed_first.set()
        failed_first.wait(20)
        return memory

    monkeypatch.setattr(box.backend, "get_blocking", asks)
    claim = box.store.claim(dict.fromkeys(MANY, "RemoteBackend"))
    with pytest.raises(LoadError) as failed:
        box.fetch(claim, MANY)
    assert failed.value.reason == "gone" and len(asked) < len(MANY)
    box.assert_pool_is_free()


def test_writes_behind_those_that_hang_fail_and_release_their_buffers(box, monkeypatch):
    monkeypatch.setattr(fs, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(fs, "LOOK_SECONDS", 0.05)
    box = box("fs").write(KEYS[:1])
    with hangs(monkeypatch, "writev") as inside:
        put(box.store, MANY[: fs.WRITERS], SIZE)
        until(lambda: len(inside) == fs.WRITERS, "nothing hangs")
        put(box.store, MANY[fs.WRITERS :], SIZE)
        waiting = len(MANY) - fs.WRITERS
        until(lambda: box.store.failed_writes["RemoteBackend"] == waiting, "nothing is given up")
        until(lambda: 0 < box.used() - box.start <= fs.WRITERS * (1 << 13), "memory stays taken")
        put(box.store, MANY, SIZE)  # and those that come later, at once
        until(
            lambda: box.store.failed_writes["RemoteBackend"] == waiting + len(MANY),
            "later ones wait",
        )
        assert connector_of(box)._writers._jobs.qsize() <= waiting, "later ones pile up"
        assert_whole(box, KEYS[:1])
    until(lambda: box.used() == box.start, "late writes keep their memory")
    box.write(MANY)
    assert_whole(box, MANY)


def test_a_write_that_hangs_beside_others_holds_its_own_memory_alone(box, monkeypatch):
    """LMCache holds that of all records of a call until it ends."""
    monkeypatch.setattr(fs, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(fs, "LOOK_SECONDS", 0.05)
    box, writev, first, answers = box("fs"), os.writev, [True], threading.Event()

    def one_waits(*args):
        if first:
            first.clear()
            assert answers.wait(60)
        return writev(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", one_waits)
        put(box.store, MANY, SIZE)
        until(lambda: 0 < box.used() - box.start <= 1 << 13, "the others' memory stays taken")
        assert not box.store.failed_writes
        answers.set()
        until(lambda: box.used() == box.start, "the late write keeps its memory")
    assert_whole(box, MANY)


def test_a_slow_server_is_none_that_hangs(box, monkeypatch):
    """Each write takes longer than half of what all of them may be stuck for."""
    monkeypatch.setattr(fs, "WRITE_SECONDS", 0.6)
    monkeypatch.setattr(fs, "LOOK_SECONDS", 0.05)
    box, writev = box("fs"), os.writev
    monkeypatch.setattr(os, "writev", lambda *args: (time.sleep(0.2), writev(*args))[1])
    box.write(MANY)
    assert not box.store.failed_writes


@pytest.fixture
def freed(monkeypatch):
    """The pools whose memory LMCache gives back."""
    free, found = memory_management._free_cpu_memory, []

    def note(buffer, *args, **more):
        found.append(buffer.numel())
        return free(buffer, *args, **more)

    monkeypatch.setattr(memory_management, "_free_cpu_memory", note)
    return found


def test_closing_waits_for_queued_writes(box, monkeypatch, freed):
    """Their memory is unmapped then, which a pool of a few MB is not."""
    box, writev = box("fs", max_payload=LARGE, max_local_cpu_size=0.25), os.writev

    def late(*args):
        time.sleep(0.05)
        return writev(*args)

    monkeypatch.setattr(os, "writev", late)
    put(box.store, MANY, LARGE)
    files = [box.path(key) for key in MANY]
    box.close()
    assert all(file.stat().st_size > LARGE for file in files)
    assert not box.store.failed_writes
    assert len(freed) == 1


def test_closing_ends_slow_writes_at_their_next_part(box, monkeypatch, freed, hybrid_log):
    monkeypatch.setattr(fs, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(record_io, "STEP_BYTES", LARGE // 64)
    box, writev = box("fs", max_payload=LARGE, max_local_cpu_size=0.25), os.writev
    monkeypatch.setattr(os, "writev", lambda *args: (time.sleep(0.05), writev(*args))[1])
    put(box.store, MANY, LARGE)
    box.close()
    assert len(freed) == 1 and not connector_of(box).uses_memory
    assert not list(box.folder.iterdir()), "half a record stays"
    assert "Bad address" not in hybrid_log.text


@pytest.mark.parametrize("function", ["writev", "readv"])
def test_closing_does_not_wait_for_a_server_that_hangs(box, monkeypatch, freed, function):
    """What it may still write to stays allocated: a second engine's pool could take its place."""
    monkeypatch.setattr(fs, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(fs, "END_SECONDS", 0.2)
    box = box("fs", blocking_timeout_secs=0.2).write(KEYS[:1])
    with hangs(monkeypatch, function):
        if function == "readv":
            load_fails(box, KEYS[:1])
        else:
            put(box.store, MANY, SIZE)
        box.close()
        waiting = len(MANY) - fs.WRITERS
        assert box.store.failed_writes == (
            {} if function == "readv" else {"RemoteBackend": waiting}
        )
        assert not freed


def test_a_process_ends_although_a_thread_hangs():
    code = """
import threading
from lmcache_hybrid.core.threads import DaemonPool
begun = threading.Event()
DaemonPool(2, "x").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"done\n"


def test_marks_that_hang_hold_up_nobody(box, monkeypatch):
    box = box("fs").write()
    with hangs(monkeypatch, "utime") as inside:
        for _ in range(3):
            box.store.refresh(KEYS)
        until(lambda: inside, "nothing is marked")
        assert_whole(box)
        box.write(MANY)
        assert len(inside) == 1
    until(lambda: not connector_of(box)._uses._running, "marks do not end")


def test_a_load_that_is_late_stops_reading(box, monkeypatch):
    from lmcache_hybrid.core.errors import SlowError
    from lmcache_hybrid.core.late_loads import Pace

    monkeypatch.setattr(record_io, "STEP_BYTES", 100)
    box = box("fs").write()
    readv, parts = os.readv, []
    monkeypatch.setattr(
        os, "readv", lambda *args: (parts.append(1), time.sleep(0.05), readv(*args))[2]
    )
    size = box.path(KEYS[0]).stat().st_size - WRAPPER_BYTES
    claim = box.store.claim(box.store.locate(KEYS[:1]))
    pace = Pace(time.monotonic() + 0.2, size)
    with pytest.raises(SlowError), pace.reading(size):
        box.store.fetch(claim, KEYS[:1])
    assert len(parts) < size / 100 - 2
    assert box.store.engine_key(KEYS[0]) not in box.store._damaged.hidden("RemoteBackend")
    assert box.backend.get_blocking_failed_count == 0
    claim.release()
    box.assert_pool_is_free()
