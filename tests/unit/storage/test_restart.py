# SPDX-License-Identifier: Apache-2.0
"""The records of local_disk that a restart finds again, and what it leaves alone."""

import os

import pytest
import torch

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import STATE, RecordKey

from ..helpers import payload_of
from ..store_box import KEYS, MODEL, SIZE, Box, N, flip


def restart(box, **kwargs) -> Box:
    return box("disk", **kwargs)


def test_a_restart_finds_its_records_again(box):
    first = box("disk").write()
    size = sum(file.stat().st_size for file in first.folder.iterdir())
    first.close()
    again = restart(box)
    assert list(again.store.locate(KEYS)) == KEYS
    for key, payload in zip(KEYS, again.read()):
        assert torch.equal(payload, payload_of(key, SIZE))
    assert again.backend.current_cache_size == size
    again.assert_pool_is_free()


def test_tagged_records_are_found_again(box):
    key = RecordKey(STATE, 0, b"t" * 32, N, (("team", "b-c"), ("user", "a")))
    box("disk").write([key]).close()
    assert torch.equal(restart(box).read([key])[0], payload_of(key, SIZE))


@pytest.mark.parametrize("model", ["a/b", "a@b%c", "x" * 64])
def test_any_model_name_is_found_again(box, model):
    box("disk", model=model).write().close()
    assert list(restart(box, model=model).store.locate(KEYS)) == KEYS


@pytest.mark.parametrize(
    "other", [{"fingerprint": bytes(16)}, {"model": "other"}, {"rank": 1}], ids=str
)
def test_a_restart_finds_no_records_of_others(box, other):
    first = box("disk").write()
    files = sorted(first.folder.iterdir())
    first.close()
    again = restart(box, **other)
    assert not again.backend.dict and again.backend.current_cache_size == 0
    assert sorted(again.folder.iterdir()) == files


def test_a_restart_leaves_files_alone_that_are_no_records(box):
    first = box("disk").write()
    paths = [first.path(key) for key in KEYS]
    first.close()
    whole = paths[3].read_bytes()
    contents = {
        paths[0]: b"",
        paths[1]: paths[1].read_bytes()[:-1],
        paths[2]: b"\0" * len(whole),
        paths[3].with_name("notes.txt"): b"mine",
        paths[3].with_name(f"{MODEL}@2@0@no-key.pt"): whole,
        paths[3].with_name(f"{MODEL}@2@0@12@nothing.pt"): whole,
        paths[3].with_name("other.pt"): whole,
    }
    for path, data in contents.items():
        path.write_bytes(data)
    again = restart(box)
    assert list(again.store.locate(KEYS[3:])) == KEYS[3:] and len(again.backend.dict) == 1
    for path, data in contents.items():
        assert path.read_bytes() == data
    # What they stand for can be written again.
    again.write()
    assert torch.equal(again.read()[0], payload_of(KEYS[0], SIZE))


def test_a_record_that_is_whole_but_damaged_is_found_out_when_loaded(box):
    first = box("disk").write()
    path = first.path(KEYS[1])
    first.close()
    path.write_bytes(flip(-1)(path.read_bytes()))
    again = restart(box)
    assert list(again.store.locate(KEYS)) == KEYS
    with pytest.raises(RecordError, match="^checksum"):
        again.read()
    assert not path.exists()
    assert list(again.store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]


def test_a_restart_with_less_room_keeps_what_fits(box):
    first = box("disk").write()
    size = first.path(KEYS[0]).stat().st_size
    first.close()
    again = restart(box, max_local_disk_size=2.5 * size / 2**30)
    assert len(again.backend.dict) == 2
    assert again.backend.current_cache_size <= again.backend.max_cache_size


@pytest.mark.timeout(60)
def test_a_pipe_or_a_link_in_the_place_of_a_file_is_left_alone(box):
    """Others may write to the folder: an index that opens a pipe never ends."""
    first = box("disk").write()
    pipe, link = first.path(KEYS[0]), first.path(KEYS[1])
    kept = link.with_name("elsewhere")
    pipe.unlink()
    os.mkfifo(pipe)
    link.rename(kept)
    link.symlink_to(kept)
    first.close()
    found = box("disk").store.locate
    assert found(KEYS[:1]) == found(KEYS[1:2]) == {}
    assert list(found(KEYS[2:])) == KEYS[2:]
