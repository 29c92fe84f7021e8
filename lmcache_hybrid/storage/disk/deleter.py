# SPDX-License-Identifier: Apache-2.0
"""Deletes evicted files on a thread of its own, never while a save is being queued."""

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable

from lmcache_hybrid.core.threads import started
from lmcache_hybrid.storage.disk.index import EVICTED

_ENDING = re.compile(rf"\.\d+\.\d+{re.escape(EVICTED)}$")  # see Deleter.delete


class Deleter:
    """Deletes files in the background. Any thread may call it; ``close`` ends its thread.

    Attributes:
        queueing: held while records are queued; no write and no deletion begins meanwhile.
    """

    def __init__(self, failed: Callable[[str, OSError], None]) -> None:
        """Start the thread.

        Args:
            failed: called on the thread with the new name of a file that stays, and the error.
        """
        self._failed = failed
        self.queueing = threading.Lock()
        self._thread = started(1, "hybrid-delete")
        self._numbers = itertools.count()

    def delete(self, path: str) -> None:
        """Rename a file now, and delete it later.

        Deleting frees the file's cached pages, which takes several times as long as the rest of a
        save. A file whose name is too long to rename is deleted now. One that was renamed before
        gets another number.

        Raises:
            OSError: it cannot be deleted, and still takes its space.
        """
        name = _ENDING.sub("", path)
        old = f"{name}.{os.getpid()}.{next(self._numbers)}{EVICTED}"
        try:
            os.rename(path, old)
        except FileNotFoundError:
            return
        except OSError:
            _unlink(path)
        else:
            self._thread.submit(self._delete_now, old)

    def _delete_now(self, path: str) -> None:
        self.wait_for_queueing()
        try:
            _unlink(path)
        except OSError as error:
            self._failed(path, error)

    def wait_for_queueing(self) -> None:
        """Wait until no save is being queued."""
        with self.queueing:
            pass

    def finish(self) -> None:
        """Wait until all evicted files are deleted."""
        self._thread.submit(int).result()

    def close(self) -> None:
        self._thread.shutdown()


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
