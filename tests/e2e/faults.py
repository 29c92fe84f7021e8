# SPDX-License-Identifier: Apache-2.0
"""Faults to inject: a proxy before Redis, shelves to damage records on, and faults in the engine.

Only the fault itself is put in; vLLM, LMCache and this package run as they are.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import xxhash

from lmcache_hybrid.storage import record

# Damage to the bytes of one record


def flipped(data: bytes, at: int = -1) -> bytes:
    """One bit is another."""
    broken = bytearray(data)
    broken[at] ^= 1
    return bytes(broken)


def flipped_in_header(data: bytes) -> bytes:
    return flipped(data, 20)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


def foreign(data: bytes) -> bytes:
    """As long, and nobody's record."""
    return random.Random(0).randbytes(len(data))


def of_another_version(data: bytes) -> bytes:
    """A header that is right in itself, written by a later program."""
    fields = bytearray(data[: record._FIELDS.size])
    struct.pack_into("<H", fields, len(record.MAGIC), record.VERSION + 1)
    checksum = record._CHECKSUM.pack(xxhash.xxh3_64_intdigest(bytes(fields)))
    return bytes(fields) + checksum + data[len(fields) + len(checksum) :]


class Shelf(Protocol):
    """Where a store keeps its records, reached behind LMCache's back.

    Names hold the record's label: ``%s0-`` for the state of group 0, ``%a2-`` for
    the attention pages of group 2.
    """

    def names(self) -> set[str]: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


class RamShelf:
    """LMCache's hot cache, inside the engine. A shorter value is filled up with zeros."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def names(self) -> set[str]:
        return set(self._engine.call("fault", name="records"))

    def read(self, name: str) -> bytes:
        return bytes.fromhex(self._engine.call("fault", name="read", record=name))

    def write(self, name: str, data: bytes) -> None:
        self._engine.call("fault", name="write", record=name, data=data.hex())

    def remove(self, name: str) -> None:
        self._engine.call("fault", name="remove", record=name)


class DiskShelf:
    """The files of ``local_disk``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> set[str]:
        return {file.name for file in self.folder.glob("*.pt")}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class RedisShelf:
    """The values in a Redis server; LMCache keeps a second one with each record's size."""

    def __init__(self, client) -> None:
        self.client = client

    def names(self) -> set[str]:
        return {key.decode().removesuffix("kv_bytes") for key in self.client.keys("*kv_bytes")}

    def read(self, name: str) -> bytes:
        return self.client.get(name + "kv_bytes")

    def write(self, name: str, data: bytes) -> None:
        self.client.set(name + "kv_bytes", data)

    def remove(self, name: str) -> None:
        self.client.delete(name + "kv_bytes", name + "metadata")


# The network


class Proxy:
    """A TCP proxy on a port of its own that can stop, cut and refuse connections.

    Args:
        port: of the server behind it, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._left: int | None = None
        self._sent: int | None = None
        self._listener: socket.socket | None = None
        self.port = 0
        self.accept()

    def pause(self) -> None:
        """Deliver nothing more; connections stay open."""
        self._flowing.clear()

    def pause_after(self, size: int) -> None:
        """Deliver ``size`` more bytes to the server, and then nothing."""
        with self._lock:
            self._sent = size

    @property
    def paused(self) -> bool:
        return not self._flowing.is_set()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Close every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def cut_after(self, size: int) -> None:
        """Refuse and cut everything once the server has sent ``size`` more bytes."""
        with self._lock:
            self._left = size

    def refuse(self) -> None:
        """No new connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # Wakes the thread in accept(), which close() alone does not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def accept(self) -> None:
        """Take new connections, on the same port as before."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def restore(self) -> None:
        """Work as an ordinary proxy again."""
        with self._lock:
            self._left = self._sent = None
        self.resume()
        self.accept()

    def close(self) -> None:
        self.refuse()
        self.cut()
        self.resume()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(
                    target=self._pump, args=(source, sink, source is server), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._flowing.wait()
                if answers:
                    sink.sendall(self._allowed(data))
                else:
                    rest = self._send_until_pause(sink, data)
                    self._flowing.wait()
                    sink.sendall(rest)
        with self._lock:
            self._sockets -= {source, sink}
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _send_until_pause(self, sink: socket.socket, data: bytes) -> bytes:
        """Send what may pass before the pause; returns the rest."""
        with self._lock:
            if self._sent is None:
                passing = len(data)
            else:
                passing = min(len(data), self._sent)
                self._sent -= passing
                if not self._sent:
                    self._sent = None
                    self._flowing.clear()
        sink.sendall(data[:passing])
        return data[passing:]

    def _allowed(self, data: bytes) -> bytes:
        with self._lock:
            if self._left is None:
                return data
            data, self._left = data[: self._left], max(0, self._left - len(data))
            over = not self._left
        if over:
            self.refuse()
            self.cut()
        return data


# The disk


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A file system of its own on ``folder``; False where this user may not mount."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def disk_full(folder: Path) -> Iterator[None]:
    """Not a byte is left on the file system of ``folder``, which should be a small one."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def kept_by_links(folder: Path) -> Iterator[None]:
    """A backup of ``folder`` made of links: deleting a file there gives no room back."""
    backup = folder.with_name("backup")
    backup.mkdir()
    for file in folder.glob("*.pt"):
        os.link(file, backup / file.name)
    try:
        yield
    finally:
        shutil.rmtree(backup)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The file system mounted on ``folder`` takes no writes, not even from root."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


