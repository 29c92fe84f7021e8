# SPDX-License-Identifier: Apache-2.0
"""Pins records in LMCache's backends, by record and not by key.

Under one key there can be one record now and another later, after a discard and a new
write. LMCache's ``unpin(key)`` takes a pin from whichever is there, and its pin monitor
takes all pins of a record away after ``pin_timeout_sec``; the next ``unpin(key)`` is then
somebody else's.
"""

from collections.abc import Callable
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

# Gives one pin back. Call it exactly once, from any thread.
Unpin = Callable[[], None]


def pin(backend: Any, key: CacheEngineKey) -> Unpin | None:
    """Keep a record from being evicted; None where the backend does not have it.

    Args:
        backend: ``LocalCPUBackend`` or ``LocalDiskBackend``, see ``PINNING``.
    """
    if isinstance(backend, LocalCPUBackend):
        return _pin_memory(backend, key)
    assert isinstance(backend, LocalDiskBackend)
    return _pin_file(backend, key)


def _pin_memory(backend: LocalCPUBackend, key: CacheEngineKey) -> Unpin | None:
    """A reference instead of LMCache's pin, which anybody can take away.

    LMCache evicts no record that somebody refers to. One that is removed by force keeps its
    memory until the last reference is gone.
    """
    with backend.cpu_lock:
        memory = backend.hot_cache.get(key)
        if memory is None:
            return None
        memory.ref_count_up()
    return memory.ref_count_down


def _pin_file(backend: LocalDiskBackend, key: CacheEngineKey) -> Unpin | None:
    """A pin of the index entry; a new file under this key has another entry."""
    with backend.disk_lock:
        entry = backend.dict.get(key)
        if entry is None:
            return None
        entry.pin()

    def unpin() -> None:
        with backend.disk_lock:
            entry.unpin()

    return unpin
