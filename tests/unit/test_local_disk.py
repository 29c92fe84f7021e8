# SPDX-License-Identifier: Apache-2.0
"""LocalDisk on real files: what counts, what is evicted, what a failing disk does."""

import errno
import os
import re
import stat
import threading
from pathlib import Path

import pytest
import torch
from lmcache.observability import LMCStatsMonitor
from lmcache.v1 import storage_backend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from lmcache_hybrid.config.store_sizes import check_sizes
from lmcache_hybrid.core.errors import ConfigError, LoadError, RecordError
from lmcache_hybrid.storage.disk import backend
from lmcache_hybrid.storage.disk.backend import THREADS, LocalDisk
from lmcache_hybrid.storage.record_format import payload_bytes

from . import store_box as stores
from .helpers import payload_of, put
from .lmcache_settings import assert_one_sentence, lmcache_config
from .store_box import FINGERPRINT, KEYS, Box, until

box, valkey = stores.box, stores.valkey

# LMCache counts whole pages of its pool; such a record is one, and one block of most disks.
EACH = 4096
SIZE = payload_bytes(EACH)
GIB = 1 << 30
OTHERS = [key._replace(block_hash=b"x" + key.block_hash[1:]) for key in KEYS]
STRANGER = bytes(reversed(FINGERPRINT))
# None: nobody chose one.
POLICIES = [None, "LRU", "LFU", "FIFO", "MRU"]


def chosen(policy: str | None) -> dict[str, str]:
    return {} if policy is None else {"cache_policy": policy}


def age(files: list[Path]) -> None:
    """Make them as old as they are listed, the oldest first."""
    for number, file in enumerate(files):
        os.utime(file, (1e9 + number, 1e9 + number))


def write(one: Box, keys=KEYS) -> Box:
    return one.write(keys, SIZE)


def written(box, **settings) -> list[Path]:
    """The files of KEYS, the oldest first, after the engine that wrote them has ended."""
    one = box("disk", **settings)
    for key in KEYS:
        write(one, [key])
    files = [one.path(key) for key in KEYS]
    one.close()
    age(files)
    return files


def records(count: float) -> float:
    """``max_local_disk_size`` for so many records."""
    return count * EACH / GIB


def held(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(".pt"))


def settled(one: Box, count: int) -> None:
    until(lambda: len(list(one.folder.iterdir())) == count, "evicted files are still there")


def test_a_disk_too_small_for_any_hit_is_refused_with_the_size_that_helps(box, tmp_path):
    """A save would only say that there is no space left."""
    pages, block = 1_000_000, KEYS[2:]  # attention and state of one boundary

    def check(size: float) -> None:
        config = lmcache_config(local_disk=str(tmp_path), max_local_disk_size=size)
        check_sizes(config, pages, len(block) * pages, len(block))

    with pytest.raises(ConfigError) as error:
        check(0.0015)
    told = "LMCache option max_local_disk_size=0.0015 is too small: the records of one block of"
    assert str(error.value).startswith(told)
    assert_one_sentence(str(error.value))
    helps = re.search(r"set it to ([\d.]+) or more, or remove local_disk", str(error.value))
    assert helps is not None
    check(float(helps[1]))
    for size, fitting in ((0.0015, 1), (float(helps[1]), 2)):
        one = box("disk", max_payload=pages, max_local_disk_size=size)
        put(one.store, block, pages)
        one.settle()
        assert len(one.store.locate(block)) == fitting
        one.close()


def test_what_is_too_small_in_ram_and_on_disk_is_told_at_once(tmp_path):
    config = lmcache_config(
        local_disk=str(tmp_path), max_local_disk_size=0.001, max_local_cpu_size=0.001
    )
    with pytest.raises(ConfigError, match="max_local_cpu_size=0.001 is.* max_local_disk_size=0.0"):
        check_sizes(config, 1 << 20, 1 << 21, 2)
    config.local_disk, config.max_local_cpu_size = None, 1.0
    check_sizes(config, 1 << 20, 1 << 21, 2)


