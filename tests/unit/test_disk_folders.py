# SPDX-License-Identifier: Apache-2.0
"""``local_disk`` with several folders, of which LMCache writes into one."""

from pathlib import Path

import pytest
import torch

from lmcache_hybrid.storage.record_format import payload_bytes

from . import store_box as stores
from .helpers import payload_of, put
from .store_box import KEYS, Box
from .test_full_disk import fill, save, small_disk
from .test_local_disk import (
    EACH,
    OTHERS,
    SIZE,
    STRANGER,
    age,
    chosen,
    held,
    records,
    settled,
    write,
)

box, valkey = stores.box, stores.valkey
__all__ = ["small_disk"]

# LMCache's own LFU is replaced here, and has an order of its own.
POLICIES = [None, "LRU", "LFU", "FIFO", "MRU"]


@pytest.fixture
def other(tmp_path) -> Path:
    """What the list named first before."""
    return tmp_path / "other"


def first_life(box, folder: Path, **settings) -> list[Path]:
    """Files of an engine that wrote KEYS into ``folder``, the oldest first."""
    one = box("disk", local_disk=str(folder), **settings)
    for key in KEYS:
        write(one, [key])
    files = [one.path(key) for key in KEYS]
    assert held(folder) == sorted(files)
    one.close()
    age(files)
    return files


def swapped(box, other: Path, **settings) -> Box:
    return box("disk", local_disk=f"{other.parent}/records, {other}", **settings)


def test_what_a_swapped_list_has_elsewhere_is_found_and_read(box, other, hybrid_log):
    files = first_life(box, other)
    one = swapped(box, other)
    assert f"{other.parent}/records, {other}: 4 records" in hybrid_log.text
    for key, payload in zip(KEYS, one.read(), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))
    write(one, KEYS + OTHERS[:1])
    assert [path.parent.name for path in (*held(other), *held(one.folder))] == [
        *["other"] * 4,
        "records",
    ]
    assert one.backend.current_cache_size == 5 * EACH
    one.backend.remove(one.store.engine_key(KEYS[0]))
    one.backend.others.deleter.finish()
    assert not files[0].exists()


@pytest.mark.parametrize("policy", [None, "LRU", "LFU", "FIFO"])
def test_what_lies_elsewhere_counts_and_goes_first(box, other, policy):
    files = first_life(box, other, **chosen(policy))
    one = swapped(box, other, **chosen(policy), max_local_disk_size=records(4))
    for number, key in enumerate(OTHERS[:2]):
        write(one, [key])
        settled(one, number + 1)
    one.backend.others.deleter.finish()
    assert [file.exists() for file in files] == [False, False, True, True]
    assert one.backend.current_cache_size == 4 * EACH


def test_files_of_others_elsewhere_count_and_go_first(box, other):
    files = first_life(box, other, fingerprint=STRANGER)
    one = swapped(box, other, max_local_disk_size=records(4))
    assert one.backend.others.strange_bytes == 4 * EACH and not one.backend.dict
    write(one, OTHERS[:1])
    one.backend.others.deleter.finish()
    assert [file.exists() for file in files] == [False, True, True, True]


def test_a_folder_with_two_names_counts_once(box, tmp_path):
    first_life(box, tmp_path / "records")
    (tmp_path / "other").symlink_to(tmp_path / "records")
    one = box("disk", local_disk=f"{tmp_path}/records,{tmp_path}/records/,{tmp_path}/other")
    assert one.backend.current_cache_size == 4 * EACH and not one.backend.others.strangers
    one.read()


def test_a_record_in_two_folders_is_read_from_one_and_counts_twice(box, other):
    first_life(box, other.parent / "records")
    first_life(box, other)
    one = swapped(box, other)
    assert one.backend.current_cache_size == one.backend.others.strange_bytes == 4 * EACH
    one.read()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_disk_takes_no_room_on_another(box, other, small_disk, policy):
    """Nothing would be gained by it."""
    files = first_life(box, other, **chosen(policy))
    one = swapped(box, other, max_payload=4 * EACH, **chosen(policy))
    fill(small_disk, leave=4)
    save(one, OTHERS)
    save(one, [key._replace(tags=(("a", "b"),)) for key in KEYS])
    assert len(held(small_disk)) == 4 and all(file.exists() for file in files)
    large = KEYS[0]._replace(tags=(("large", "r"),))  # takes the room of three
    put(one.store, [large], payload_bytes(3 * EACH))
    one.settle()
    assert len(held(small_disk)) == 2 and one.store.locate([large])
    assert all(file.exists() for file in files) and one.store.failed_writes == {}
    assert all(entry.can_evict for entry in one.backend.dict.values()), "one stays for ever"


def test_a_full_disk_leaves_files_of_others_on_another(box, other, small_disk):
    files = first_life(box, other, fingerprint=STRANGER)
    one = swapped(box, other)
    fill(small_disk, leave=4)
    save(one, OTHERS)
    save(one, KEYS)
    assert all(file.exists() for file in files) and one.store.failed_writes == {}
