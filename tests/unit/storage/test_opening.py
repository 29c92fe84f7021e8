# SPDX-License-Identifier: Apache-2.0
"""Backends of LMCache that do not open."""

import logging
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig

from lmcache_hybrid.storage.open_store import LOOP_THREAD, open_backends
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder, LMCacheManager

from ..store_box import MODEL, POOL_GB, N


def settings(folder: Path, opens: bool) -> LMCacheEngineConfig:
    """Of a disk; if it does not open, a file is in its place."""
    disk = folder / "disk"
    disk.mkdir() if opens else disk.touch()
    return LMCacheEngineConfig.from_defaults(
        chunk_size=N, max_local_cpu_size=POOL_GB, local_disk=str(disk), max_local_disk_size=0.01
    )


def test_a_pool_that_is_full_is_no_warning(tmp_path, caplog):
    """LMCache warns of each record for which it then evicts another."""
    theirs = logging.getLogger("lmcache.v1.memory_management")
    engine = make_engine("full pool", settings(tmp_path, True), MODEL)
    manager = LMCacheManager(
        engine.config, Mock(**{"get_or_create_lmcache_engine.return_value": engine})
    )
    theirs.addHandler(caplog.handler)
    try:
        open_backends(manager)
        pool = engine.storage_manager.local_cpu_backend.memory_allocator
        held = []
        while (memory := pool.allocate(torch.Size([1 << 20]), torch.uint8)) is not None:
            held.append(memory)
        theirs.warning("something else")
        said = [record.message for record in caplog.records if record.name == theirs.name]
        assert held and said == ["something else"]
    finally:
        theirs.removeHandler(caplog.handler)
        LMCacheEngineBuilder.destroy("full pool")


@pytest.mark.parametrize("opens", [True, False])
def test_a_store_that_does_not_open_leaves_no_thread(tmp_path, hybrid_log, opens):
    """Python would wait for LMCache's event loop when the process ends."""
    config, name = settings(tmp_path, opens), f"opening {opens}"
    engine = make_engine(name, config, MODEL)
    # The real factory makes the same engine of a vLLM that runs.
    factory = Mock(**{"get_or_create_lmcache_engine.return_value": engine})
    manager = LMCacheManager(config, factory)
    before = set(threading.enumerate())
    try:
        assert open_backends(manager) is (engine if opens else None)
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert (LOOP_THREAD in left) == bool(left) == opens
        assert ("could not open its store" in hybrid_log.text) != opens
    finally:
        LMCacheEngineBuilder.destroy(name)
        for thread in set(threading.enumerate()) - before:  # else a failed test never ends
            for loop in thread._args if thread.name == LOOP_THREAD else ():
                loop.call_soon_threadsafe(loop.stop)