# Files of others


@pytest.mark.parametrize("other", [{"fingerprint": STRANGER}, {"model": "other"}], ids=str)
def test_files_of_others_are_counted_and_evicted_first(box, other):
    old = written(box, **other)
    one = box("disk", max_local_disk_size=records(6))
    assert not one.backend.dict and one.backend.current_cache_size == 0
    for number, key in enumerate(KEYS):
        write(one, [key])
        settled(one, min(6, 4 + number + 1))
    assert list(one.store.locate(KEYS)) == KEYS
    # The two oldest have gone.
    assert [file.exists() for file in old] == [False, False, True, True]
    for number in range(2):
        write(one, [OTHERS[number]])
    assert list(one.store.locate(KEYS)) == KEYS
    write(one, [OTHERS[2]])  # nothing of others is left
    settled(one, 6)
    assert not any(file.exists() for file in old)
    assert one.backend.current_cache_size == 6 * EACH == one.backend.max_cache_size


def test_ranks_count_their_own_files_and_those_of_ranks_that_are_no_more(box):
    (first, second, third, fourth) = written(box)
    names = {first: "tiny@4@2@", second: "tiny@4@3@", third: "tiny@2@1@", fourth: "tiny@1@0@"}
    moved = {
        old: old.rename(old.with_name(old.name.replace("tiny@2@0@", new)))
        for old, new in names.items()
    }
    one = box("disk", max_local_disk_size=records(2))
    write(one, KEYS[:2])
    settled(one, 4)
    assert [moved[file].exists() for file in (first, second, third, fourth)] == [
        False,
        True,
        True,
        False,
    ]


def test_what_is_not_ours_is_never_deleted(box):
    folder = written(box)[0].parent
    foreign = [folder / name for name in ("notes.txt", "other.pt", "m@1@0@12@bfloat16.pt")]
    for file in foreign:
        file.write_bytes(bytes(10 * EACH))
    (folder / "tiny@2@0@1@uint8@hybrid%a0-0123456789abcdef.pt").mkdir()
    one = box("disk", max_local_disk_size=records(1))
    write(one, OTHERS[:1])
    settled(one, 5)
    assert all(file.exists() for file in foreign)