# Inside the engine


class Inside:
    """Faults in the engine's own process; each method is a name for ``engine.call("fault")``."""

    def __init__(self, llm, worker) -> None:
        self._llm = llm
        self._worker = worker
        self._store = worker._store
        self._pool = self._store.manager.local_cpu_backend
        self._filling: list = []
        self._pinned: list = []

    # LMCache's hot cache

    def records(self) -> list[str]:
        return [key.to_string() for key in self._pool.hot_cache]

    def _memory(self, record: str):
        (found,) = (m for key, m in self._pool.hot_cache.items() if key.to_string() == record)
        return found

    def read(self, record: str) -> str:
        return bytes(self._memory(record).byte_array).hex()

    def write(self, record: str, data: str) -> None:
        view = memoryview(self._memory(record).byte_array).cast("B")
        view[:] = bytes.fromhex(data).ljust(len(view), b"\0")

    def remove(self, record: str) -> None:
        """As a forced eviction does, pins or not."""
        (key,) = (key for key in self._pool.hot_cache if key.to_string() == record)
        assert self._pool.remove(key)

    # LMCache's memory

    def _take_all(self) -> list:
        """All memory that is free or can be evicted."""
        taken = []
        for size in (record.payload_bytes(self._store._staging.largest), 1):
            taken += iter(lambda size=size: self._store.reserve(size), None)
        return taken

    def scrub(self) -> None:
        """Overwrite free memory, where a short read would find the old record."""
        for memory in self._take_free():
            memory.memory.raw_tensor.fill_(0xAA)
            memory.release()

    def _take_free(self) -> list:
        self._pin_stored()
        taken = self._take_all()
        self._unpin_stored()
        return taken

    def _pin_stored(self) -> None:
        self._pinned = list(self._pool.hot_cache.values())
        for memory in self._pinned:
            memory.pin()

    def _unpin_stored(self) -> None:
        pinned, self._pinned = self._pinned, []
        for memory in pinned:
            memory.unpin()

    def fill_pool(self) -> int:
        """Leave no memory, until ``free_pool``; what is stored stays."""
        self._filling = self._take_free()
        self._pin_stored()
        return len(self._filling)

    def free_pool(self) -> None:
        self._unpin_stored()
        filling, self._filling = self._filling, []
        for memory in filling:
            memory.release()

    def evict(self) -> None:
        """Need all memory once: everything that is not pinned is evicted."""
        for memory in self._take_all():
            memory.release()

    # LMCache's health

    def healthy(self, value: bool) -> None:
        self._store._engine._health_monitor._set_healthy(value)

    # Time

    def abort_in_load(self, prompts: list[list[int]]) -> list[int]:
        """Abort requests while the store is slow and their loads are under way.

        Returns (loads under way at the abort, used blocks before the loads ended).
        """
        from vllm import SamplingParams

        fetch, gate = self._store.fetch, threading.Event()

        def slow(claim, keys):
            assert gate.wait(60)
            return fetch(claim, keys)

        self._store.fetch = slow
        engine, pool = self._llm.llm_engine, self._llm.llm_engine.engine_core.engine_core
        pool = pool.scheduler.kv_cache_manager.block_pool
        try:
            names = [f"aborted-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
            for name, ids in zip(names, prompts):
                params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
                engine.add_request(name, {"prompt_token_ids": ids}, params)
            self._step(lambda: len(self._worker._loads) == len(prompts))
            loading = len(self._worker._loads)
            engine.abort_request(names)
            for _ in range(5):
                engine.step()
            held = pool.num_gpu_blocks - pool.get_num_free_blocks()
        finally:
            gate.set()
            del self._store.fetch
        self._step(lambda: not self._worker._loads)
        engine.step()
        return [loading, held]

    def _step(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not until():
            assert time.monotonic() < deadline, "the engine does not get there"
            self._llm.llm_engine.step()

    # Death

    def die_in_write(self, after: int) -> None:
        """Be killed when the write to local_disk after ``after`` whole ones is half done."""
        backend = self._store.manager.storage_backends["LocalDiskBackend"]
        write, left, lock = backend.write_file, after, threading.Lock()

        def die(buffer, path) -> None:
            nonlocal left
            with lock:
                if left:
                    left -= 1
                    return write(buffer, path)
                with open(path, "wb") as file:
                    file.write(memoryview(buffer)[: len(buffer) // 2])
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)

        backend.write_file = die
