# SPDX-License-Identifier: Apache-2.0
"""Thread pools whose threads all run from the start, and on every core of the process."""

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


def before_the_process_ends(close: Callable[[], object]) -> None:
    """Have ``close`` called when the script has ended, before Python waits for other threads.

    LMCache has threads for which Python waits and which nobody ends, so a script that ends
    without closing its engine would never end. :mod:`atexit` comes after that wait, and pools of
    threads take no more work then. Python's own pools end in this way too.

    Args:
        close: called on the main thread; must not raise. Not in processes that are forked off
            this one, which have a copy of what is to be closed.
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
        # Cores may have been taken from the process since, and a pool whose threads
        # raise here takes no work any more.
        with suppress(OSError):
            os.sched_setaffinity(0, wanted)

    return run_anywhere


class DaemonPool:
    """Threads for calls that may never return, of a file server that is away.

    Python waits for the threads of a ``ThreadPoolExecutor`` before it ends; for these it does not.
    Any thread may call it.
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
        self._lock = threading.Lock()  # guards closing, so that nothing is queued behind its end
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
