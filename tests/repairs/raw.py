# SPDX-License-Identifier: Apache-2.0
"""LMCache's engine and backends as they are, without any of our repairs."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from unit.store_box import Box

from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

GIB = 1 << 30
POOL = 1 << 22
SIZE = 4096  # bytes of a value, which LMCache's pool and disks do not round
KEYS = [CacheEngineKey("tiny", 1, 0, number, torch.uint8, {}) for number in range(1, 5)]
# Until what does not happen counts as never happening.
NEVER = 1.0

_names = itertools.count()


def happens(condition: Callable[[], bool], seconds: float = NEVER) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Raw:
    """An engine with one backend beside its CPU pool, which keeps no records of its own."""

    def __init__(self, name: str, **settings: Any) -> None:
        """
        Args:
            name: of the backend.
            settings: of LMCache.
        """
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16, max_local_cpu_size=POOL / GIB, local_cpu=name == "LocalCPUBackend"
        )
        for setting, value in settings.items():
            assert hasattr(config, setting)
            setattr(config, setting, value)
        self.name = f"raw-{next(_names)}"
        self.engine = make_engine(self.name, config, "tiny")
        self.engine.post_init()
        self.manager = self.engine.storage_manager
        self.backend = self.manager.storage_backends[name]
        self.start = self.used()

    def used(self) -> int:
        """Bytes of the CPU pool that are given out."""
        allocator = self.manager.local_cpu_backend.memory_allocator.pin_allocator
        return allocator.address_manager.total_allocated_size

    def allocate(self) -> MemoryObj | None:
        shape = record_shape(SIZE)
        return self.manager.allocate(shape, torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False)

    def put(self, keys: list[CacheEngineKey]) -> None:
        """Write some zeros under these keys; raises what the backend raises."""
        memories = [self.allocate() for _ in keys]
        for memory in memories:
            memory.tensor.fill_(0)
        try:
            self.backend.batched_submit_put_task(keys, memories)
        finally:
            for memory in memories:
                memory.ref_count_down()

    def write(self, keys: list[CacheEngineKey]) -> "Raw":
        self.put(keys)
        assert happens(lambda: all(map(self.backend.contains, keys)), 20), "nothing was written"
        assert happens(lambda: self.used() == self.start, 20)
        return self

    def path(self, key: CacheEngineKey) -> Path:
        return Path(self.backend._key_to_path(key))

    def close(self) -> None:
        if LMCacheEngineBuilder.get(self.name) is not None:
            if hasattr(self.backend, "disk_worker"):
                Box.rest(self)
            LMCacheEngineBuilder.destroy(self.name)
