# SPDX-License-Identifier: Apache-2.0
"""``local_disk`` on a file system that others fill, or that ends before its limit."""

import contextlib
import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from lmcache_hybrid.storage.disk import deleter
from lmcache_hybrid.storage.disk import full_disk as disk_room
from lmcache_hybrid.storage.disk.files import write_anew
from lmcache_hybrid.storage.disk.full_disk import (
    ALONE_SECONDS,
    LONGEST_PAUSE,
    PAUSE_SECONDS,
    TRIES,
    DiskFullHandler,
)

from . import store_box as stores
from .helpers import put
from .store_box import KEYS
from .test_local_disk import (
    EACH,
    OTHERS,
    SIZE,
    STRANGER,
    age,
    behind,
    held,
    reached,
    records,
    write,
)

box, valkey = stores.box, stores.valkey

BLOCKS = 16
MORE = [key._replace(tags=(("a", "b"),)) for key in (*KEYS, *OTHERS)]


class Clock:
    """The machine's, which a test sets forward."""

    def __init__(self) -> None:
        self.now, self._real = 0.0, time.monotonic

    def __call__(self) -> float:
        return self._real() + self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


# A full disk


class Disk:
    """A disk of so many bytes, by their writers' names; quotas end it with another error."""

    def __init__(self, size: int, code: int = errno.ENOSPC) -> None:
        self.size, self.code = size, code
        self.files: dict[str, int] = {}
        self.evictions = 0
        self.taken = False
        self.room = DiskFullHandler("/", self.evict, lambda: None)

    def evict(self, size: int) -> bool:
        """The oldest go; somebody may take their room at once."""
        if sum(self.files.values()) < size:
            return False
        self.evictions += 1
        while size > 0:
            given = self.files.pop(next(iter(self.files)))
            self.size -= given * self.taken
            size -= given
        return True

    def write(self, name: str, size: int = 1) -> bool:
        """Whether it was written."""

        def write() -> None:
            if sum(self.files.values()) + size > self.size:
                raise OSError(self.code, os.strerror(self.code))
            self.files[name] = size

        with contextlib.suppress(OSError):
            self.room.write(write, size)
        return name in self.files


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_as_much_is_evicted_as_a_record_needs(code):
    disk = Disk(4, code)
    assert all(disk.write(str(number)) for number in range(6))
    assert list(disk.files) == ["2", "3", "4", "5"] and disk.evictions == 2
    assert disk.write("large", 3)
    assert list(disk.files) == ["5", "large"] and disk.evictions == 3
    assert not disk.write("too large", 5)
    assert list(disk.files) == ["5", "large"]


def test_another_error_evicts_nothing():
    disk = Disk(0, errno.EIO)
    disk.files["old"] = 1
    assert not disk.write("new") and disk.evictions == 0


def test_who_evicts_in_vain_stops_for_a_while(clock):
    disk = Disk(100)
    assert all(disk.write(str(number)) for number in range(100))
    disk.taken, lost = True, 0
    pause = PAUSE_SECONDS
    for _ in range(8):
        assert not disk.write("new")
        lost += TRIES - 1  # the first attempt finds out that the disk is full
        assert disk.evictions == lost
        clock.now += pause - 1
        assert not disk.write("new") and disk.evictions == lost
        clock.now += 1
        pause = min(2 * pause, LONGEST_PAUSE)
    disk.taken = False
    assert disk.write("new")
    disk.taken = True
    evictions = disk.evictions
    assert not disk.write("newer") and disk.evictions > evictions
    clock.now += PAUSE_SECONDS  # after an eviction that helped the next pause is short again
    evictions = disk.evictions
    assert not disk.write("newest") and disk.evictions > evictions


def test_a_policy_that_fails_is_a_full_disk():
    disk = Disk(0)

    def broken(size):
        raise KeyError("of the policy")

    disk.room._evict = broken
    assert not disk.write("new")


def test_writes_go_side_by_side_again_after_a_while(clock, monkeypatch):
    asked = []
    monkeypatch.setattr(disk_room, "free_bytes", lambda folder: asked.append(folder) or 1 << 40)
    disk = Disk(1)
    assert disk.write("a") and not asked
    assert disk.write("b") and len(asked) == 1
    disk.size = 10
    assert disk.write("c") and len(asked) == 2
    clock.now += ALONE_SECONDS
    assert disk.write("d") and len(asked) == 2


# A store at its limit


def test_a_save_waits_for_no_write_and_no_deletion(box, monkeypatch):
    """On a full disk each record that is queued evicts another; nothing of it begins before."""
    one = write(box("disk", max_local_disk_size=records(4)))
    events: list[str] = []
    queue, write_file = one.backend._queue, one.backend.write_file

    def queued(*args) -> None:
        queue(*args)
        time.sleep(0.02)  # time enough to begin
        events.append("queued")

    def written(*args) -> None:
        events.append("written")
        write_file(*args)

    one.backend._queue, one.backend.write_file = queued, written
    monkeypatch.setattr(deleter, "_unlink", lambda path: events.append("deleted"))
    write(one, OTHERS)
    one.backend.others.deleter.finish()
    assert events[:4] == ["queued"] * 4
    assert sorted(events[4:]) == ["deleted"] * 4 + ["written"] * 4


# A real file system


@pytest.fixture
def small_disk(tmp_path):
    """For so many records in as many blocks."""
    folder = tmp_path / "records"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={BLOCKS * EACH}", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only who may mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int = 0) -> None:
    """Others take the disk but for so many blocks."""
    with (folder / "notes.txt").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(EACH))
    os.truncate(folder / "notes.txt", (folder / "notes.txt").stat().st_size - leave * EACH)


def indexed(one) -> list[str]:
    """Sorted: four threads write, and each ends when it may."""
    return sorted(map(str, one.backend.dict))


