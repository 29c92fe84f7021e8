# SPDX-License-Identifier: Apache-2.0
"""Where the time of one restore and one save goes."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

from benchmarks.performance.path import Rank, prefix_of, rank
from benchmarks.performance.shapes import Shape
from lmcache_hybrid.storage import lmcache_store
from lmcache_hybrid.storage.lmcache_store import LMCacheStore
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.worker.pages import GroupPages

# (what it does, owner, function); each excludes what is listed below it and called by it.
PARTS = (
    ("look up and pin", RankLookup, "answer"),
    ("read from the backend", LMCacheStore, "_read"),
    ("check the header", lmcache_store, "open_record"),
    ("check and copy into the cache", GroupPages, "scatter"),
    ("memory for new records", LMCacheStore, "reserve"),
    ("copy out of the cache and digest", GroupPages, "gather"),
    ("write the header", lmcache_store, "seal"),
    ("hand over to LMCache", LMCacheStore, "put"),
    ("order of eviction", LMCacheStore, "arrange"),
)


class Stopwatch:
    """Seconds by part, added up over threads, without what a part calls of the others."""

    def __init__(self, stack: ExitStack) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._inner = threading.local()
        for part, owner, name in PARTS:
            stack.enter_context(
                mock.patch.object(owner, name, self._timed(part, getattr(owner, name)))
            )

    def _timed(self, part: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            outer, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                with self._lock:
                    self.seconds[part] += seconds - self._inner.seconds
                self._inner.seconds = outer + seconds

        return timed

    def take(self) -> dict[str, float]:
        with self._lock:
            taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def profile(backend: str, shape: Shape, blocks: int) -> dict[str, dict[str, float]]:
    """Thread seconds of one save and one restore by part, and the wall seconds of each."""
    with ExitStack() as stack, rank(backend, shape, blocks) as one:
        _round(one, blocks, 0)
        watch = Stopwatch(stack)
        return _round(one, blocks, 1, watch)


def _round(one: Rank, blocks: int, seed: int, watch: Stopwatch | None = None) -> dict:
    prefix, parts = prefix_of(blocks, seed), {}
    started = time.perf_counter()
    one.save(f"s{seed}", prefix)
    wall = time.perf_counter() - started
    parts["save"] = {"wall": wall, **(watch.take() if watch else {})}
    one.settle()
    if watch:
        watch.take()
    wall = one.restore(f"r{seed}", prefix)
    parts["restore"] = {"wall": wall, **(watch.take() if watch else {})}
    one.clear()
    return parts
