# SPDX-License-Identifier: Apache-2.0
"""Locates many records in LMCache's backends, in one call to each.

LMCache's own ``batched_contains`` stops at the first missing key, and asks most remote stores for
one key after the other.
"""

import concurrent.futures
import math
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from vllm.logger import init_logger

from lmcache_hybrid.storage.remote import connectors as remote

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.storage_manager import StorageManager

logger = init_logger("vllm.lmcache_hybrid.storage.tier_lookup")

# A store that did not answer is not asked for the first time; twice as long after each further
# silence, up to the second.
FIRST_PAUSE_SECONDS = 1.0
PAUSE_SECONDS = 10.0
# A store that was given less than this part of the longest time so far is not blamed.
FAIR_PART = 0.25


class SilentStores:
    """Remote stores that did not answer in time, which are left alone for a while.

    Otherwise every request would wait for a store that is down. Used by the lookup thread only.
    """

    def __init__(self) -> None:
        # By store: ``time.monotonic`` of its end, and its length in seconds.
        self._pauses: dict[str, tuple[float, float]] = {}
        self._longest = 0.0  # seconds

    def __contains__(self, name: str) -> bool:
        return time.monotonic() < self._pauses.get(name, (0.0, 0.0))[0]

    def add(self, name: str) -> float:
        """Leave a store alone, longer each time; returns the seconds."""
        pause = min(2 * self._pauses.get(name, (0.0, FIRST_PAUSE_SECONDS / 2))[1], PAUSE_SECONDS)
        self._pauses[name] = time.monotonic() + pause, pause
        return pause

    def is_fair(self, seconds: float) -> bool:
        """Whether a store that does not answer within ``seconds`` is silent."""
        if seconds < math.inf:
            self._longest = max(self._longest, seconds)
        return seconds > 0 and seconds >= FAIR_PART * self._longest

    def answered(self, name: str) -> None:
        self._pauses.pop(name, None)


def locate(
    manager: "StorageManager",
    keys: Sequence[CacheEngineKey],
    search_range: list[str] | None,
    deadline: float,
    silent: SilentStores,
    hidden: Callable[[str], Container[CacheEngineKey]],
) -> list[str | None]:
    """Name the first backend that holds each key, None where none does.

    Each backend is asked for the keys that those before it lack. One that fails or does not
    answer in time counts as empty, with a warning.

    Args:
        search_range: names of the backends to ask, None for all.
        deadline: ``time.monotonic`` by which the lookup must end. A remote store gets half of
            what is left, so records in nearer backends can still be claimed when it is silent.
        silent: remote stores that are left alone. Mutated.
        hidden: by name of a backend, keys that it is not asked for.
    """
    found: list[str | None] = [None] * len(keys)
    missing = list(range(len(keys)))
    for name, backend in manager.get_active_storage_backends(search_range=search_range):
        skipped = hidden(name)
        asked = [at for at in missing if keys[at] not in skipped]
        if not asked:
            continue
        held = _held(name, backend, [keys[at] for at in asked], deadline, silent)
        for at, is_held in zip(asked, held, strict=True):
            if is_held:
                found[at] = name
        missing = [at for at in missing if found[at] is None]
    return found


def _held(
    name: str,
    backend: Any,
    keys: Sequence[CacheEngineKey],
    deadline: float,
    silent: SilentStores,
) -> Sequence[bool]:
    if isinstance(backend, LocalCPUBackend):
        with backend.cpu_lock:
            return [key in backend.hot_cache for key in keys]
    if isinstance(backend, LocalDiskBackend):
        with backend.disk_lock:
            return [key in backend.dict for key in keys]
    if name in silent:
        return [False] * len(keys)
    left = max(0.0, deadline - time.monotonic()) / 2
    fair = silent.is_fair(left)
    try:
        if not isinstance(backend, RemoteBackend):
            return [backend.contains(key) for key in keys]
        held = remote.existing(backend, keys, left)
        silent.answered(name)
        return held
    except (TimeoutError, concurrent.futures.TimeoutError):
        if not fair:  # a busy rank began late: that says nothing of the store
            return [False] * len(keys)
        pause = silent.add(name)
        logger.warning(
            "%s did not answer a cache lookup in time (lookup_timeout_ms): it counts as empty "
            "for %.0f s. Check the store and the network to it.",
            name,
            pause,
        )
    except Exception as error:
        # In its repr redis leaves out what the server said.
        said = f"{type(error).__name__}: {error}"
        logger.warning("%s counts as empty in one cache lookup: %s", name, said)
    return [False] * len(keys)