def names(one, keys) -> list[str]:
    return sorted(str(one.store.engine_key(key)) for key in keys)


def save(one, keys) -> None:
    """All at once, and none need be written."""
    put(one.store, keys, SIZE)
    one.settle()


@pytest.mark.parametrize("policy", [None, "LRU", "LFU", "FIFO"])
def test_a_save_on_a_full_disk_takes_the_room_of_the_oldest(box, small_disk, policy):
    one = box("disk", **({"cache_policy": policy} if policy else {}))
    fill(small_disk, leave=8)
    save(one, [*KEYS, *OTHERS])
    save(one, MORE[:4])  # four threads write
    assert set(names(one, MORE[:4])) <= set(indexed(one)) and one.store.failed_writes == {}
    save(one, MORE[4:])
    assert indexed(one) == names(one, MORE)
    assert len(held(small_disk)) == 8 and one.backend.current_cache_size == 8 * EACH
    one.read(MORE)


def test_a_full_disk_is_warned_of_once(box, small_disk, hybrid_log):
    one = box("disk")
    fill(small_disk, leave=4)
    for keys in (KEYS, OTHERS, MORE[:4]):
        save(one, keys)
    assert hybrid_log.text.count("ends before max_local_disk_size") == 1
    assert "cannot be written" not in hybrid_log.text


def test_files_that_nobody_can_find_make_room_first(box, small_disk):
    old = box("disk", fingerprint=STRANGER)
    save(old, KEYS)
    files = [old.path(key) for key in KEYS]
    old.close()
    age(files)
    one = box("disk")
    fill(small_disk, leave=2)
    save(one, OTHERS)
    assert [file.exists() for file in files] == [False, False, True, True]
    assert indexed(one) == names(one, OTHERS) and one.backend.others.strange_bytes == 2 * EACH


def a_taker(one, folder: Path) -> None:
    """Somebody takes all room as soon as there is some."""
    finish = one.backend._disk_full._finish_deleting

    def taken() -> None:
        finish()
        fill(folder)

    one.backend.others.deleter.finish = one.backend._disk_full._finish_deleting = taken


def links(one, folder: Path) -> None:
    """A backup that is made of links: nothing is free when our name is gone."""
    (folder / "backup").mkdir()
    for file in held(folder):
        os.link(file, folder / "backup" / file.name)


@pytest.mark.parametrize("trouble", [a_taker, links])
def test_a_store_is_not_evicted_for_nothing(box, tmp_path, small_disk, clock, trouble):
    one = box("disk", **behind(tmp_path))
    fill(small_disk, leave=8)
    save(one, [*KEYS, *OTHERS])
    trouble(one, small_disk)
    save(one, MORE)  # many at once, and then again
    left = indexed(one)
    # Of writes side by side one may be quicker than whoever takes the room.
    written = set(names(one, MORE)) & set(left)
    assert 0 < 8 - len(set(left) - written) <= TRIES
    save(one, MORE)
    assert indexed(one) == left
    assert one.store.failed_writes["LocalDiskBackend"] == 2 * (8 - len(written))
    one.read([key for key in OTHERS if one.store.engine_key(key) in one.backend.dict])
    reached(tmp_path, 16)
    (small_disk / "notes.txt").unlink()
    one.backend._disk_full._finish_deleting = lambda: None
    save(one, MORE[:1])  # where there is room a pause is none
    assert set(names(one, MORE[:1])) <= set(indexed(one))


def test_what_is_promised_is_not_evicted(box, small_disk):
    one = box("disk")
    fill(small_disk, leave=4)
    save(one, KEYS)
    claim = one.store.claim(one.store.locate(KEYS))
    save(one, OTHERS)
    assert indexed(one) == names(one, KEYS)
    assert one.store.failed_writes == {"LocalDiskBackend": 4}
    one.fetch(claim, KEYS)
    save(one, OTHERS)
    assert indexed(one) == names(one, OTHERS)


def test_nothing_is_evicted_where_all_of_it_is_too_little(box, small_disk):
    one = box("disk")
    fill(small_disk, leave=1)
    save(one, KEYS[:1])
    put(one.store, OTHERS[:1], stores.MAX_PAYLOAD)  # two blocks
    one.settle()
    assert indexed(one) == names(one, KEYS[:1])
    assert one.store.failed_writes == {"LocalDiskBackend": 1}


def test_a_write_that_ends_in_the_middle_leaves_nothing(box, small_disk):
    """Its room is free again for the others that wait."""
    one = box("disk")
    fill(small_disk, leave=1)
    with pytest.raises(OSError, match="No space left"):
        write_anew(str(small_disk / "half.pt"), bytes(2 * EACH))
    save(one, KEYS[:1])
    assert indexed(one) == names(one, KEYS[:1]) and one.store.failed_writes == {}


def test_what_is_being_deleted_makes_room(box, small_disk, monkeypatch):
    """A store at its limit, on a disk that ends there, evicts one record for each new one."""

    def later(path: str) -> None:
        time.sleep(0.05)
        os.unlink(path)

    monkeypatch.setattr(deleter, "_unlink", later)
    one = box("disk", max_local_disk_size=records(4))
    fill(small_disk, leave=4)
    save(one, KEYS)
    for key in OTHERS:
        save(one, [key])
        assert len(indexed(one)) == 4
    assert indexed(one) == names(one, OTHERS) and one.store.failed_writes == {}


def test_a_disk_full_and_then_read_only(box, tmp_path, small_disk):
    one = box("disk", **behind(tmp_path))
    fill(small_disk, leave=4)
    save(one, KEYS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    save(one, OTHERS)
    reached(tmp_path, 8)
    assert indexed(one) == names(one, KEYS)
    one.read(KEYS)
