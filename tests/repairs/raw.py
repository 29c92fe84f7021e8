# SPDX-License-Identifier: Apache-2.0
"""LMCache's engine and CPU pool as they are, without any of our repairs."""

import itertools
import time
from collections.abc import Callable

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

GIB = 1 << 30
POOL = 1 << 22
SIZE = 4096  # bytes of a value, which LMCache's pool does not round
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
    """An engine with nothing but its CPU pool."""

    def __init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16, max_local_cpu_size=POOL / GIB, local_cpu=True
        )
        self.name = f"raw-{next(_names)}"
        self.engine = make_engine(self.name, config, "tiny")
        self.engine.post_init()
        self.manager = self.engine.storage_manager
        self.backend = self.manager.local_cpu_backend

    def allocate(self) -> MemoryObj | None:
        shape = record_shape(SIZE)
        return self.manager.allocate(shape, torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False)

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.name)
