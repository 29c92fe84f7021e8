# SPDX-License-Identifier: Apache-2.0
"""The scheduler's time for a request that keeps, drops or prefetches its prompt."""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from benchmarks.steps.measure import PER_STEP, N, Rig, request
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.scheduler import waits

Params = dict[str, Any]
# ``kv_transfer_params`` of a request with each hint, and of one that it is compared with: what
# drops or prefetches is not stored either.
HINTS: dict[str, tuple[Params, Params]] = {
    "keep": ({"lmcache.keep": 3600}, {}),
    "drop": ({"lmcache.drop": True}, {"lmcache.skip_save": True}),
    "prefetch": ({"lmcache.prefetch": True}, {"lmcache.skip_save": True}),
}


class Later(Executor):
    """Holds what it is given until :meth:`run`: the thread of the queue, beside the scheduler's."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **more: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._tasks.append((future, lambda: function(*args, **more)))
        return future

    def run(self) -> None:
        """Call all that waits, and what that submits."""
        while self._tasks:
            future, call = self._tasks.pop(0)
            future.set_result(call())


class Hinted:
    """Requests one after the other beside one that runs, timed on the scheduler's thread."""

    def __init__(self, blocks: int, held: int) -> None:
        """
        Args:
            blocks: of each prompt.
            held: of these, the first ones are stored in the only rank's RAM.
        """
        self._blocks, self._thread = blocks, Later()
        self._rig = Rig(events=False, executor=self._thread)
        self._rig.queue.drop, self._rig.queue.keep = self._drop, self._keep
        self._rig.scheduler.store_watch.in_ram = True
        self._taken = 0.0
        other = request("other", 1)  # a step that has work never waits for lookups
        self._admit(other)
        self._rig.step(other, 1)
        self._rig.held = held

    def _drop(self, asked: DropRequest) -> list[DropResult]:
        done = asked.block is not None
        return [DropResult(asked.end * done, {"LocalCPUBackend": 1} if done else {})]

    def _keep(self, asked: KeepRequest) -> list[KeepResult]:
        return [KeepResult({"LocalCPUBackend": ""})]

    def _timed(self, function: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        result = function(*args)
        self._taken += time.thread_time() - start
        return result

    def _admit(self, made: Any) -> int:
        """Admit a request; the tokens that are loaded for it."""
        scheduler = self._rig.scheduler
        while True:
            gain, _ = self._timed(scheduler.get_num_new_matched_tokens, made, 0)
            self._thread.run()
            if gain is not None:
                break
        self._timed(
            scheduler.update_state_after_alloc, made, (list(range(self._blocks)),) * 4, gain
        )
        self._thread.run()
        return gain

    def _load(self, made: Any, tokens: int) -> None:
        """The step that begins a load, and the one that learns of its end."""
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = 1  # the other one's
        self._timed(self._rig.scheduler.build_connector_meta, output)
        ended = KVConnectorOutput(finished_recving={made.request_id})
        self._timed(self._rig.scheduler.update_connector_output, ended)
        made.num_computed_tokens = tokens

    def ask(self, name: str, params: Params) -> tuple[float, Params]:
        """Microseconds that a request takes of the scheduler, and what its client is told."""
        self._taken = 0.0
        made = request(name, self._blocks, params)
        if loaded := self._admit(made):
            self._load(made, loaded)
        if left := self._blocks - loaded // N:
            self._taken += self._rig.step(made, left) / 1000
        self._thread.run()
        answer = self._timed(self._rig.scheduler.request_finished, made)
        return 1e6 * self._taken, answer or {}


# A pass waits up to a millisecond for a lookup just sent, hint or not: noise here.
@patch.object(waits, "BUSY_SECONDS", (0.0, 0.0))
def measure(blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of requests with each hint and without, in turns.

    A prefetch loads all of its prompt, others all but PER_STEP blocks, which one step computes.

    Returns:
        Medians of requests without, and of what the one with the hint takes more, with quartiles.
    """
    found = {}
    for hint, (params, without) in HINTS.items():
        asked = Hinted(blocks, blocks if hint == "prefetch" else blocks - PER_STEP)
        pairs: list[list[float]] = []
        for number in range(rounds + 10):
            taken = [0.0, 0.0]
            for kind in (0, 1) if number % 2 else (1, 0):
                each = params if kind else without
                taken[kind], answer = asked.ask(f"{hint}-{number}-{kind}", each)
                said = answer.get(f"lmcache.{hint}")
                if (said is None) == kind or "error" in (said or ()):
                    raise RuntimeError(f"{hint}: {each} was answered with {answer}")
            if number >= 10:  # those before warm up
                pairs.append(taken)
        low, more, high = quantiles((hinted - plain for plain, hinted in pairs), n=4)
        values = {"without": median(plain for plain, _ in pairs), "more": more}
        values |= {"more, q1": low, "more, q3": high}
        found[hint] = {name: round(value, 1) for name, value in values.items()}
    return found
