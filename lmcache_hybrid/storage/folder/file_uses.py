# SPDX-License-Identifier: Apache-2.0
"""Sets the time of files of ``fs://`` that are hit, by which they are deleted."""

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

# Hits to remember while a file server is slow; those beyond are forgotten.
MOST_WAITING = 1000


class FileUses:
    """Marks files as used, each at most once a minute. Thread-safe.

    Works on a thread of its own, so a lookup does not wait for a file server. A file that may not
    be changed, because another user wrote it, keeps its time.
    """

    def __init__(self, path_of: Callable[[CacheEngineKey], str]) -> None:
        """Start the thread.

        Args:
            path_of: names a record's file.

        Raises:
            RuntimeError: no thread could be started.
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
        """Have the files of ``keys`` marked as used now."""
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
            except Exception:  # else nothing would be marked any more
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
        """End the thread after the file that it is at; does not wait. Idempotent."""
        self._waiting.clear()
        self._thread.close()
