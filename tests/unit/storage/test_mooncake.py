# SPDX-License-Identifier: Apache-2.0
"""Mooncake's servers that are away or silent fail loads and hold nobody up."""

import contextlib

import pytest
import torch
from mooncakes import Mooncake

from lmcache_hybrid.core.errors import LoadError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage.record import record_bytes
from lmcache_hybrid.storage.remote import connectors as remote
from lmcache_hybrid.storage.remote import mooncake as module

from ..helpers import payload_of, put
from ..store_box import KEYS, SIZE, Box, N, flip, until

MANY = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(24)]


@pytest.fixture
def own_servers(mooncake):
    """Servers that may be killed; ``mooncake`` has made the client importable."""
    with contextlib.closing(Mooncake()) as own:
        yield own


def test_servers_that_went_away_are_a_miss_until_they_are_back(own_servers, tmp_path):
    box = Box("mooncake", tmp_path, own_servers, blocking_timeout_secs=2)
    try:
        box.write()
        claim = box.store.claim(box.store.locate(KEYS))
        own_servers.kill()
        with pytest.raises(LoadError):
            box.fetch(claim, KEYS)
        with pytest.raises((module.MooncakeError, TimeoutError)):  # which is no "not there"
            remote.existing(box.backend, [box.store.engine_key(KEYS[0])], 9)
        assert box.store.locate(KEYS) == {}
        put(box.store, KEYS[:1], SIZE)
        until(lambda: box.store.failed_writes == {"RemoteBackend": 1}, "no write failed")
        until(lambda: box.used() == box.start, "buffers are kept")
        own_servers.start()
        until(lambda: box.write(KEYS[:1]), "does not connect again")
        box.write()
        assert torch.equal(box.read()[3], payload_of(KEYS[3], SIZE))
        box.assert_pool_is_free()
    finally:
        box.close()


def test_a_node_that_stopped_does_not_hold_up_a_load(box, mooncake):
    """Its client cannot be interrupted, so the memory comes back when it gives up."""
    box = box("mooncake", blocking_timeout_secs=0.5).write()
    claim = box.store.claim(box.store.locate(KEYS))
    mooncake.pause()
    try:
        with pytest.raises(LoadError, match="did not answer within 0.5 s"):
            box.fetch(claim, KEYS)
        assert box.used() > box.start, "memory was given back that the client may write to"
    finally:
        mooncake.resume()
    until(lambda: box.used() == box.start, "memory is lost")


def test_a_damaged_value_is_deleted(box, mooncake):
    """Although it was just read, for which Mooncake leases it."""
    box = box("mooncake").write(KEYS[:2])
    box.overwrite(KEYS[1], flip(20)(box.raw(KEYS[1])))
    with pytest.raises(Exception, match="header"):
        box.read(KEYS[:2])
    names = [box.store.engine_key(key).to_string() for key in KEYS[:2]]
    assert mooncake.client.batch_is_exist(names) == [1, 0]


def test_a_value_that_could_not_be_read_stays_for_other_engines(box, mooncake):
    box = box("mooncake").write(KEYS[:1])
    box.store.discard(KEYS[0], damaged=False)
    assert mooncake.client.is_exist(box.store.engine_key(KEYS[0]).to_string()) == 1


@pytest.mark.parametrize("size", [record_bytes(SIZE) - 1, record_bytes(SIZE) + 1, 1 << 16])
def test_a_value_of_another_size_is_no_record(box, size):
    """The largest is larger than any record, so there is no memory for it."""
    box = box("mooncake").write(KEYS[:1])
    box.overwrite(KEYS[0], box.raw(KEYS[0])[:size].ljust(size, b"\0"))
    box.scrub()
    with pytest.raises(Exception, match="length|checksum|unreadable|gone from"):
        box.read(KEYS[:1])
    assert box.store.locate(KEYS[:1]) == {}
    box.assert_pool_is_free()


def test_a_client_is_not_closed_under_a_call(box, mooncake, monkeypatch, caplog):
    """It would take the process with it."""
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.5)
    box = box("mooncake", blocking_timeout_secs=0.5).write()
    connector = box.backend.connection.getWrappedConnector()
    closed = []
    pool = box.manager.local_cpu_backend.memory_allocator.pin_allocator.buffer  # until the end
    monkeypatch.setattr(type(connector._theirs), "close", lambda theirs: closed.append(theirs))
    claim = box.store.claim(box.store.locate(KEYS))
    mooncake.pause()
    try:
        with pytest.raises(LoadError):
            box.fetch(claim, KEYS[:1])
        box.close()
        assert connector.calls and not closed
    finally:
        mooncake.resume()
    assert "so it is not closed" in caplog.text
    until(lambda: not connector.calls, "a call does not end")
    del pool


def test_closing_writes_what_is_queued(box, mooncake):
    box = box("mooncake")
    names = [box.store.engine_key(key).to_string() for key in MANY]
    put(box.store, MANY, SIZE)
    box.close()
    assert mooncake.client.batch_is_exist(names) == [1] * len(MANY)
