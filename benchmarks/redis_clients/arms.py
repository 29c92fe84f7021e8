# SPDX-License-Identifier: Apache-2.0
"""One class per client. Each reads values into memory that is there before, as a pool's is."""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

# Connections, or threads that share one, of each arm.
THREADS = 4
MODEL = "bench-clients"


class Arm(Protocol):
    """A client of one server. Used by one thread; it may have others."""

    def read(self, names: Sequence[str], targets: Sequence[memoryview]) -> None:
        """Read each value to the start of its target; raises where a value is not there."""

    def write(self, names: Sequence[str], values: Sequence[memoryview]) -> None: ...

    def close(self) -> None: ...


class Missing(Exception):
    """The server has no such value."""


class OtherLength(Exception):
    """The value that came is not as long as its target."""


class Sockets:
    """The limit: GET and SET on bare sockets, with nothing checked but the length."""

    def __init__(self, port: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(THREADS)]
        self._threads = ThreadPoolExecutor(THREADS)

    def read(self, names: Sequence[str], targets: Sequence[memoryview]) -> None:
        self._side_by_side(self._get, names, targets)

    def write(self, names: Sequence[str], values: Sequence[memoryview]) -> None:
        self._side_by_side(self._set, names, values)

    def _side_by_side(self, each: Callable, names: Sequence[str], values: Sequence) -> None:
        def some(at: int) -> None:
            for name, value in list(zip(names, values))[at::THREADS]:
                each(self._sockets[at], name.encode(), value)

        list(self._threads.map(some, range(THREADS)))

    @staticmethod
    def _get(sock: socket.socket, name: bytes, target: memoryview) -> None:
        sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        line, _, rest = sock.recv(64).partition(b"\r\n")
        size = int(line[1:])
        target[: len(rest)] = rest
        got = len(rest)
        while got < size:
            got += sock.recv_into(target[got:size])
        while got < size + 2:
            got += len(sock.recv(size + 2 - got))

    @staticmethod
    def _set(sock: socket.socket, name: bytes, value: memoryview) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n"
        sock.sendall(head % (len(name), name, value.nbytes))
        sock.sendall(value)
        sock.sendall(b"\r\n")
        assert sock.recv(64) == b"+OK\r\n"

    def close(self) -> None:
        self._threads.shutdown()
        for each in self._sockets:
            each.close()


def key_of(name: str) -> Any:
    """LMCache's key of a value."""
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey(MODEL, 1, 0, int(name, 16), torch.uint8, {})


class Ours:
    """This package's connector in LMCache's remote backend, its pool included."""

    def __init__(self, port: int, size: int, count: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig

        from lmcache_hybrid.storage.read_reservation import ReadReservation
        from lmcache_hybrid.tools.standalone import make_engine

        pool = 2.5 * size * count / (1 << 30)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16,
            max_local_cpu_size=pool,
            local_cpu=False,
            remote_url=f"redis://127.0.0.1:{port}",
        )
        self._engine = make_engine(MODEL, config, MODEL)
        self._engine.post_init()
        manager = self._engine.storage_manager
        self._backend = manager.storage_backends["RemoteBackend"]
        self._loop, self._pool = manager.loop, manager.local_cpu_backend
        ReadReservation(self._pool, size)  # as an engine does: a full pool never waits

    def read(self, names: Sequence[str], targets: Sequence[memoryview]) -> None:
        """The targets are the pool's own, so nothing is copied to these."""
        jobs = [self._run(self._backend.connection.get(key_of(name))) for name in names]
        for job, target in zip(jobs, targets):
            memory = job.result(60)
            if memory is None:
                raise Missing
            if len(memory.byte_array) != len(target):
                memory.ref_count_down()
                raise OtherLength
            memory.ref_count_down()

    def write(self, names: Sequence[str], values: Sequence[memoryview]) -> None:
        """``values`` lie in the pool before the clock starts, see :meth:`take`."""
        for memory in self._taken:
            memory.ref_count_up()
        job = self._backend.connection.batched_put([key_of(n) for n in names], self._taken)
        self._run(job).result(60)

    def take(self, values: Sequence[memoryview]) -> None:
        from lmcache.v1.memory_management import MemoryFormat

        from lmcache_hybrid.storage.buffer import record_shape

        self._taken = []
        for value in values:
            shape = record_shape(len(value))
            memory = self._pool.allocate(shape, torch.uint8, MemoryFormat.KV_2LTD)
            memoryview(memory.byte_array).cast("B")[:] = value
            self._taken.append(memory)

    def _run(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    def close(self) -> None:
        from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

        LMCacheEngineBuilder.destroy(MODEL)


class _Threaded:
    """A client that gives bytes, which are copied to their place."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS)

    def _get(self, name: str, target: memoryview) -> None:
        value = self._client.get(name)
        if value is None:
            raise Missing
        if len(value) != len(target):
            raise OtherLength
        target[:] = value

    def read(self, names: Sequence[str], targets: Sequence[memoryview]) -> None:
        list(self._threads.map(self._get, names, targets))

    def write(self, names: Sequence[str], values: Sequence[memoryview]) -> None:
        list(self._threads.map(self._client.set, names, values))

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()


class RedisPy(_Threaded):
    """redis-py; it parses with hiredis where that is installed."""

    def __init__(self, port: int) -> None:
        import hiredis  # noqa: F401
        import redis

        super().__init__(redis.Redis(port=port, socket_timeout=5))


class Glide(_Threaded):
    """valkey-glide-sync: a client in Rust; threads share its connection."""

    def __init__(self, port: int) -> None:
        from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

        address = NodeAddress("127.0.0.1", port)
        settings = GlideClientConfiguration([address], request_timeout=10_000)
        super().__init__(GlideClient.create(settings))

    def write(self, names: Sequence[str], values: Sequence[memoryview]) -> None:
        # It takes bytes only.
        def put(name: str, value: memoryview) -> None:
            self._client.set(name, bytes(value))

        list(self._threads.map(put, names, values))


class Native:
    """LMCache's own client in C++ (``resp://``)."""

    def __init__(self, port: int) -> None:
        from lmcache.v1.storage_backend.native_clients.resp_client import RESPClient

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> Any:
            return RESPClient("127.0.0.1", port, THREADS)

        self._client = self._run(make())

    def _run(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(60)

    def read(self, names: Sequence[str], targets: Sequence[memoryview]) -> None:
        self._run(self._client.batch_get(list(names), list(targets)))

    def write(self, names: Sequence[str], values: Sequence[memoryview]) -> None:
        self._run(self._client.batch_set(list(names), list(values)))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


# Name, and what makes it for a port, the bytes of a value and their number.
ARMS: dict[str, Callable[[int, int, int], Arm]] = {
    "bare sockets": lambda port, size, count: Sockets(port),
    "this package": Ours,
    "redis-py, hiredis": lambda port, size, count: RedisPy(port),
    "valkey-glide-sync": lambda port, size, count: Glide(port),
    "LMCache's C++ client": lambda port, size, count: Native(port),
}
