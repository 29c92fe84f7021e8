# SPDX-License-Identifier: Apache-2.0
"""Tests that want both cores run alone; pytest-xdist's workers run others side by side."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

MARK = "two_cores"


@contextmanager
def held(name: str, operation: int) -> Iterator[None]:
    """Hold the lock of that name in the session's folder.

    Args:
        operation: ``fcntl.LOCK_SH`` beside others that do so, or ``fcntl.LOCK_EX``.
    """
    file = os.open(Path(tempfile.gettempdir(), f"{name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, operation)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have it open still
        os.close(file)


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Wait until a test may run, and keep those from running that it must not run beside."""
    with ExitStack() as running:
        # Who waits to run alone stands in the door, so that no other test begins meanwhile.
        with held("door", fcntl.LOCK_EX):
            running.enter_context(held("tests", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
