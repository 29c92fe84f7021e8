# SPDX-License-Identifier: Apache-2.0
"""The processes of many simulated engines, some in each, forked from one that has imported all."""

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks.many_engines.engine import Engine, Kept, Seen, Settings

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.many_engines.engine"])
EACH = 10
END_SECONDS = 60.0


def serve(numbers: Sequence[int], settings: Settings, kept: Kept, pipe: Connection) -> None:
    """Make engines, run them when told, check what all have stored, and say what they have seen."""
    os.environ.update(settings.environment)
    gc.freeze()  # LMCache's engine looks at all objects when it is made
    engines = []
    for number in numbers:
        engines.append(Engine(number, settings, kept))
        pipe.send(number)
    with ThreadPoolExecutor(len(engines)) as threads:

        def all_of_them(call: Callable[[Engine], None]) -> list[Seen]:
            for engine in engines:
                engine.seen = Seen()
            list(threads.map(call, engines))
            return [engine.seen for engine in engines]

        seconds = pipe.recv()
        pipe.send(all_of_them(lambda engine: engine.run(time.monotonic() + seconds)))
        pipe.recv()
        # What another one has stored.
        owners = {number: (number + 1) % settings.engines for number in numbers}
        pipe.send(all_of_them(lambda engine: engine.check_all(owners[engine.number])))
    for engine in engines:
        engine.close()


@dataclass
class Run:
    """All engines. One thread uses it; owns the processes until :func:`started` ends.

    Attributes:
        connections: the most that were seen at once.
    """

    pipes: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    connections: int = 0

    def run(self, seconds: float, tick: Callable[[], None] = lambda: None) -> list[Seen]:
        """Let all engines make requests; ``tick`` is called each second."""
        return self._ask(seconds, tick)

    def check(self, tick: Callable[[], None] = lambda: None) -> list[Seen]:
        """Let all engines check what another one has stored."""
        return self._ask(None, tick)

    def _ask(self, what: object, tick: Callable[[], None]) -> list[Seen]:
        for pipe in self.pipes:
            pipe.send(what)
        seen: list[Seen] = []
        for pipe in self.pipes:
            while not pipe.poll(1):
                tick()
            seen += pipe.recv()
        return seen

    def count_connections(self, port: int) -> None:
        """Note how many connections to a port of a server the engines have."""
        found = 0
        for process in self.processes:
            for each in psutil.Process(process.pid).net_connections("tcp"):
                found += each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port
        self.connections = max(self.connections, found)


@contextmanager
def started(settings: Settings, made: Callable[[], None] = lambda: None) -> Iterator[Run]:
    """Start all engines; ``made`` is called for each.

    Raises:
        EOFError: a process has ended.
    """
    kept = Kept(FORKS.RawArray("q", settings.engines), FORKS.RawArray("q", settings.engines))
    run = Run()
    try:
        for first in range(0, settings.engines, EACH):
            numbers = range(first, min(first + EACH, settings.engines))
            pipe, other = FORKS.Pipe()
            process = FORKS.Process(target=serve, args=(numbers, settings, kept, other))
            process.start()
            other.close()
            run.pipes.append(pipe)
            run.processes.append(process)
            for _ in numbers:
                pipe.recv()
                made()
        yield run
        for process in run.processes:
            process.join(END_SECONDS)
    finally:
        for process in run.processes:
            process.kill()
            process.join()


def total(seen: Sequence[Seen]) -> Counter[str]:
    return sum((each.counts for each in seen), Counter())
