# SPDX-License-Identifier: Apache-2.0
"""Faults in the engine's own process."""

import os
import signal
import threading
import time
from collections.abc import Callable

from lmcache_hybrid.storage import record_format


class Inside:
    """Faults in the engine's own process: ``engine.call("fault", name=METHOD)`` runs one.

    Owns what it has pinned and taken from LMCache's pool, until ``free_pool``.
    """

    def __init__(self, llm, worker) -> None:
        self._llm = llm
        self._worker = worker
        self._store = worker.store
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
        for size in (record_format.payload_bytes(self._store._reservation.largest), 1):
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

    def lose_states(self) -> None:
        """Restore attention only, from now on."""
        from lmcache_hybrid.core.keys import STATE

        copies = self._worker.loads._copies
        scatter = copies.scatter
        copies.scatter = lambda items, after: scatter(
            [item for item in items if item.key.kind != STATE], after
        )

    def lose_drafter(self, layers: str) -> list[str]:
        """Restore all but the pages of the drafter's layers, from now on; return their names.

        Args:
            layers: how their names begin.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        caches = get_kv_transfer_group().kv_caches
        names = [name for name in caches if name.startswith(layers)]
        copies = self._worker.loads._copies
        scatter = copies.scatter

        def all_but_theirs(items, after) -> None:
            places = [
                caches[n][item.block] for n in names for item in items if n in item.pages.layers
            ]
            before = [place.clone() for place in places]
            scatter(items, after)
            for place, old in zip(places, before, strict=True):
                place.copy_(old)

        copies.scatter = all_but_theirs
        return names

    # LMCache's health

    def healthy(self, value: bool) -> None:
        self._store._engine._health_monitor._set_healthy(value)

    # Time

    def abort_in_load(self, prompts: list[list[int]]) -> list[int]:
        """Abort requests while the store is slow and their loads are under way.

        Returns (loads under way at the abort, used blocks before the loads ended).
        """
        from vllm import SamplingParams

        fetch, begun, gate = self._store.fetch, threading.Event(), threading.Event()

        def slow(claim, keys):
            begun.set()
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
            self._step(lambda: len(self._worker.loads) == len(prompts))
            assert begun.wait(30)  # else its thread may be so late that it is cancelled
            loading = len(self._worker.loads)
            engine.abort_request(names)
            for _ in range(5):
                engine.step()
            held = pool.num_gpu_blocks - pool.get_num_free_blocks()
        finally:
            gate.set()
            del self._store.fetch
        self._step(lambda: not self._worker.loads)
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
