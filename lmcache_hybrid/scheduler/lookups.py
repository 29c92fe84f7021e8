# SPDX-License-Identifier: Apache-2.0
"""Questions to the ranks that the scheduler does not wait for."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from lmcache_hybrid.core.threads import started
from lmcache_hybrid.protocol.lookup import MISS, UNAVAILABLE, LookupRequest, LookupResult, agree

logger = init_logger("vllm.lmcache_hybrid.scheduler.lookups")


class PendingLookup:
    """One question, from the scheduler's asking to its answer."""

    def __init__(self, question: LookupRequest, deadline: float) -> None:
        """Not asked yet.

        Args:
            deadline: ``time.monotonic`` from which on no answer counts as a miss.
        """
        self.question = question
        self._asked = time.monotonic()
        self._deadline = deadline
        self._answer: LookupResult | None = None
        self._seconds: float | None = None
        self._unwanted = False
        self._answered = threading.Event()
        self._lock = threading.Lock()

    def poll(self, seconds: float = 0.0) -> LookupResult | None:
        """The answer, or None while there is none; waits for it for ``seconds`` at most."""
        if not self._answered.wait(seconds) and time.monotonic() < self._deadline:
            return None
        return self.give_up() or UNAVAILABLE

    def give_up(self) -> LookupResult | None:
        """The answer, if there is one already; one that still comes reaches nobody."""
        with self._lock:
            self._unwanted |= self._answer is None
            return self._answer

    @property
    def seconds(self) -> float:
        """From the question to the answer, or to now."""
        return time.monotonic() - self._asked if self._seconds is None else self._seconds

    @property
    def unwanted(self) -> bool:
        return self._unwanted

    def settle(self, answer: LookupResult) -> bool:
        """File the answer; False when nobody wants it any more."""
        with self._lock:
            if self._unwanted:
                return False
            self._answer = answer
            self._seconds = time.monotonic() - self._asked
        self._answered.set()
        return True


class LookupQueue:
    """Asks the ranks on a thread of its own, in the order of :meth:`ask`.

    Attributes:
        left_over: (request, number of the question) of lookups that were given up and whose
            ranks may still hold a claim.
    """

    def __init__(
        self,
        ask: Callable[[LookupRequest], list[LookupResult]],
        timeout_ms: int,
        executor: Executor | None = None,
        contents: Callable[[LoRARequest], tuple[bytes, ...]] = lambda lora: (),
    ) -> None:
        """Start the thread.

        Args:
            ask: sends a question to every rank, see :func:`lmcache_hybrid.protocol.lookup.agree`.
            timeout_ms: of one ``ask``. A request waits for its answer, and for those of
                the requests before it, twice as long at most.
            executor: runs the questions instead, one at a time.
            contents: asks every rank what it computes a LoRA adapter with; empty when one
                did not answer.
        """
        self.left_over: deque[tuple[str, int]] = deque()
        self._numbers = itertools.count(1)
        self._ask = ask
        self._contents = contents
        self._patience = 2 * timeout_ms / 1000
        self._executor = executor or started(1, "hybrid-ask")

    def ask(self, question: LookupRequest) -> PendingLookup:
        """Queue a question and give it a number. Never blocks."""
        question = msgspec.structs.replace(question, number=next(self._numbers))
        inquiry = PendingLookup(question, time.monotonic() + self._patience)
        self._executor.submit(self._run, inquiry)
        return inquiry

    def run(self, function: Callable[[], bool]) -> bool:
        """Call ``function`` between two questions and wait for its result."""
        return self._executor.submit(function).result()

    def _run(self, inquiry: PendingLookup) -> None:
        if inquiry.unwanted:
            return
        try:
            answer = self._answer(inquiry.question)
        except Exception:
            logger.exception("A cache lookup failed and counts as a miss.")
            answer = UNAVAILABLE
        if inquiry.settle(answer):
            return
        # Whoever gave up could not know of the claims that were being made.
        question = inquiry.question
        if not self._ask(msgspec.structs.replace(question, limit=0)):
            self.left_over.append((question.request_id, question.number))

    def _answer(self, question: LookupRequest) -> LookupResult:
        """The ranks' answer, on records of the content that they have of the adapter."""
        if question.prefix.adapter is None:
            return agree(self._ask, question)
        contents = self._contents(question.prefix.adapter.lora)
        prefix = question.prefix.computed_with(contents)
        if prefix is None:
            return MISS if contents else UNAVAILABLE
        answer = agree(self._ask, msgspec.structs.replace(question, prefix=prefix))
        return msgspec.structs.replace(answer, adapter=prefix.adapter)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
