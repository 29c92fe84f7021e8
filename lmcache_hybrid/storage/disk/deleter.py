# SPDX-License-Identifier: Apache-2.0
"""Deletes evicted files on a thread of its own, and never beside a save that is being queued."""

import contextlib
import itertools
import os
import threading

from lmcache_hybrid.core.threads import started
from lmcache_hybrid.storage.disk.index import EVICTED


class Deleter:
    """Any thread may call it; ``close`` ends its thread.

    Attributes:
        queueing: held while records are queued; no write and no deletion begins meanwhile.
    """

    def __init__(self) -> None:
        self.queueing = threading.Lock()
        self._thread = started(1, "hybrid-delete")
        self._numbers = itertools.count()

    def delete(self, path: str) -> None:
        """Take a file's name away now, and the file later; errors are ignored.

        The file system frees the file's cached pages, which takes several times as long as all
        else that a save does.
        """
        old = f"{path}.{os.getpid()}.{next(self._numbers)}{EVICTED}"
        with contextlib.suppress(OSError):
            os.rename(path, old)
            self._thread.submit(self._delete_now, old)

    def _delete_now(self, path: str) -> None:
        self.wait_for_queueing()
        _unlink(path)

    def wait_for_queueing(self) -> None:
        """Wait until all records of a save that is being queued are."""
        with self.queueing:
            pass

    def finish(self) -> None:
        """Wait until all evicted files are deleted."""
        self._thread.submit(int).result()

    def close(self) -> None:
        self._thread.shutdown()


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
