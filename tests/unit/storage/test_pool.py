# SPDX-License-Identifier: Apache-2.0
"""Memory of LMCache's CPU pool: nothing waits for it, and all of it goes back."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lmcache_hybrid.core.errors import LoadError, NoRoomError, RecordError
from lmcache_hybrid.storage.claims import LMCacheClaim

from ..helpers import payload_of
from ..store_box import (
    BACKEND,
    DEADLINE,
    KEYS,
    MAX_PAYLOAD,
    SIZE,
    Box,
    assert_failed_put_releases,
    every_kind,
    outside,
    until,
)


@every_kind
def test_reserved_memory_that_is_not_written_goes_back(box, kind):
    box = box(kind)
    buffer = box.store.reserve(SIZE)
    assert buffer.payload.shape == (SIZE,) and box.used() > box.start
    buffer.release()
    box.assert_pool_is_free()


@every_kind
def test_a_full_pool_refuses_and_does_not_wait(box, kind):
    box = box(kind)
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    assert held
    assert box.store.reserve(MAX_PAYLOAD) is None
    for buffer in held:
        buffer.release()
    box.write()
    box.read()
    box.assert_pool_is_free()


@outside
def test_a_load_without_room_to_read_into_fails_and_does_not_wait(box, kind):
    box = box(kind).write()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    with pytest.raises(LoadError, match="max_local_cpu_size"):
        box.read()
    for buffer in held:
        buffer.release()
    assert torch.equal(box.read()[0], payload_of(KEYS[0], SIZE))
    box.assert_pool_is_free()


@outside
@pytest.mark.timeout(60)
def test_loads_that_have_room_one_by_one_only_do_not_wait_for_each_other(box, kind, monkeypatch):
    """The first has begun and read nothing yet, when the second comes."""
    box = box(kind).write()
    for room in range(2 * len(KEYS) - 1, len(KEYS) - 1, -1):
        check_two_loads(box, room, monkeypatch)
    assert list(box.store.locate(KEYS)) == KEYS
    box.assert_pool_is_free()


def check_two_loads(box: Box, room: int, monkeypatch) -> None:
    """With memory for so many of their records the first one succeeds and the second fails."""
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    for _ in range(room):
        held.pop().release()
    begun, go_on = threading.Event(), threading.Event()
    read = box.store._read_from

    def gate(*args):
        if not begun.is_set():
            begun.set()
            assert go_on.wait(DEADLINE)
        return read(*args)

    monkeypatch.setattr(box.store, "_read_from", gate)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(box.read)
        assert begun.wait(DEADLINE)
        try:
            with pytest.raises(NoRoomError):
                box.read()
        finally:
            go_on.set()
        for key, payload in zip(KEYS, first.result(DEADLINE), strict=True):
            assert torch.equal(payload, payload_of(key, SIZE))
    monkeypatch.undo()
    for buffer in held:
        buffer.release()


@outside
def test_room_that_a_read_did_not_use_goes_back(box, kind):
    box = box(kind).write()
    box.remove(KEYS[1])
    with pytest.raises((LoadError, RecordError)):
        box.store.fetch(LMCacheClaim(dict.fromkeys(KEYS, BACKEND[kind])), KEYS)
    until(lambda: box.used() == box.start, "memory is still set aside")


@outside
def test_a_read_that_finds_no_memory_keeps_the_record(box, kind):
    """It is not the record's fault, and no failure of the store's."""
    box = box(kind).write()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    box.store._reservation.room_for = lambda records: contextlib.nullcontext()
    with pytest.raises(NoRoomError):
        box.read()
    for buffer in held:
        buffer.release()
    assert list(box.store.locate(KEYS)) == KEYS


@every_kind
def test_more_than_the_largest_record_is_refused(box, kind):
    box = box(kind)
    assert box.store.reserve(MAX_PAYLOAD + 1) is None
    box.assert_pool_is_free()


def test_a_failed_put_releases_its_buffers(box):
    assert_failed_put_releases(box("ram"), KEYS, SIZE)


def test_a_put_of_no_records_takes_no_memory(box):
    box = box("ram")
    box.store.put([])
    assert box.used() == box.start


def test_check_integrity_finds_memory_that_is_set_aside_for_nobody(box):
    box = box("disk")
    with box.store._reservation.room_for(2):
        box.store.check_integrity()
        box.store._reservation._promised -= 1
        with pytest.raises(AssertionError, match="for nobody"):
            box.store.check_integrity()
        box.store._reservation._promised += 1
