# SPDX-License-Identifier: Apache-2.0
"""Claims of records in LMCache's backends. A claim pins the records, not their keys.

A key may name another record later, after a discard and a new write. LMCache's
``unpin(key)`` takes a pin from whichever record the key names now. Its pin monitor removes
all pins of a record after ``pin_timeout_sec``; a later ``unpin(key)`` may then release
another request's pin.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from lmcache_hybrid.core.keys import RecordKey

# Backends that keep an index here and honour pins.
PINNING = ("LocalCPUBackend", "LocalDiskBackend")
# Gives pins back. Call it exactly once, from any thread.
Unpin = Callable[[], None]


class LMCacheClaim:
    """Records that no backend here evicts until :meth:`release`, which the owner calls.

    Attributes:
        keys: of the records.
        located: backend of each record.
        made: ``time.monotonic`` of the claim; a remote store that was silent since is not asked.
        held: False once released.
    """

    def __init__(self, located: Mapping[RecordKey, str]) -> None:
        self.keys = tuple(located)
        self.located = dict(located)
        self.made = time.monotonic()
        self.held = True
        self._lock = threading.Lock()
        self._pinned: list[Unpin] = []

    def pin(
        self, backends: Mapping[str, Any], engine_key: Callable[[RecordKey], CacheEngineKey]
    ) -> bool:
        """Pin every key whose backend has pins. On False one is gone: release the claim."""
        for location in PINNING:
            keys = [engine_key(key) for key, where in self.located.items() if where == location]
            unpin = pin(backends[location], keys) if keys else None
            if unpin is not None:
                self._pinned.append(unpin)
            elif keys:
                return False
        return True

    def release(self) -> None:
        """Unpin. May be called more than once, from any thread."""
        with self._lock:
            self.held = False
            pinned, self._pinned = self._pinned, []
        with ExitStack() as each:  # an error of one keeps none of the others pinned
            for unpin in pinned:
                each.callback(unpin)


def pin(backend: Any, keys: Sequence[CacheEngineKey]) -> Unpin | None:
    """Keep records from being evicted; None, and no pin, where the backend lacks one.

    Args:
        backend: ``LocalCPUBackend`` or ``LocalDiskBackend``, see ``PINNING``.
    """
    if isinstance(backend, LocalCPUBackend):
        return _pin_memory(backend, keys)
    assert isinstance(backend, LocalDiskBackend)
    return _pin_files(backend, keys)


def _pin_memory(backend: LocalCPUBackend, keys: Sequence[CacheEngineKey]) -> Unpin | None:
    """Hold references, because anybody can take LMCache's own pins away.

    LMCache evicts no record that somebody refers to. One that is removed by force keeps its
    memory until the last reference is gone.
    """
    with backend.cpu_lock:
        memories = [backend.hot_cache.get(key) for key in keys]
        if None in memories:
            return None
        for memory in memories:
            memory.ref_count_up()
    return functools.partial(_unpin_memory, memories)


def _unpin_memory(memories: Sequence[MemoryObj]) -> None:
    for memory in memories:
        memory.ref_count_down()


def _pin_files(backend: LocalDiskBackend, keys: Sequence[CacheEngineKey]) -> Unpin | None:
    """Pin the index entries; a new file under one of these keys gets another entry."""
    with backend.disk_lock:
        entries = [backend.dict.get(key) for key in keys]
        if None in entries:
            return None
        for entry in entries:
            entry.pin()

    def unpin() -> None:
        with backend.disk_lock:
            for entry in entries:
                entry.unpin()

    return unpin
