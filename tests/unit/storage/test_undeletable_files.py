# SPDX-License-Identifier: Apache-2.0
"""local_disk stays within its limit where names are long and files cannot be deleted."""

import errno
import os
from pathlib import Path

import pytest

from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage.disk import other_files
from lmcache_hybrid.storage.key_names import readable_name
from lmcache_hybrid.storage.record_format import payload_bytes
from lmcache_hybrid.tools.doctor import backends

from ..helpers import put
from ..store_box import FINGERPRINT, KEYS, Box, N

# LMCache counts whole pages of its pool; such a record is one.
SIZE = payload_bytes(4096)
OTHERS = [key._replace(block_hash=b"x" + key.block_hash[1:]) for key in KEYS]
MORE = [key._replace(block_hash=b"y" + key.block_hash[1:]) for key in KEYS]
STRANGER = bytes(reversed(FINGERPRINT))
# As long as earlier versions let it be: cut by characters. A file system has 255 bytes for all.
LONG = "\u6a21" * 64


def write(one: Box, keys=KEYS) -> Box:
    """One by one: the first are evicted first."""
    for key in keys:
        one.write([key], SIZE)
    return one


def taken(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def limit(one) -> int:
    """Has room for KEYS, and for no more."""
    one.backend.max_cache_size = one.backend.current_cache_size
    return one.backend.max_cache_size


@pytest.mark.parametrize(
    "model",
    ["\u6a21" * 200, "m" * 200, "\U0001f9ec" * 64, "\u00fc" * 64],
    ids=lambda model: ascii(model[0]),
)
def test_no_name_of_a_model_makes_a_file_name_too_long(box, model):
    """Every part as long as a record's name may have it, and the longest ending."""
    name = readable_name(model)
    key = RecordKey(ATTENTION, 999, b"\xff" * 32, N, (("user", "tag"),))
    one = box("disk", model=name)
    text = one.store.engine_key(key).to_string().replace("@2@0@", f"@{'9' * 9}@{'9' * 9}@")
    ending = ".pt.4194304.999999999999.evicted"
    assert name and len(os.fsencode(text + ending)) <= 255


def test_a_name_is_cut_between_characters(box):
    assert readable_name("a" + LONG) == "a" + "\u6a21" * 31
    assert readable_name("models/\udce9t\u00e9") == "t\u00e9"


def test_evicted_files_of_a_long_name_are_deleted(box):
    """Their names have no room for the ending that they get before they are deleted."""
    one = write(box("disk", model=LONG))
    most = limit(one)
    for keys in (OTHERS, MORE):
        write(one, keys)
    one.backend.others.deleter.finish()
    assert taken(one.folder) <= most
    one.read(MORE)


def test_files_that_earlier_versions_named_too_long_count_over_restarts(box):
    one = write(box("disk", model=LONG))
    most = limit(one)
    one.close()
    for number in range(3):
        one = box("disk", max_local_disk_size=most / (1 << 30))
        write(one, [key._replace(block_hash=bytes([number]) + key.block_hash[1:]) for key in KEYS])
        one.backend.others.deleter.finish()
        assert taken(one.folder) <= most
        one.close()


@pytest.fixture
def held(monkeypatch) -> set[str]:
    """Names, or parts of them, of files that the system does not let go, as it may with others'."""
    names: set[str] = set()

    def guarded(call):
        def guard(path, *args, **kwargs):
            if any(name in os.fspath(path) for name in names):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
            return call(path, *args, **kwargs)

        return guard

    for name in ("rename", "unlink", "remove"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    return names


def test_a_record_that_cannot_be_deleted_counts(box, held, hybrid_log):
    """A new one waits until there is room; of those that can be found one is lost at most."""
    one = write(box("disk"))
    most = limit(one)
    oldest = one.path(KEYS[0])
    held.add(oldest.name)
    put(one.store, OTHERS[:1], SIZE)
    one.settle()
    assert one.store.failed_writes == {"LocalDiskBackend": 1}
    assert list(one.store.locate([*KEYS, *OTHERS])) == KEYS[1:]
    write(one, OTHERS[:2])
    one.backend.others.deleter.finish()
    assert list(one.store.locate([*KEYS, *OTHERS])) == [KEYS[3], *OTHERS[:2]]
    assert oldest.exists() and taken(one.folder) <= most
    assert hybrid_log.text.count("such files count towards max_local_disk_size") == 1
    one.store.check_integrity()


def test_a_record_that_is_stored_again_in_its_place_counts_once(box, held):
    one = write(box("disk"))
    most = limit(one)
    held.add(one.path(KEYS[0]).name)
    one.store.discard(KEYS[0])
    assert list(one.backend.others.kept) == [str(one.path(KEYS[0]))]
    held.clear()
    write(one, KEYS[:1])
    one.backend.others.deleter.finish()
    assert not one.backend.others.kept and taken(one.folder) == most
    one.read(KEYS)
    one.store.check_integrity()


def test_what_can_be_deleted_after_all_leaves_its_room(box, held, monkeypatch):
    """As the warning asks for: the folder was made writable, or the files were deleted."""
    monkeypatch.setattr(other_files, "AGAIN_SECONDS", 0.0)
    one = write(box("disk"))
    most, paths = limit(one), [one.path(key) for key in KEYS[:2]]
    held.update(path.name for path in paths)
    for key in KEYS[:2]:
        one.store.discard(key)
    assert len(one.backend.others.kept) == 2
    held.clear()
    paths[0].unlink()
    write(one, OTHERS)
    one.backend.others.deleter.finish()
    assert not one.backend.others.kept and taken(one.folder) <= most
    assert set(one.store.locate(OTHERS)) == set(OTHERS)
    one.store.check_integrity()


def test_a_file_that_was_renamed_keeps_one_ending(box, held, hybrid_log, monkeypatch):
    monkeypatch.setattr(other_files, "AGAIN_SECONDS", 0.0)
    one = write(box("disk"))
    deleter = one.backend.others.deleter
    held.add(".evicted")
    for key in KEYS[:2]:
        one.store.discard(key)
    deleter.finish()
    for number in range(3):
        put(one.store, [OTHERS[number]], SIZE)
        one.settle()
        deleter.finish()
        left = list(one.backend.others.kept)
        assert len(left) == 2 and all(name.count(".evicted") == 1 for name in left)
    assert hybrid_log.text.count("such files count towards max_local_disk_size") == 1
    one.store.check_integrity()


def test_only_some_are_tried_with_each_save(box, held, monkeypatch):
    monkeypatch.setattr(other_files, "AT_ONCE", 1)
    monkeypatch.setattr(other_files, "AGAIN_SECONDS", 0.0)
    one = write(box("disk"))
    held.update(one.path(key).name for key in KEYS[:2])
    for key in KEYS[:2]:
        one.store.discard(key)
    held.clear()
    for left in (1, 0):
        write(one, [OTHERS[left]])
        assert len(one.backend.others.kept) == left


def test_a_file_that_is_being_written_is_not_deleted_as_the_old_one(box, held, monkeypatch):
    monkeypatch.setattr(other_files, "AGAIN_SECONDS", 0.0)
    one = write(box("disk"))
    held.add(one.path(KEYS[0]).name)
    one.store.discard(KEYS[0])
    held.clear()
    written, put_another = one.backend.write_file, []

    def write_then_queue(buffer, path):
        written(buffer, path)
        if not put_another:
            put_another.append(1)
            put(one.store, OTHERS[:1], SIZE)

    monkeypatch.setattr(one.backend, "write_file", write_then_queue)
    write(one, KEYS[:1])
    assert put_another
    one.read(KEYS)


def test_files_of_others_that_cannot_be_deleted_leave_room_for_less(box, held):
    """As of another user in a folder with the sticky bit: the next ones go instead."""
    old = write(box("disk", fingerprint=STRANGER))
    most, files = limit(old), [old.path(key) for key in KEYS]
    old.close()
    for number, file in enumerate(files):
        os.utime(file, (1e9 + number, 1e9 + number))
    held.update(file.name for file in files[:2])
    one = box("disk", max_local_disk_size=most / (1 << 30))
    write(one, OTHERS[:2])
    one.backend.others.deleter.finish()
    assert [file.exists() for file in files] == [True, True, False, False]
    write(one, OTHERS[2:3])
    one.backend.others.deleter.finish()
    assert taken(one.folder) <= most
    assert list(one.store.locate(OTHERS)) == OTHERS[1:3]
    one.store.check_integrity()


def test_what_exceeds_the_limit_at_the_start_and_stays_counts(box, held):
    old = write(box("disk", fingerprint=STRANGER))
    files = [old.path(key) for key in KEYS]
    each = files[0].stat().st_size
    old.close()
    held.update(file.name for file in files)
    one = box("disk", max_local_disk_size=4 * each / (1 << 30) / 2)
    put(one.store, OTHERS[:1], SIZE)
    one.settle()
    assert one.store.failed_writes == {"LocalDiskBackend": 1}
    assert taken(one.folder) == 4 * each


def test_a_file_that_is_renamed_and_stays_counts_until_it_is_gone(box, held):
    one = write(box("disk"))
    most, path = limit(one), one.path(KEYS[0])
    held.add(".evicted")
    one.store.discard(KEYS[0])
    one.backend.others.deleter.finish()
    (left,) = one.backend.others.kept
    assert left.startswith(f"{path}.") and taken(one.folder) == most
    one.close()
    held.add(path.name)
    again = box("disk", max_local_disk_size=most / (1 << 30))
    assert again.backend.others.strangers.keys() == {left}
    again.close()
    held.clear()
    box("disk")
    assert not os.path.exists(left)


def test_what_a_failed_write_leaves_and_cannot_be_deleted_counts(box, held, monkeypatch):
    one = box("disk")

    def half(buffer, path):
        Path(path).write_bytes(bytes(buffer)[:100])
        held.add(Path(path).name)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(one.backend, "write_file", half)
    put(one.store, KEYS[:1], SIZE)
    one.settle()
    assert one.backend.others.kept == {str(one.path(KEYS[0])): 100}
    one.assert_pool_is_free()


def test_a_visit_evicts_nothing_on_a_full_disk(box, monkeypatch):
    """The doctor's test record is not worth one of an engine."""
    one = write(box("disk"))
    size = one.backend.current_cache_size
    assert not backends._is_full(one.backend, 1)
    monkeypatch.setattr(backends, "free_bytes", lambda folder: 0)
    assert backends._is_full(one.backend, 1)
    one.backend.visited = True
    assert not one.backend._give_way(1) and one.backend.current_cache_size == size
    one.backend.visited = False
    assert one.backend._give_way(1) and one.backend.current_cache_size < size
