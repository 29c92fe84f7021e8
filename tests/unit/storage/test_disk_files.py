# SPDX-License-Identifier: Apache-2.0
"""Files of local_disk and the account of their sizes."""

import copy
import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.keys import STATE, RecordKey
from lmcache_hybrid.storage.record_format import record_bytes

from ..helpers import payload_of, put
from ..store_box import KEYS, SIZE, N, until


def test_evicted_files_are_deleted(box):
    box = box("disk").write()
    other = [key._replace(block_hash=b"x" + key.block_hash[1:]) for key in KEYS]
    box.backend.max_cache_size = box.backend.current_cache_size
    box.write(other)
    assert box.store.locate(KEYS) == {}
    until(lambda: len(list(box.folder.iterdir())) == len(KEYS), "evicted files are still there")
    assert box.backend.current_cache_size == box.backend.max_cache_size
    box.read(other)


def test_a_process_that_may_start_no_more_threads_evicts(box, monkeypatch):
    """A thread that is started for the first eviction would fail it, and the record behind it."""
    box = box("disk").write()
    box.backend.max_cache_size = box.backend.current_cache_size
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    box.write([key._replace(block_hash=b"x" + key.block_hash[1:]) for key in KEYS])
    assert box.store.failed_writes == {}
    until(lambda: len(list(box.folder.iterdir())) == len(KEYS), "evicted files are still there")


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_files_that_a_killed_engine_had_evicted_are_deleted(box):
    first = box("disk").write()
    path = first.path(KEYS[0])
    left, others = Path(f"{path}.1.0.evicted"), path.with_name("other.pt.1.0.evicted")
    left.write_bytes(b"x")
    others.write_bytes(b"x")
    box("disk")
    assert not left.exists() and others.exists()


def test_the_size_account_follows_damage(box):
    box = box("disk").write()
    each = box.backend.current_cache_size / len(KEYS)
    box.overwrite(KEYS[1], bytes(record_bytes(SIZE)))
    with pytest.raises(RecordError):
        box.read()
    assert box.backend.current_cache_size == each * (len(KEYS) - 1)


@pytest.mark.parametrize("batch", [KEYS, KEYS[1:2]], ids=["several", "one"])
def test_the_size_account_follows_lost_files(box, batch):
    box = box("disk").write()
    each = box.backend.current_cache_size / len(KEYS)
    box.path(KEYS[1]).unlink()
    with pytest.raises((LoadError, RecordError)):
        box.read(batch)
    assert box.backend.current_cache_size == each * (len(KEYS) - 1)
    box.assert_pool_is_free()


def test_the_size_account_follows_a_record_that_cannot_be_deleted(box, monkeypatch):
    """A folder in the file's place: os.remove fails, as on a read-only file system."""

    def read_only(*paths):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", read_only)
    box = box("disk").write()
    each = box.backend.current_cache_size / len(KEYS)
    box.path(KEYS[1]).unlink()
    box.path(KEYS[1]).mkdir()
    box.store.discard(KEYS[1])
    assert box.backend.current_cache_size == each * (len(KEYS) - 1)
    assert box.store.locate([KEYS[1]]) == {}
    box.path(KEYS[1]).rmdir()


def test_a_key_that_is_no_file_name_leaks_nothing(box):
    """open() raises ValueError for a NUL."""
    box = box("disk")
    key = copy.copy(box.store.engine_key(KEYS[0]))
    key.model_name = "a\0b"
    memory = box.store.reserve(SIZE).memory
    box.backend.batched_submit_put_task([key], [memory])
    box.settle()
    assert box.store.failed_writes == {"LocalDiskBackend": 1}
    assert box.backend.current_cache_size == 0
    assert memory.get_ref_count() == 1  # the caller's
    memory.ref_count_down()


