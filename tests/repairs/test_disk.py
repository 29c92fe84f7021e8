# SPDX-License-Identifier: Apache-2.0
"""LMCache's ``local_disk`` and CPU pool without our repairs, on real files."""

import errno
import os
import threading

import pytest
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.storage_backend.cache_policy.lfu import LFUCachePolicy
from unit.test_host_memory import SIZE as POOL_SIZE
from unit.test_host_memory import cudart, no_options  # noqa: F401

from lmcache_hybrid.storage import host_memory as pinned
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.disk.full_disk import LFUWithPendingWrites
from lmcache_hybrid.storage.read_reservation import ReadReservation

from .raw import GIB, KEYS, SIZE, Raw, happens
from .repair import shows_bug_of

A, B = KEYS[:2]


@pytest.fixture
def make(tmp_path):
    """Make engines with LMCache's own disk backend on one folder."""
    made = []

    def disk(records: int = 100) -> Raw:
        limit = records * SIZE / GIB
        made.append(Raw("LocalDiskBackend", local_disk=str(tmp_path), max_local_disk_size=limit))
        return made[-1]

    yield disk
    for one in made:
        one.close()


@shows_bug_of(LocalDisk.restore)
def test_a_restart_forgets_every_file(make):
    first = make().write(KEYS)
    assert first.path(A).stat().st_size == SIZE
    first.close()
    return not make().backend.contains(A)


def fails(*args):
    raise OSError(errno.EROFS, "Read-only file system")


@shows_bug_of(LocalDisk.batched_submit_put_task)
def test_a_write_that_raises_ends_the_whole_save(make, monkeypatch):
    disk = make()
    submit = disk.backend.submit_put_task
    monkeypatch.setattr(
        disk.backend,
        "submit_put_task",
        lambda key, *a, **k: fails() if key == A else submit(key, *a, **k),
    )
    try:
        disk.put([A, B])
    except OSError:
        return True
    return not happens(lambda: disk.backend.contains(B))


@shows_bug_of(LocalDisk.submit_put_task)
def test_records_are_evicted_for_one_that_cannot_be_written(make, monkeypatch):
    disk = make(records=1).write([A])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(disk.backend, "write_file", fails)
    try:
        disk.put([B])
    except OSError:
        pass
    return not disk.backend.contains(A)


@shows_bug_of(LocalDisk.async_save_bytes_to_disk)
def test_a_write_that_fails_keeps_its_buffer_and_its_key(make, monkeypatch):
    disk = make()
    monkeypatch.setattr(disk.backend, "write_file", fails)
    disk.put([A])
    released = happens(lambda: disk.used() == disk.start)
    return not released or disk.backend.exists_in_put_tasks(A)


@shows_bug_of(LocalDisk.write_file)
def test_a_write_follows_a_link(make, tmp_path):
    disk = make()
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    disk.path(A).symlink_to(victim)
    disk.write([A])
    return victim.read_bytes() != b"mine"


@shows_bug_of(LocalDisk.read_file)
def test_a_lost_file_takes_room_for_ever(make):
    disk = make().write([A])
    disk.path(A).unlink()
    disk.backend.batched_get_blocking([A, B])
    return disk.backend.current_cache_size != 0


@shows_bug_of(LocalDisk.load_bytes_from_disk)
def test_a_file_that_cannot_be_read_raises_and_keeps_the_buffer(make):
    """A folder in its place: not even root can read it."""
    disk = make().write([A])
    disk.path(A).unlink()
    disk.path(A).mkdir()
    try:
        memory = disk.backend.get_blocking(A)
    except OSError:
        return True
    assert memory is None
    return disk.used() != disk.start


@shows_bug_of(LocalDisk.remove)
def test_a_file_that_is_gone_cannot_be_removed(make):
    disk = make().write([A])
    disk.path(A).unlink()
    try:
        disk.backend.remove(A)
    except OSError:
        return True
    return False


@shows_bug_of(LFUWithPendingWrites.get_evict_candidates, LFUWithPendingWrites.update_on_hit)
def test_lfu_fails_for_records_that_it_and_the_index_do_not_share():
    """The repair can go when neither fails."""
    policy = LFUCachePolicy()
    policy.update_on_put(A)

    def raises(call) -> bool:
        try:
            call()
        except KeyError:
            return True
        return False

    evicts = raises(lambda: policy.get_evict_candidates({}))
    return raises(lambda: policy.update_on_hit(B, {B: None})) or evicts


@shows_bug_of(ReadReservation.allocate)
def test_a_read_waits_for_memory_for_ever():
    ram = Raw("LocalCPUBackend")
    held = list(iter(ram.allocate, None))
    shape, dtype = held[0].get_shape(), held[0].get_dtype()
    got = []
    waiting = threading.Thread(target=lambda: got.append(ram.backend.allocate(shape, dtype)))
    waiting.start()
    try:
        return not happens(lambda: not waiting.is_alive())
    finally:
        for memory in held:
            memory.ref_count_down()
        waiting.join(20)
        assert not waiting.is_alive()
        for memory in filter(None, got):
            memory.ref_count_down()
        ram.close()


@shows_bug_of(pinned.pin_exactly)
def test_without_its_compiled_part_lmcache_asks_torch(cudart):  # noqa: F811
    allocator = MixedMemoryAllocator(POOL_SIZE)
    exact = sum(cudart.registered.values())
    allocator.close()
    return not exact
