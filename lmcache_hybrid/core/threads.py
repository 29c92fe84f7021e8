# SPDX-License-Identifier: Apache-2.0
"""Thread pools whose threads all run from the start, and on every core of the process."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


def started(
    threads: int, name: str, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Make a pool and start its threads, so that ``submit`` starts none later.

    A ``ThreadPoolExecutor`` queues work before it starts a thread for it. Where the process may
    not start another, ``submit`` raises, and yet a running thread does the work: nobody waits
    for it, and it may write to blocks that vLLM has given to another request.

    Args:
        threads: number of threads.
        initializer: called once on each thread; must not raise.

    Returns:
        The pool; the caller shuts it down.

    Raises:
        RuntimeError: not all threads could be started; none is left.
    """
    pool = ThreadPoolExecutor(threads, name, initializer)
    go_on = threading.Event()
    try:
        for _ in range(threads):
            pool.submit(go_on.wait)
    except RuntimeError:
        pool.shutdown(wait=False)
        raise
    finally:
        go_on.set()
    return pool


def cores() -> set[int]:
    """Union of all threads' CPU affinities: vLLM binds each to one, which new ones inherit."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found |= os.sched_getaffinity(int(task))
        except ProcessLookupError:
            continue
    return found


def anywhere(wanted: set[int]) -> Callable[[], None]:
    """Make an initializer that lets its thread run on these cores."""

    def run_anywhere() -> None:
        # Cores may have been taken from the process since, and a pool whose threads
        # raise here takes no work any more.
        with suppress(OSError):
            os.sched_setaffinity(0, wanted)

    return run_anywhere