@pytest.mark.parametrize("kind, twin", [("disk", "a-b"), ("fs", "a-SEP-b")])
def test_tags_that_lmcache_would_give_one_file_have_two(box, kind, twin):
    """It replaces slashes in file names."""
    box = box(kind)
    keys = [RecordKey(STATE, 0, b"t" * 32, N, (("user", tag),)) for tag in ("a/b", twin)]
    box.write(keys[:1])
    box.write(keys[1:])
    for key, payload in zip(keys, box.read(keys), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


@pytest.mark.parametrize("umask, expected", [(0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_files_of_fs_are_as_the_umask_says(box, umask, expected):
    """LMCache writes them."""
    before = os.umask(umask)
    try:
        filled = box("fs").write()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(filled.path(key).stat().st_mode) for key in KEYS} == {expected}


def gone(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def replaced(folder: Path) -> None:
    gone(folder)
    folder.write_bytes(b"a file")


@pytest.mark.parametrize("trouble", [gone, replaced])
def test_a_failed_disk_write_leaks_nothing_and_can_be_repeated(box, hybrid_log, trouble):
    box = box("disk")
    account = box.backend.current_cache_size
    trouble(box.folder)
    put(box.store, KEYS, SIZE)
    until(lambda: not box.backend.put_tasks, "failed writes stay under way")
    until(lambda: box.used() == box.start, "failed writes keep their buffers")
    assert box.backend.current_cache_size == account
    assert box.store.locate(KEYS) == {}
    warnings = [r for r in hybrid_log.records if "cannot be written" in r.getMessage()]
    assert len(warnings) == 1
    assert box.store.failed_writes == {"LocalDiskBackend": len(KEYS)}
    box.folder.unlink(missing_ok=True)
    box.folder.mkdir()
    box.write()
    assert torch.equal(box.read()[0], payload_of(KEYS[0], SIZE))


def miscount(disk) -> None:
    disk.current_cache_size += 1


def miscount_strangers(disk) -> None:
    disk.others.strange_bytes += 1


def count_twice(disk) -> None:
    disk.others.strangers[next(iter(disk.dict.values())).path] = 0


def wait_for_nothing(disk) -> None:
    disk._arranged[next(iter(disk.dict))] = (), set()


@pytest.mark.parametrize(
    "wrong, undo",
    [
        (miscount, lambda disk: setattr(disk, "current_cache_size", disk.current_cache_size - 1)),
        (miscount_strangers, lambda disk: setattr(disk.others, "strange_bytes", 0)),
        (count_twice, lambda disk: disk.others.strangers.clear()),
        (wait_for_nothing, lambda disk: disk._arranged.clear()),
    ],
)
def test_check_integrity_finds_books_that_do_not_agree(box, wrong, undo):
    box = box("disk").write()
    box.store.check_integrity()
    wrong(box.backend)
    with pytest.raises(AssertionError):
        box.store.check_integrity()
    undo(box.backend)


@pytest.mark.parametrize("name", ["_insert", "write_file"])
def test_a_write_that_ends_with_any_error_leaves_nothing(box, monkeypatch, name):
    """Before the file is there, and after."""
    one = box("disk")

    queue, held = one.backend._queue, []

    def broken(*args, **kwargs):
        raise RuntimeError("nobody foresaw it")

    def hold(key, memory):
        memory.ref_count_up()
        held.append(memory)
        queue(key, memory)

    with monkeypatch.context() as patch:
        patch.setattr(one.backend, name, broken)
        patch.setattr(one.backend, "_queue", hold)
        put(one.store, KEYS)
        one.settle()
    until(lambda: all(memory.get_ref_count() <= 1 for memory in held), "buffers are kept")
    assert [memory.get_ref_count() for memory in held] == [1] * len(KEYS)
    for memory in held:
        memory.ref_count_down()
    assert one.store.failed_writes == {"LocalDiskBackend": len(KEYS)}
    one.store.check_integrity()
    one.assert_pool_is_free()
    assert not list(one.folder.glob("*.pt"))
    one.write().read()


def test_what_a_failed_write_left_goes_before_another_write_of_the_key_begins(box, monkeypatch):
    """It would delete the other one's file, which the index goes on to offer."""
    one = box("disk")

    def broken(*args, **kwargs):
        raise RuntimeError("nobody foresaw it")

    left, end = [], one.backend._arrive

    def watched(key):
        left.extend(one.folder.glob("*.pt"))
        end(key)

    with monkeypatch.context() as patch:
        patch.setattr(one.backend, "_insert", broken)
        patch.setattr(one.backend, "_arrive", watched)
        put(one.store, KEYS[:1])
        one.settle()
    assert one.store.failed_writes == {"LocalDiskBackend": 1}
    assert not left
