# SPDX-License-Identifier: Apache-2.0
"""LMCache's storage in the simulation: real, shared by all programs, breakable by hand."""

import dataclasses
import functools
import itertools
from collections import Counter, deque
from concurrent.futures import Future

import torch
from lmcache.v1.config import LMCacheEngineConfig

from lmcache_hybrid.core.errors import LoadError
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.storage import keep_shares
from lmcache_hybrid.storage.keep_shares import KeptNames
from lmcache_hybrid.storage.lmcache_store import LMCacheStore
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

N = 8  # tokens per block
MODEL = "toy"
POOL_BYTES = 1 << 20
KEEP_SHARE = 0.02  # some ten records, as LMCache's allocator counts others than we do
RECORD_BYTES = 4096  # what LMCache's allocator gives out for one record


@functools.cache
def storage():
    """LMCache's engine with its StorageManager: RAM, room for 256 records."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=N, max_local_cpu_size=POOL_BYTES / (1 << 30), local_cpu=True
    )
    engine = make_engine("simulation", config, MODEL)
    engine.post_init()
    return engine


def close_storage() -> None:
    """End LMCache's threads; the next program starts it anew.

    LMCache gives back the pool before its records: nobody may write into these any more.
    """
    if storage.cache_info().currsize:
        vars(storage().storage_manager.local_cpu_backend.memory_allocator).pop("free", None)
    LMCacheEngineBuilder.destroy("simulation")
    storage.cache_clear()


class Pool:
    """The records of all engines of a program, in LMCache's RAM backend.

    Attributes:
        reuses: by address, how often the memory there was given back; its bytes are then rubbish.
        damaged: keys of records that were damaged.
    """

    def __init__(self) -> None:
        self._engine = storage()
        self._backend = self._engine.storage_manager.local_cpu_backend
        self.reuses: Counter[int] = Counter()
        self.damaged: set = set()
        self._allocator = self._backend.memory_allocator
        self._free = self._allocator.free
        self._allocator.free = self._free_for_good
        self._allocate, self._bounded = self._backend.allocate, None
        self._engine.storage_manager.clear()
        self.clock = 0.0  # seconds that have passed for what is kept
        self.spared = 0  # evictions while something was kept
        self._start = self.used
        assert not self._backend.hot_cache and self._start == 0, "a program left records behind"
        self._ballast: list = []

    def _free_for_good(self, memory, *args, **kwargs) -> None:
        self.reuses[memory.raw_data.data_ptr()] += 1
        memory.raw_data.fill_(0xEE)
        self._free(memory, *args, **kwargs)

    @property
    def used(self) -> int:
        """Bytes of the pool that are given out."""
        allocator = self._backend.memory_allocator.pin_allocator
        return allocator.address_manager.total_allocated_size

    @property
    def records(self) -> list:
        """(key, memory) of everything stored, oldest first."""
        return list(self._backend.hot_cache.items())

    @property
    def pinned(self) -> int:
        """Records that are claimed; call when no load is under way."""
        return sum(not memory.can_evict for _, memory in self.records)

    def bound_once(self) -> None:
        """Each store wraps ``allocate``; here all of them share one backend."""
        self._bounded = self._bounded or self._backend.allocate
        self._backend.allocate = self._bounded
        if isinstance(keep_shares.time, Clock):
            keep_shares.time.pool = self
        policy = self._backend.cache_policy
        policy.pool = self
        if "unchecked" not in vars(policy):
            policy.unchecked = policy.get_evict_candidates
            policy.get_evict_candidates = functools.partial(_evict_checked, policy)

    @property
    def kept(self) -> KeptNames:
        return vars(self._backend.cache_policy).get("kept") or KeptNames(0)

    def check_kept(self, ranks: int) -> None:
        """Raises AssertionError where more is kept than may be.

        Ranks share the pool, and each asks for its own part.
        """
        self.kept.check_integrity()
        most = ranks * KEEP_SHARE * POOL_BYTES
        assert self.kept.size <= most, "more is kept than the share"
        for salt, size in self.kept._of_salt.items():
            assert size <= keep_shares.OF_SALT * most, f"{salt!r} keeps too much"

    def shrink(self, records: int) -> None:
        """Leave room for so many records only."""
        for memory in self._ballast:
            memory.ref_count_down()
        self._ballast.clear()
        while POOL_BYTES - len(self._ballast) * RECORD_BYTES > records * RECORD_BYTES:
            memory = self._backend.allocate(
                torch.Size([1, 1, 1, 200]), torch.uint8, busy_loop=False
            )
            if memory is None:
                break
            self._ballast.append(memory)

    def lose(self, index: int) -> None:
        """Evict one record that is not pinned."""
        records = [key for key, memory in self.records if memory.can_evict]
        if records:
            self._backend.remove(records[index % len(records)])

    def damage(self, index: int, how: str) -> None:
        """Change a record's bytes behind everybody's back, unless a load copies them.

        A device copies them after they were checked: what changes in between nobody can see.
        """
        records = self.records
        if not records:
            return
        key, memory = records[index % len(records)]
        if memory.get_ref_count() > 2:  # LMCache's, a claim's, and the load's
            return
        self.damaged.add(key)
        view = memoryview(memory.byte_array).cast("B")
        if how == "flip":
            view[-1 - index % 40] ^= 1 << index % 8
        elif how == "header":
            view[index % 100] ^= 1 << index % 8
        else:
            other = memoryview(records[(index + 1) % len(records)][1].byte_array).cast("B")
            if len(other) == len(view):
                view[:] = bytes(other)

    def _let_keeps_end(self) -> None:
        self.clock += 86_402
        assert self.kept.size == 0, "what has ended is still kept"
        self.kept.forget_ended()
        assert not self.kept, "what has ended is remembered"

    def close(self) -> None:
        """Raises AssertionError when a buffer or a pin is still held."""
        self._let_keeps_end()
        self.shrink(POOL_BYTES // RECORD_BYTES)
        assert self.pinned == 0, f"{self.pinned} records are still pinned"
        self._engine.storage_manager.clear()
        assert not self._backend.hot_cache
        assert self.used == self._start, f"{self.used} bytes of LMCache's pool are not given back"

    def reset(self) -> None:
        """Whatever a failed program left: the next one must start from nothing."""
        self._backend.allocate = self._allocate
        self._allocator.free = self._free
        self.shrink(POOL_BYTES // RECORD_BYTES)
        self.kept.clear()
        if self.used or self.records:
            close_storage()


class Clock:
    """Stands in for the module ``time`` where kept records end."""

    pool: Pool

    def monotonic(self) -> float:
        return 1000.0 + self.pool.clock


def _evict_checked(policy, index, num_candidates: int = 1) -> list:
    """Raises AssertionError where a kept record goes although another one could."""
    before = {key for key, memory in index.items() if memory.can_evict} if policy.kept else set()
    found = policy.unchecked(index, num_candidates)
    policy.pool.spared += bool(before)
    if any(key in policy.kept for key in found):
        others = [key for key in before if key not in policy.kept]
        assert not others, f"a kept record was evicted before {len(others)} others"
    return found


class RankView:
    """LMCache's engine as one rank of one deployment sees it."""

    def __init__(self, engine, rank: int, ranks: int) -> None:
        self._engine = engine
        self.metadata = dataclasses.replace(engine.metadata, worker_id=rank, world_size=ranks)
        self.healthy = True

    def is_healthy(self) -> bool:
        return self.healthy

    def __getattr__(self, name: str):
        return getattr(self._engine, name)


