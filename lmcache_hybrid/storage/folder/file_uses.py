# SPDX-License-Identifier: Apache-2.0
"""Sets the time of files of ``fs://`` that are hit, by which they are deleted."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from vllm.logger import init_logger

from lmcache_hybrid.storage.folder.least_used import MINUTE

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

logger = init_logger("vllm.lmcache_hybrid.storage.folder.file_uses")

# Hits to remember while a file server is slow; those beyond are forgotten.
MOST_WAITING = 1000


class FileUses:
    """Marks the files of one backend as used, each at most once a minute. Thread-safe.

    Works on a thread of LMCache's event loop, one at a time, so a lookup does not wait for a
    file server. A file that may not be changed, because another user wrote it, keeps its time.
    """

    def __init__(self, backend: "RemoteBackend") -> None:
        self._backend = backend
        self._lock = threading.Lock()  # guards these two
        self._waiting: deque[Sequence[CacheEngineKey]] = deque(maxlen=MOST_WAITING)
        self._running = False
        # Of the current minute; used by the running job only.
        self._marked: set[CacheEngineKey] = set()
        self._minute = 0

    def mark(self, keys: Sequence[CacheEngineKey]) -> None:
        """Have the files of ``keys`` marked as used now; does nothing for other stores."""
        if not keys or _connector_of(self._backend) is None:
            return
        with self._lock:
            self._waiting.append(keys)
            if self._running:
                return
            self._running = True
        loop = self._backend.loop
        try:
            loop.call_soon_threadsafe(loop.run_in_executor, None, self._work)
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
        connector = _connector_of(self._backend)
        minute = int(time.monotonic() // MINUTE)
        if minute != self._minute:
            self._minute = minute
            self._marked.clear()
        for key in keys:
            if connector is not None and key not in self._marked:
                self._marked.add(key)
                with contextlib.suppress(OSError):
                    os.utime(connector._get_file_path(key), follow_symlinks=False)


def _connector_of(backend: "RemoteBackend") -> FSConnector | None:
    """LMCache's connector to ``fs://``; None for other stores, and where there is none now."""
    connector = backend.connection
    while hasattr(connector, "getWrappedConnector"):  # LMCache's instruments around it
        connector = connector.getWrappedConnector()
    return connector if isinstance(connector, FSConnector) else None