def test_a_lowered_limit_keeps_the_newest(box):
    written(box, fingerprint=STRANGER)
    written(box)
    one = box("disk", max_local_disk_size=records(2.5))
    settled(one, 2)
    assert [bool(one.store.locate([key])) for key in KEYS] == [False, False, True, True]
    assert one.backend.current_cache_size == 2 * EACH
    for key, payload in zip(KEYS[2:], one.read(KEYS[2:]), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


def test_a_damaged_file_only_takes_room_until_it_is_written_anew(box):
    files = written(box)
    files[3].write_bytes(files[3].read_bytes()[:-1])
    one = box("disk", max_local_disk_size=records(4))
    assert one.backend.others.strange_bytes == EACH - 1 and len(one.backend.dict) == 3
    write(one, KEYS[3:])
    assert one.backend.others.strange_bytes == 0 and len(one.backend.dict) == 4
    one.read()


# Policies


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_over_a_restart_on_a_full_disk(box, policy):
    written(box, **chosen(policy))
    one = box("disk", **chosen(policy), max_local_disk_size=records(4))
    one.store.refresh(KEYS)
    one.read()
    one.store.arrange(KEYS)
    assert [one.pins(key) for key in KEYS] == [0] * 4
    for key in OTHERS:
        write(one, [key])  # until it can be found
        settled(one, 4)
    assert one.store.failed_writes == {}
    assert len(one.backend.dict) == 4 and one.backend.current_cache_size == 4 * EACH
    assert torch.equal(one.read(OTHERS[3:])[0], payload_of(OTHERS[3], SIZE))


def test_new_prompts_push_out_what_nobody_asked_for_since_the_start(box):
    """And not one another; what was hit since stays."""
    written(box)
    one = box("disk", max_local_disk_size=records(4))
    one.store.refresh(KEYS[:1])
    for key in OTHERS[:3]:
        write(one, [key])
        settled(one, 4)
        one.store.arrange([key], (), str(key))
    left = {one.store.engine_key(key) for key in (KEYS[0], *OTHERS[:3])}
    assert set(one.backend.dict) == left


@pytest.mark.parametrize("fails", [None, 1, 3])
def test_a_save_is_arranged_when_its_last_write_ends(box, fails):
    """Ends of prefixes go first, in whatever order the writes end; one of them may fail."""
    one = box("disk", cache_policy="LRU", max_local_disk_size=records(4))
    go_on, write_file = threading.Event(), one.backend.write_file

    def slow(buffer, path):
        assert go_on.wait(stores.DEADLINE)
        if fails is not None and path == one.backend.path_of(one.store.engine_key(KEYS[fails])):
            raise OSError(errno.EIO, "input/output error")
        write_file(buffer, path)

    one.backend.write_file = slow
    put(one.store, KEYS, SIZE)
    one.store.arrange(KEYS)
    assert not one.backend.dict
    go_on.set()
    left = [key for number, key in enumerate(KEYS) if number != fails]
    until(lambda: len(one.backend.dict) == len(left), "the writes have not ended")
    until(lambda: not one.backend._arranged, "a write is still waited for")
    assert list(one.backend.dict) == [one.store.engine_key(key) for key in reversed(left)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_evicts_beside_a_write_and_after_a_loss(box, policy):
    one = write(box("disk", **chosen(policy), max_local_disk_size=records(4)))
    one.path(KEYS[1]).unlink()
    with pytest.raises((LoadError, RecordError)):
        one.read(KEYS[:2])
    one.store.discard(KEYS[2])
    go_on, write_file = threading.Event(), one.backend.write_file

    def slow(buffer, path):
        assert go_on.wait(stores.DEADLINE)
        write_file(buffer, path)

    one.backend.write_file = slow
    for key in OTHERS:  # the first two beside two old ones, which then make room
        put(one.store, [key], SIZE)
    assert one.backend.current_cache_size <= 4 * EACH
    go_on.set()
    one.settle()
    assert one.store.failed_writes == {} and len(one.backend.dict) == 4
    write(one, KEYS[1:2])
    one.read(KEYS[1:2])
    one.close()
    one.assert_pool_is_free()


def test_least_frequently_used_ones_go_first_after_a_restart(box):
    written(box, cache_policy="LFU")
    one = box("disk", cache_policy="LFU", max_local_disk_size=records(4))
    for key in (KEYS[0], KEYS[2], KEYS[3]):
        one.store.refresh([key])
    write(one, OTHERS[:1])
    assert [bool(one.store.locate([key])) for key in KEYS] == [True, False, True, True]


def test_an_order_that_cannot_be_kept_loses_no_pin(box, monkeypatch):
    one = write(box("disk"))

    def broken(key, held):
        raise KeyError(key)

    monkeypatch.setattr(one.backend.cache_policy, "update_on_hit", broken)
    claim = one.store.claim(one.store.locate(KEYS))
    one.store.refresh(KEYS)
    claim.release()
    assert [one.pins(key) for key in KEYS] == [0] * 4


# Disks that fail


def behind(tmp_path: Path) -> dict:
    """A remote tier behind the disk."""
    (tmp_path / "behind").mkdir()
    return {"remote_url": f"fs://localhost:0{tmp_path}/behind"}


def reached(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "behind"
    until(lambda: len(list(folder.glob("*.data"))) == count, f"the remote tier has not {count}")


@pytest.mark.parametrize("policy", POLICIES)
def test_files_that_somebody_deleted_fail_no_save(box, tmp_path, policy):
    one = box("disk", **chosen(policy), max_local_disk_size=records(4), **behind(tmp_path))
    write(one)
    reached(tmp_path, 4)
    for file in held(one.folder):
        file.unlink()
    write(one, OTHERS)
    reached(tmp_path, 8)
    assert one.store.failed_writes == {}
    assert one.backend.current_cache_size == sum(e.size for e in one.backend.dict.values())


def read_only(*paths):
    raise OSError(errno.EROFS, "Read-only file system")


def test_files_that_cannot_be_deleted_fail_no_save(box, tmp_path, monkeypatch):
    """A folder in a file's place: not even root can unlink it."""
    one = write(box("disk", max_local_disk_size=records(4), **behind(tmp_path)))
    for key in KEYS:
        one.path(key).unlink()
        one.path(key).mkdir()
    monkeypatch.setattr(os, "rename", read_only)
    write(one, OTHERS)
    reached(tmp_path, 8)
    assert one.store.failed_writes == {}


def test_an_error_of_the_disks_index_keeps_nothing_from_the_next_tier(box, tmp_path):
    one = write(box("disk", max_local_disk_size=records(4), **behind(tmp_path)))

    def broken(*args, **kwargs):
        raise KeyError("of the policy")

    one.backend.cache_policy.get_evict_candidates = broken
    put(one.store, OTHERS, SIZE)
    reached(tmp_path, 8)
    assert one.store.failed_writes == {"LocalDiskBackend": 4}


def test_a_disk_that_takes_no_files_loses_nothing_that_it_has(box, tmp_path, monkeypatch):
    one = write(box("disk", max_local_disk_size=records(4), **behind(tmp_path)))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    put(one.store, OTHERS, SIZE)
    reached(tmp_path, 8)
    assert one.store.failed_writes == {"LocalDiskBackend": 4}
    assert set(one.backend.dict) == {one.store.engine_key(key) for key in KEYS}
    one.read()


# Who may read and write


@pytest.mark.parametrize("mode, expected", [(0o700, 0o600), (0o2770, 0o660), (0o770, 0o600)])
def test_files_are_for_this_user_or_the_folders_group_alone(box, tmp_path, mode, expected):
    (tmp_path / "records").mkdir()
    (tmp_path / "records").chmod(mode)
    old = os.umask(0o022)
    try:
        one = write(box("disk"))
    finally:
        os.umask(old)
    assert {stat.S_IMODE(one.path(key).stat().st_mode) for key in KEYS} == {expected}


@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symlink", "link"])
def test_a_write_replaces_a_link_and_does_not_follow_it(box, tmp_path, make):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    one = box("disk")
    make(victim, one.path(KEYS[0]))
    write(one, KEYS[:1])
    assert victim.read_bytes() == b"mine" and not one.path(KEYS[0]).is_symlink()
    one.read(KEYS[:1])


@pytest.mark.timeout(60)
def test_a_read_neither_waits_for_a_pipe_nor_follows_a_link(box):
    one = write(box("disk"))
    whole = one.path(KEYS[1]).rename(one.folder / "elsewhere")
    one.path(KEYS[1]).symlink_to(whole)
    one.path(KEYS[0]).unlink()
    os.mkfifo(one.path(KEYS[0]))
    for key in KEYS[:2]:
        with pytest.raises((LoadError, RecordError)):
            one.read([key])
    assert whole.exists()


def lost(file: Path) -> None:
    file.unlink()


def a_link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("elsewhere")))


@pytest.mark.parametrize("batch", [KEYS, KEYS[1:2]], ids=["several", "one"])
@pytest.mark.parametrize(("trouble", "reason"), [(lost, "gone"), (a_link, "gone")])
def test_a_file_that_cannot_be_read_is_promised_once(box, batch, trouble, reason):
    """With real models each part of a load is one record."""
    one = write(box("disk"))
    trouble(one.path(KEYS[1]))
    with pytest.raises(LoadError) as caught:
        one.read(batch)
    assert caught.value.reason == reason
    assert one.store.locate([KEYS[1]]) == {}
    assert one.backend.current_cache_size == EACH * (len(KEYS) - 1)
    one.assert_pool_is_free()


def test_two_that_find_a_record_damaged_remove_it_once(box, monkeypatch):
    one = write(box("disk"))
    engine_key = one.store.engine_key(KEYS[1])
    deleter = one.backend.others.deleter
    delete = deleter.delete

    def beside(path: str) -> None:
        monkeypatch.setattr(deleter, "delete", delete)
        other.start()
        other.join(0.2)
        delete(path)

    other = threading.Thread(target=one.backend.remove, args=(engine_key,))
    monkeypatch.setattr(deleter, "delete", beside)
    one.backend.remove(engine_key)
    other.join()
    assert one.backend.current_cache_size == EACH * (len(KEYS) - 1)


@pytest.mark.parametrize("policy", ["LRU", None])
def test_of_a_save_only_what_is_in_flight_is_waited_for(box, policy):
    one = write(box("disk", **chosen(policy)), KEYS[:1])
    first, second = (one.store.engine_key(key) for key in KEYS[:2])
    one.backend.put_tasks |= {first, second}  # the first is indexed and not yet taken off
    one.store.arrange(KEYS)
    assert set(one.backend._arranged) == ({second} if policy else set())
    one.backend._arrive(second)
    assert not one.backend._arranged and first in one.backend.put_tasks
    one.backend._arrive(first)


def test_a_disk_that_cannot_start_all_threads_leaves_none(box, monkeypatch):
    before = set(threading.enumerate())
    one, start = box("disk"), threading.Thread.start
    mine = [t for t in set(threading.enumerate()) - before if t.name.startswith("hybrid-d")]
    assert len(mine) == 1 + 2 * THREADS
    arguments = (one.engine.config, None, one.manager.local_cpu_backend, "cpu", None)
    for most in range(len(mine)):
        begun: list[threading.Thread] = []

        def start_some(thread, most=most, begun=begun):
            if len(begun) == most:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_some)
            with pytest.raises(RuntimeError):
                LocalDisk(*arguments, one.engine.metadata)
        assert len(begun) == most
        until(lambda begun=begun: not any(t.is_alive() for t in begun), "threads are left")


