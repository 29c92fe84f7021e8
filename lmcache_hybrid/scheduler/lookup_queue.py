# SPDX-License-Identifier: Apache-2.0
"""Sends lookups to the ranks without blocking the scheduler."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from typing import TypeVar

import msgspec
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.threads import started
from lmcache_hybrid.protocol.agreement import agree, rounds
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.lookup import MISS, UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.protocol.prefix import Prefix

T = TypeVar("T")
logger = init_logger("vllm.lmcache_hybrid.scheduler.lookup_queue")


class PendingLookup:
    """One lookup in flight.

    The scheduler's thread polls and cancels it; the queue's thread settles it. Whichever comes
    first wins: after a cancel a late result is dropped.

    Attributes:
        sent: ``time.monotonic`` when it was queued.
    """

    def __init__(self, request: LookupRequest, deadline: float) -> None:
        """
        Args:
            deadline: ``time.monotonic`` from which on a missing result counts as a miss.
        """
        self.request = request
        self.sent = time.monotonic()
        self._deadline = deadline
        self._result: LookupResult | None = None
        self._seconds: float | None = None
        self._cancelled = False
        self._settled = threading.Event()
        self._lock = threading.Lock()

    def poll(self, seconds: float = 0.0) -> LookupResult | None:
        """Return the result, or None while there is none.

        Args:
            seconds: max time to wait.
        """
        if not self._settled.wait(seconds) and time.monotonic() < self._deadline:
            return None
        return self.cancel() or UNAVAILABLE

    def cancel(self) -> LookupResult | None:
        """Return the result if there is one already; else a late one is dropped."""
        with self._lock:
            self._cancelled |= self._result is None
            return self._result

    @property
    def result(self) -> LookupResult | None:
        """The result if there is one already, without taking it."""
        return self._result

    @property
    def seconds(self) -> float:
        """From the request to its result, or to now."""
        return time.monotonic() - self.sent if self._seconds is None else self._seconds

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def settle(self, result: LookupResult) -> bool:
        """File the result.

        Returns:
            False when the lookup was cancelled: the ranks' claims must be released.
        """
        with self._lock:
            if self._cancelled:
                return False
            self._result = result
            self._seconds = time.monotonic() - self.sent
        self._settled.set()
        return True


class LookupQueue:
    """Asks the ranks on a thread of its own, in the order of :meth:`submit`.

    Attributes:
        unreleased: (request, number of the lookup) of cancelled lookups whose ranks may
            still hold a claim. The queue's thread appends, the scheduler's takes.
        ledger: counts errors on the scheduler's side; None until it is set.
        drop, keep: as given; for what :meth:`call` calls and :meth:`in_turns` runs.
        num_drops: calls so far that may have removed records. Of the queue's thread.
    """

    def __init__(
        self,
        ask: Callable[[LookupRequest], list[LookupResult]],
        timeout_ms: int,
        executor: Executor | None = None,
        contents: Callable[[LoRARequest], tuple[bytes, ...]] = lambda lora: (),
        drop: Callable[[DropRequest], list[DropResult]] = lambda request: [],
        keep: Callable[[KeepRequest], list[KeepResult]] = lambda request: [],
    ) -> None:
        """Start the thread.

        Args:
            ask: sends a lookup to every rank, see :func:`lmcache_hybrid.protocol.agreement.agree`.
            timeout_ms: of one ``ask``. A request waits at most twice as long, time in the
                queue included.
            executor: replaces the thread; must run one lookup at a time.
            contents: asks every rank for the content of a LoRA adapter; empty when one did
                not answer.
            drop: lets every rank remove records; [] where one did not answer.
            keep: lets every rank keep records; [] where one did not answer.
        """
        self.drop, self.keep = drop, keep
        self.unreleased: deque[tuple[str, int]] = deque()
        self.ledger: Ledger[SchedulerCounts] | None = None
        self._numbers = itertools.count(1)
        self._ask = ask
        self._contents = contents
        self._timeout_seconds = 2 * timeout_ms / 1000
        self._executor = executor or started(1, "hybrid-ask")
        # Generators to run, the first one now, whether lookups have passed before its next part,
        # and lookups sent and begun.
        self._turns: deque[Generator[None, None, None]] = deque()
        self._passed, self._sent, self._begun = False, 0, 0
        self._lock = threading.Lock()  # guards the generators
        self.num_drops = 0

    def submit(self, request: LookupRequest) -> PendingLookup:
        """Number a lookup and queue it. Never blocks."""
        request = msgspec.structs.replace(request, number=next(self._numbers))
        lookup = PendingLookup(request, time.monotonic() + self._timeout_seconds)
        self._sent += 1
        self._executor.submit(self._run, lookup)
        return lookup

    def run(self, function: Callable[[], bool]) -> bool:
        """Call ``function`` between two lookups and wait for its result."""
        return self._executor.submit(function).result()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call ``function`` between two lookups. Never blocks."""
        return self._executor.submit(function)

    def in_turns(self, parts: Generator[None, None, None]) -> None:
        """Run a generator, all lookups that wait before each part of it.

        Generators run one after the other, so a lookup waits for one part of one of them at most.
        Never blocks.

        Raises:
            RuntimeError: the queue is closed.
        """
        with self._lock:
            self._turns.append(parts)
            first = len(self._turns) == 1
        if first:
            self._executor.submit(self._go_on)

    def identified(self, prefix: Prefix) -> Prefix | None:
        """Add the content of its adapter to a prefix; None where the ranks do not know it.

        For what :meth:`call` calls and :meth:`in_turns` runs.
        """
        if prefix.adapter is None:
            return prefix
        return prefix.computed_with(self._contents(prefix.adapter.lora))

    def find(self, request: LookupRequest) -> Generator[None, None, LookupResult]:
        """Look up and claim nothing; a part for each call of the ranks. For :meth:`in_turns`."""
        request = msgspec.structs.replace(request, number=next(self._numbers), claims=False)
        calls = rounds(request)
        request = next(calls)
        while True:
            try:
                request = calls.send(self._ask(request))
            except StopIteration as end:
                result: LookupResult = end.value
                return result
            yield

    def _go_on(self) -> None:
        """Run the next part, behind the lookups that wait now."""
        self._passed = not self._passed and self._begun < self._sent
        if not self._passed and self._ended(self._turns[0]):
            with self._lock:
                self._turns.popleft()
                if not self._turns:
                    return
        self._executor.submit(self._go_on)

    def _ended(self, parts: Generator[None, None, None]) -> bool:
        """Run the next part of a generator; whether there was none."""
        try:
            return next(parts, self) is self
        except Exception:  # it must not hold up those behind it
            logger.exception("A keep ended with an error.")
            return True

    def _run(self, lookup: PendingLookup) -> None:
        self._begun += 1
        if lookup.cancelled:
            return
        try:
            result = self._look_up(lookup.request)
        except Exception as error:
            caught("ask_ranks", error, "it is a miss and its prompt is computed", self.ledger)
            result = UNAVAILABLE
        if lookup.settle(result):
            return
        # The lookup was cancelled while ranks were pinning; release those pins.
        if not self._release(lookup.request):
            self.unreleased.append((lookup.request.request_id, lookup.request.number))

    def _release(self, request: LookupRequest) -> bool:
        """Ask the ranks to drop a lookup's claims; False if a rank may still hold one."""
        try:
            return bool(self._ask(request.release()))
        except Exception as error:
            later = "the claims of a cancelled lookup are released with the next step"
            caught("release_claims", error, later, self.ledger)
            return False

    def _look_up(self, request: LookupRequest) -> LookupResult:
        """Look up on all ranks, with keys for the adapter's content."""
        if request.prefix.adapter is None:
            return agree(self._ask, request)
        contents = self._contents(request.prefix.adapter.lora)
        prefix = request.prefix.computed_with(contents)
        if prefix is None:
            return MISS if contents else UNAVAILABLE
        result = agree(self._ask, msgspec.structs.replace(request, prefix=prefix))
        return msgspec.structs.replace(result, adapter=prefix.adapter)

    def close(self) -> None:
        """Stop the thread; lookups that were not sent are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)
