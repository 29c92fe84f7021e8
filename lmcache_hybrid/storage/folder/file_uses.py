# SPDX-License-Identifier: Apache-2.0
"""Sets the times of files of ``fs://`` that are hit; the cleaner deletes by them."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lmcache.utils import CacheEngineKey
from vllm.logger import init_logger

from lmcache_hybrid.core.threads import DaemonPool
from lmcache_hybrid.storage.folder.least_used import MINUTE

logger = init_logger("vllm.lmcache_hybrid.storage.folder.file_uses")

# Max lookups to queue while a file server is slow; older ones are dropped.
MOST_WAITING = 1000


class FileUses:
    """Marks files as used, each at most once a minute. Thread-safe.

    Works on a thread of its own, so a lookup does not wait for a file server. A file of another
    user that may not be changed keeps its time.
    """

    def __init__(self, path_of: Callable[[CacheEngineKey], str]) -> None:
        """Start the thread.

        Args:
            path_of: names a record's file.
        """
        self._path_of = path_of
        self._thread = DaemonPool(1, "hybrid-fs-mark")
        self._lock = threading.Lock()  # guards these two
        self._waiting: deque[Sequence[CacheEngineKey]] = deque(maxlen=MOST_WAITING)
        self._running = False
        # Of the current minute; used by the running job only.
        self._marked: set[CacheEngineKey] = set()
        self._minute = 0

    def mark(self, keys: Sequence[CacheEngineKey]) -> None:
        """Queue the files of ``keys`` to be marked as used now."""
        with self._lock:
            self._waiting.append(keys)
            if self._running:
                return
            self._running = True
        try:
            self._thread.submit(self._work)
        except RuntimeError:  # LMCache is closing
            self._running = False

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                keys = self._waiting.popleft()
            try:
                self._mark(keys)
            except Exception:  # else marking would stop for ever
                logger.debug("Files are not marked as used", exc_info=True)

    def _mark(self, keys: Sequence[CacheEngineKey]) -> None:
        minute = int(time.monotonic() // MINUTE)
        if minute != self._minute:
            self._minute = minute
            self._marked.clear()
        for key in keys:
            if key not in self._marked:
                self._marked.add(key)
                with contextlib.suppress(OSError):
                    os.utime(self._path_of(key), follow_symlinks=False)

    def close(self) -> None:
        """End the thread after its current file; does not wait. Idempotent."""
        self._waiting.clear()
        self._thread.close()
