# SPDX-License-Identifier: Apache-2.0
"""Threads of which one runs at a time, in an order that a seed decides.

They are real threads, because threads have current devices and ``threading.local``.
A thread runs until it calls :meth:`Threads.pause` or :meth:`Threads.wait` (the simulated
device does so in every call), and only the main thread chooses who goes on.
"""

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lmcache_hybrid.worker.copy_threads import COPIERS

# How many turns the other threads get while the main thread is in one call to the device.
TURNS = (0, 0, 0, 1, 2, 8)


class Deadlock(AssertionError):
    """Everybody waits for somebody else."""


class Ended(BaseException):
    """Unwinds a thread of a program that has failed."""


class _Thread:
    """A thread of the process, lent to one piece of work after the other."""

    idle: list["_Thread"] = []

    def __init__(self) -> None:
        # Taken in turns; several times as fast as semaphores.
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.work: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            self.work()
            _Thread.idle.append(self)
            self.back.release()


class Task:
    """One piece of work on a thread.

    Attributes:
        until: what it waits for; None when it can go on.
        held: asked before each turn; True keeps it from going on.
    """

    def __init__(self, work: Callable[[], object], held: Callable[[], bool]) -> None:
        self._work, self.held = work, held
        self.until: Callable[[], bool] | None = None
        self.done = self.ended = False
        self.error: BaseException | None = None
        self._thread = _Thread.idle.pop() if _Thread.idle else _Thread()
        self._thread.work = self._run

    def _run(self) -> None:
        Threads.here.task = self
        try:
            if not self.ended:
                self._work()
        except BaseException as error:
            self.error = error
        self.done = True

    @property
    def ready(self) -> bool:
        return not self.held() and (self.until is None or self.until())

    def resume(self) -> None:
        """Let it run until it pauses or ends. Called by the main thread."""
        self._thread.go.release()
        self._thread.back.acquire()

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Give the main thread its turn. Called by the task."""
        if self.ended:
            raise Ended
        self.until = until
        self._thread.back.release()
        self._thread.go.acquire()
        self.until = None
        if self.ended:
            raise Ended


class Threads:
    """All simulated threads of one engine beside the main thread."""

    here = threading.local()

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._tasks: list[Task] = []

    def start(self, work: Callable[[], object], held: Callable[[], bool] = lambda: False) -> Task:
        task = Task(work, held)
        self._tasks.append(task)
        return task

    def pause(self) -> None:
        """A point at which any thread may go on. Any thread may call it."""
        task = getattr(self.here, "task", None)
        if task is not None:
            task.pause()
        elif self._tasks:
            self.advance(self.random.choice(TURNS))

    def wait(self, until: Callable[[], bool]) -> None:
        """Block the calling thread. Raises Deadlock when no other could end that."""
        task = getattr(self.here, "task", None)
        if task is not None:
            if not until():
                task.pause(until)
            return
        while not until():
            if not self.advance(1):
                raise Deadlock("no thread can go on")

    def advance(self, turns: int) -> int:
        """Give the other threads so many turns; returns how many were taken."""
        for turn in range(turns):
            ready = [task for task in self._tasks if task.ready]
            if not ready:
                return turn
            # Often the same one again: a thread that is far ahead of the others.
            task = ready[0] if self.random.random() < 0.3 else self.random.choice(ready)
            task.resume()
            if task.done:
                self._tasks.remove(task)
        return turns

    def end(self) -> None:
        """Unwind whatever still runs, children first."""
        while self._tasks:
            task = self._tasks.pop()
            task.ended = True
            while not task.done:
                task.resume()


class _Future(Future):
    """A result whose waiting lets the other threads go on."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None):
        self._threads.wait(self.done)
        return super().result()


class Executor:
    """Stands in for a ThreadPoolExecutor with one thread.

    Args:
        held: True while its work does not go on.
        by_hand: work starts when :meth:`begin` is called, not by itself.
    """

    def __init__(
        self, threads: Threads, held: Callable[[], bool] = lambda: False, by_hand: bool = False
    ) -> None:
        self._threads, self._held, self._by_hand = threads, held, by_hand
        self._queue: deque[tuple[Future, Callable[[], object]]] = deque()
        self._task: Task | None = None

    def submit(self, function: Callable, *args) -> Future:
        future = _Future(self._threads)
        self._queue.append((future, functools.partial(function, *args)))
        if not self._by_hand:
            self.begin()
        return future

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done

    def begin(self) -> None:
        """Start what was submitted first, unless there is something under way."""
        if self._queue and not self.busy:
            self._task = self._threads.start(self._work, self._held)

    def _work(self) -> None:
        while self._queue:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            if self._by_hand:
                return

    def run(self) -> bool:
        """Bring the first one to its end; False when there is none."""
        self.begin()
        if not self.busy:
            return False
        self._threads.wait(lambda: self._task.done)
        return True

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._queue.clear()


class Pool:
    """Stands in for :class:`lmcache_hybrid.worker.copy_threads.CopyThreads`, with as many threads.

    Attributes:
        beside: how often several threads had work at once.
    """

    def __init__(self, threads: Threads, held: Callable[[], bool]) -> None:
        self._threads, self._held = threads, held
        self.beside = 0

    def each(self, function: Callable, items: Sequence, size: int) -> None:
        """Call ``function`` on all items; raises the first error once no call is under way."""
        left, errors = deque(items), []

        def work() -> None:
            while left and not errors:
                try:
                    function(left.popleft())
                except Exception as error:
                    errors.append(error)

        count = min(COPIERS, len(items))
        tasks = [self._threads.start(work, self._held) for _ in range(count)]
        self.beside += count > 1
        self._threads.wait(lambda: all(task.done for task in tasks))
        if errors:
            raise errors[0]

    def close(self) -> None:
        return