class FaultyStore(LMCacheStore):
    """The real store with faults that a program switches on.

    All ranks share its RAM, so one of them writes what all hold alike.

    Attributes:
        failing: so many next fetches fail.
        full: no memory for new records.
        damaged: keys of records that may be rejected.
        wronged: records that were rejected although nobody damaged them.
        pause: called where another thread may go on.
    """

    failing = 0
    full = False
    damaged: set = set()
    wronged = 0
    pause = staticmethod(lambda: None)

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for tier in self.tiers.values():
            tier.shared = True

    def discard(self, key, *args, **kwargs) -> None:
        self.wronged += self.engine_key(key) not in self.damaged
        super().discard(key, *args, **kwargs)

    def fetch(self, claim, keys):
        self.pause()
        if self.failing:
            self.failing -= 1
            raise LoadError("a fault of the simulation", "unreachable")
        return super().fetch(claim, keys)

    def reserve(self, payload_bytes: int):
        return None if self.full else super().reserve(payload_bytes)


# Of each engine another one, as drawn at its start.
_salts = itertools.count()


def make_stores(views: list[RankView], plan: GroupPlan) -> list[FaultyStore]:
    """The stores of all ranks of one engine."""
    replicas = None
    if plan.replicated and len(views) > 1:
        salt = next(_salts).to_bytes(16, "big")
        replicas = Replicas(frozenset(plan.replicated), b"alike on all of.", 0, salt)
    return [
        FaultyStore(view, MODEL, bytes([rank + 1]) * 16, plan.block_size * 8, replicas=replicas)
        for rank, view in enumerate(views)
    ]


class ManualExecutor:
    """Stands in for a thread: work runs when the program says so, or at once."""

    def __init__(self, at_once: bool = False) -> None:
        self._at_once = at_once
        self._queue: deque[tuple[Future, object]] = deque()

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        self._queue.append((future, functools.partial(function, *args)))
        if self._at_once:
            self.run()
        return future

    def begin(self) -> None:
        """Start the oldest load; it can no longer be cancelled."""
        if self._queue and not self._queue[0][0].running() and not self._queue[0][0].done():
            self._queue[0][0].set_running_or_notify_cancel()

    def run(self) -> bool:
        """Run the oldest load to its end; False when there is none."""
        if not self._queue:
            return False
        future, work = self._queue.popleft()
        if future.cancelled() or (
            not future.running() and not future.set_running_or_notify_cancel()
        ):
            return True
        future.set_result(work())
        return True

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._queue.clear()
