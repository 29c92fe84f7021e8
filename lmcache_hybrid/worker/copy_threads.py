# SPDX-License-Identifier: Apache-2.0
"""Threads that copy between pages and record buffers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from typing import TypeVar

from vllm.logger import init_logger

from lmcache_hybrid.core.threads import anywhere, started
from lmcache_hybrid.core.threads import cores as _cores

logger = init_logger("vllm.lmcache_hybrid.worker.copy_threads")

T = TypeVar("T")

# Four threads saturate memory bandwidth.
COPIERS = 4
# Below this many bytes a second thread does not pay off.
WORTH_A_THREAD = 1 << 20


class CopyThreads:
    """Thread pool for copies. Jobs must release the GIL."""

    def __init__(self, name: str) -> None:
        """Start no thread yet: the first large call starts all."""
        self._name = name
        self._cores = _cores()
        self._starting = threading.Lock()
        self._pool: Executor | None = None

    def each(self, function: Callable[[T], None], items: Sequence[T], size: int) -> None:
        """Call ``function`` on all items, ``size`` bytes together.

        Raises the first exception, once all calls have ended.
        """
        little = size < WORTH_A_THREAD or len(items) == 1
        pool = None if little else self._started()
        if pool is None:
            for item in items:
                function(item)
            return
        calls = [pool.submit(function, item) for item in items]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            for call in calls:
                call.cancel()
            wait(calls)
        for call in calls:
            if not call.cancelled():
                call.result()

    def _started(self) -> Executor | None:
        """Return the threads; None if they cannot be started now."""
        with self._starting:
            if self._pool is None:
                count = min(COPIERS, len(self._cores))
                try:
                    self._pool = started(count, self._name, anywhere(self._cores))
                except RuntimeError as error:
                    logger.warning_once(
                        "%d threads to copy the KV cache with could not be started (%s): copies "
                        "are slower. Raise the limit of processes (ulimit -u, pids.max).",
                        count,
                        error,
                    )
            return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