def test_as_many_threads_read_and_write_as_lmcaches_option_says(box):
    one = box("disk", extra_config={"disk_io_threads": 2})
    assert one.backend._readers._max_workers == one.backend._writers._max_workers == 2
    write(one).read(KEYS)


def test_a_store_that_is_closed_has_written_what_it_took(box):
    """Before LMCache frees the memory of its pool."""
    one = box("disk")
    go_on, write_file = threading.Event(), one.backend.write_file

    def slow(buffer, path):
        assert go_on.wait(stores.DEADLINE)
        write_file(buffer, path)

    one.backend.write_file = slow
    put(one.store, KEYS, SIZE)
    closing = threading.Thread(target=one.store.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "it does not wait for the writes"
    go_on.set()
    closing.join(stores.DEADLINE)
    assert not closing.is_alive() and len(held(one.folder)) == len(one.backend.dict) == len(KEYS)
    one.backend.close()  # again, as LMCache does
    assert not [t for t in threading.enumerate() if t.name.startswith("hybrid-disk")]


def test_what_is_put_after_the_end_is_not_written_and_kept_nowhere(box):
    one = box("disk")
    one.backend.close()
    put(one.store, KEYS, SIZE)
    assert one.store.failed_writes == {"LocalDiskBackend": len(KEYS)}
    assert not one.backend.put_tasks and one.backend.current_cache_size == 0
    one.assert_pool_is_free()


def test_a_folder_in_a_records_place_leaves_no_file_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(FileNotFoundError), backend.open_regular(str(tmp_path)):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_run_side_by_side(box, monkeypatch):
    """Four files at once: else a restore has the bandwidth of one thread."""
    one = write(box("disk"))
    meeting, read = threading.Barrier(THREADS), backend.open_regular

    def together(path):
        meeting.wait(stores.DEADLINE)
        return read(path)

    monkeypatch.setattr(backend, "open_regular", together)
    for key, payload in zip(KEYS, one.read(), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


def test_lmcaches_own_metric_follows_the_account(box):
    one = write(box("disk", max_local_disk_size=records(3)), KEYS[:2])
    monitor = LMCStatsMonitor.GetOrCreate()
    assert monitor.local_storage_usage_bytes == 2 * EACH
    for key in OTHERS[:2]:
        write(one, [key])
    assert monitor.local_storage_usage_bytes == 3 * EACH
    one.store.discard(OTHERS[1])
    assert monitor.local_storage_usage_bytes == 2 * EACH


def test_a_save_larger_than_the_limit_is_written_as_far_as_it_fits(box):
    """What is in flight is not evicted for the rest, which is no failed write."""
    one = box("disk", max_local_disk_size=records(3))
    put(one.store, KEYS, SIZE)
    one.settle()
    assert list(one.store.locate(KEYS)) == KEYS[:3] and one.store.failed_writes == {}


def test_engines_of_other_models_have_lmcaches_own_disk(box, tmp_path):
    """In the same process, after one of a hybrid model."""
    one = box("disk")
    config = lmcache_config(local_disk=str(tmp_path / "other"), max_local_disk_size=0.01)
    loop = one.manager.loop
    arguments = (loop, one.manager.local_cpu_backend, "cpu", None, one.engine.metadata)
    made = storage_backend.LocalDiskBackend(config, *arguments)
    assert type(made) is LocalDiskBackend
    made.close()
    assert type(one.backend) is LocalDisk and str(one.backend) == str(made)


def test_a_disk_has_its_place_between_ram_and_the_remote_store(box, tmp_path):
    one = box("disk", local_cpu=True, **behind(tmp_path))
    names = ["LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"]
    assert list(one.manager.storage_backends) == list(one.store.tiers) == names


def test_files_are_lmcaches_to_the_byte(box, tmp_path):
    """A store that LMCache's own backend wrote, as earlier versions had it, is found, and back."""
    one = write(box("disk"))
    config = lmcache_config(local_disk=str(tmp_path / "lmcache"), max_local_disk_size=0.01)
    arguments = (one.manager.loop, one.manager.local_cpu_backend, "cpu", None, one.engine.metadata)
    theirs = LocalDiskBackend(config, *arguments)
    keys = [one.store.engine_key(key) for key in KEYS]
    memories = one.backend.batched_get_blocking(keys)
    theirs.batched_submit_put_task(keys, memories)
    until(lambda: all(map(theirs.contains, keys)), "LMCache did not write")
    for key, engine_key, memory in zip(KEYS, keys, memories, strict=True):
        file = Path(theirs._key_to_path(engine_key))
        assert file.name == one.path(key).name and file.read_bytes() == one.raw(key)
        until(lambda memory=memory: memory.get_ref_count() == 1, "LMCache keeps a buffer")
        memory.ref_count_down()
    queue = theirs.disk_worker.executor._queue
    until(lambda: not queue._unfinished_tasks, "LMCache's writers do not end")  # nor does close()
    theirs.close()
    again = box("disk", local_disk=str(tmp_path / "lmcache"))
    for key, payload in zip(KEYS, again.read(), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


def test_a_record_that_was_read_is_evicted_last(box):
    one = box("disk", cache_policy="LRU", max_local_disk_size=records(4))
    for key in KEYS:
        write(one, [key])
    one.read(KEYS[:1])
    assert next(reversed(one.backend.dict)) == one.store.engine_key(KEYS[0])
