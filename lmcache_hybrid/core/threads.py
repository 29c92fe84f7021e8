# SPDX-License-Identifier: Apache-2.0
"""Thread pools that start all threads at once, on any core of the process."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def started(
    threads: int, name: str, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Make a pool and start its threads, so that ``submit`` starts none later.

    A ``ThreadPoolExecutor`` queues work before it starts a thread for it. If no thread can be
    started, ``submit`` raises, and yet a running thread does the work: nobody waits for it, and
    it may write to blocks that vLLM has given to another request.

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


def before_the_process_ends(close: Callable[[], object]) -> None:
    """Call ``close`` when the script has ended, before Python waits for other threads.

    Python waits for LMCache's threads, which only a closed engine ends, so a script that does not
    close its engine would never end. :mod:`atexit` runs after that wait, when thread pools take
    no more work. Python's own pools use the same hook.

    Args:
        close: called on the main thread; must not raise. Not called in forked processes, which
            hold copies of what it closes.
    """
    process = os.getpid()

    def close_here() -> None:
        if os.getpid() == process:
            close()

    threading._register_atexit(close_here)  # type: ignore[attr-defined]


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
        # The process may have lost cores since, and a pool takes no more work once an initializer
        # raises.
        with suppress(OSError):
            os.sched_setaffinity(0, wanted)

    return run_anywhere


class DaemonPool:
    """Threads for calls that may never return, as to a file server that is away.

    At exit Python waits for the threads of a ``ThreadPoolExecutor``, but not for these. Any thread
    may call it.
    """

    def __init__(
        self, threads: int, name: str, initializer: Callable[[], object] = lambda: None
    ) -> None:
        """Start all threads, so that ``submit`` starts none later; see :func:`started`.

        Args:
            initializer: called once on each thread; must not raise.

        Raises:
            RuntimeError: not all threads could be started; none is left.
        """
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # so that nothing is queued after close()
        self._closed = False
        self.threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(
                    target=self._run, args=(initializer,), name=f"{name}_{number}", daemon=True
                )
                self.threads.append(thread)
                thread.start()
        except RuntimeError:
            self.close()
            raise

    def submit(self, function: Callable[..., T], *args: object) -> "Future[T]":
        """Have a thread call ``function``.

        Raises:
            RuntimeError: the pool is closed.
        """
        job: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool of threads is closed")
            self._jobs.put((job, lambda: function(*args)))
        return job

    def close(self) -> None:
        """Cancel what is queued. Threads end with the call that they are in. Idempotent."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while True:
                if (queued := self._jobs.get_nowait()) is not None:
                    queued[0].cancel()
        for _ in self.threads:
            self._jobs.put(None)

    def _run(self, initializer: Callable[[], object]) -> None:
        initializer()
        while (queued := self._jobs.get()) is not None:
            job, call = queued
            if job.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    job.set_exception(error)
                else:
                    job.set_result(result)
                    del result
            del queued, job, call  # they may hold memory of the pool
