# SPDX-License-Identifier: Apache-2.0
"""Decides whether a hit is loaded: always, or only where computing it would take longer."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.speeds import Speeds

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.load_policy")

# A backend that was too slow is used again once it takes this share of the time to compute.
BACK_AT = 0.8
# Load every 32nd skipped hit anyway, to keep the measurement fresh.
TRY_EVERY = 32
# Seconds between two log lines about one backend, which may flip with each hit's length.
LOG_SECONDS = 60.0
# The first load of a backend may take a moment longer than computing would.
MOMENT_SECONDS = 0.05
# Assumed prefill speed in tokens/s before the first measurement, below that of most engines: the
# first requests must not wait for a slow store without end.
ASSUMED_SPEED = 100.0
# Factor on the time of a load that failed after its expected end.
FAILED = 2.0
# Deadline of a trial load, in expected prefill times. The workers end it after a fifth of that
# where its rate says that it will be late.
PATIENCE = 1.25


class LoadPolicy:
    """Loads every hit, measures nothing. Called by the scheduler's thread only."""

    def judge(self, request: "Request", result: LookupResult, start: int) -> float | None:
        """Return the seconds that loading a hit may take; None to compute it.

        Args:
            result: of the ranks.
            start: tokens that vLLM holds already.
        """
        return math.inf

    def sent(self, request_id: str, result: LookupResult, start: int) -> None:
        """Note a load past the first ``start`` tokens, which begins with this step."""

    def ended(self, done: Iterable[str], failed: Iterable[str], slow: Mapping[str, float]) -> None:
        """Take loads that ended on all ranks.

        Args:
            failed: the failed ones among them.
            slow: failed ones that were given up as too slow, with the seconds that each would
                have taken; 0 if unknown.
        """

    def scheduled(self, requests: Iterable["Request"]) -> None:
        """Take the ``requests`` that begin to compute in the next step."""

    def finished(self, request: "Request") -> None:
        """Forget a request; its time counts if it has its first token."""


class LoadWhenFaster(LoadPolicy):
    """Loads a hit where that is expected to be faster than computing it.

    Both times are measured end to end, so they include other work on the engine: from load submit
    to report, and from a request's first step to its first token.
    """

    def __init__(
        self,
        plan: GroupPlan,
        page_bytes: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without measurements: the first load of each backend is a trial.

        Args:
            page_bytes: of one block, per group of the plan, on one rank.
        """
        self._size = plan.block_size
        self._attention_bytes = sum(page_bytes[group] for group in plan.attention)
        windows = sum(page_bytes[window.group] * window.blocks for window in plan.windows)
        self._end_bytes = windows + sum(page_bytes[group] for group in plan.states)
        self._clock = clock
        self._speeds = Speeds()
        # Loads under way: when they began, and their bytes by backend.
        self._sent: dict[str, tuple[float, dict[str, int]]] = {}
        # When the last load ended, and when those under way are expected to.
        self._last_end = self._free_at = -math.inf
        # Requests that compute their prompt: since when, and from which token on.
        self._computing: dict[str, tuple[float, int, Request]] = {}
        self._warm = False
        # Backends that are too slow now, and when each was logged last.
        self._slow: set[str] = set()
        self._logged: dict[str, float] = {}
        # Hits that were left out since one was loaded, by the backend of their last block.
        self._left: Counter[str] = Counter()

    def judge(self, request: "Request", result: LookupResult, start: int) -> float | None:
        end, source = result.tokens(self._size), result.source
        computing = self._speeds.compute_seconds(start, end)
        if computing is None:
            computing = (end - start) / ASSUMED_SPEED
        own = self._speeds.load_seconds(self._bytes(self._runs(result, start)))
        if own is None:  # the first of its backend
            return PATIENCE * computing + MOMENT_SECONDS
        loading = max(0.0, self._free_at - self._clock()) + own  # behind the loads under way
        logger.debug(
            "Reqid: %s, loading %d tokens from %s is expected to take %.4f s, computing %.4f s.",
            request.request_id,
            end - start,
            source,
            loading,
            computing,
        )
        # The wait for other loads does not make a backend slow.
        slow = own > computing * (BACK_AT if source in self._slow else 1.0)
        self._note(source, slow, end - start, own, computing)
        if not slow and loading <= computing:
            del self._left[source]
            return math.inf
        self._left[source] += 1
        return PATIENCE * computing if self._left[source] % TRY_EVERY == 0 else None

    def _note(self, source: str, slow: bool, tokens: int, own: float, computing: float) -> None:
        """Log that a backend became too slow, or fast enough again."""
        if slow == (source in self._slow):
            return
        (self._slow.add if slow else self._slow.discard)(source)
        now = self._clock()
        if now - self._logged.get(source, -math.inf) < LOG_SECONDS:
            return
        self._logged[source] = now
        logger.info(
            "Hits in %s are %s: %d tokens take about %.3f s to load and %.3f s to compute "
            "(lmcache.hybrid_load_policy=faster).",
            source,
            "computed from now on" if slow else "loaded again",
            tokens,
            own,
            computing,
        )

    def _runs(self, result: LookupResult, start: int) -> list[tuple[str, int]]:
        """(backend, blocks) of what is loaded, from the first block on."""
        blocks = result.boundary - start // self._size + bool(result.tail)
        return list(result.last(blocks))[::-1] or [("unknown", blocks)]

    def _bytes(self, runs: Sequence[tuple[str, int]]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for source, blocks in runs:
            sizes[source] = sizes.get(source, 0) + blocks * self._attention_bytes
        sizes[runs[-1][0]] += self._end_bytes
        return sizes

    # What is measured

    def sent(self, request_id: str, result: LookupResult, start: int) -> None:
        now, sizes = self._clock(), self._bytes(self._runs(result, start))
        self._sent[request_id] = now, sizes
        own = self._speeds.load_seconds(sizes) or 0.0
        self._free_at = max(now, self._free_at) + own

    def ended(self, done: Iterable[str], failed: Iterable[str], slow: Mapping[str, float]) -> None:
        loads = {request: self._sent.pop(request) for request in done if request in self._sent}
        if not loads:
            return
        now, failed = self._clock(), set(failed)
        # Loads run one after the other: count from the end of the one before.
        seconds = now - max(self._last_end, min(began for began, _ in loads.values()))
        self._last_end = now
        waiting = (self._speeds.load_seconds(sizes) or 0.0 for _, sizes in self._sent.values())
        self._free_at = now + sum(waiting)
        if slow.keys() & loads.keys():
            # The time of the others is unknown beside one that was given up.
            for request in slow.keys() & loads.keys():
                if slow[request]:
                    self._loaded([loads[request][1]], slow[request])
            return
        if failed & loads.keys():
            # Early failures are no measurement.
            loads = {
                request: load
                for request, load in loads.items()
                if seconds > (self._speeds.load_seconds(load[1]) or MOMENT_SECONDS)
            }
            seconds *= FAILED
        if loads:
            self._loaded([sizes for _, sizes in loads.values()], seconds)

    def _loaded(self, loads: Sequence[dict[str, int]], seconds: float) -> None:
        """Take the time of loads, bytes by backend."""
        # A backend that skipped many hits since was measured too long ago.
        long_ago = {tier for tier, left in self._left.items() if left >= TRY_EVERY}
        self._speeds.forget(long_ago & {tier for each in loads for tier in each})
        self._speeds.loaded(loads, seconds)

    def scheduled(self, requests: Iterable["Request"]) -> None:
        for request in [each for _, _, each in self._computing.values()]:
            self._measure(request)
        now = self._clock()
        for request in requests:
            if not request.num_output_tokens:
                began = now, request.num_computed_tokens, request
                self._computing[request.request_id] = began

    def finished(self, request: "Request") -> None:
        self._measure(request)
        self._computing.pop(request.request_id, None)

    def _measure(self, request: "Request") -> None:
        """Take the time of a prompt that has its first token."""
        began, start, known = self._computing.get(request.request_id, (0.0, 0, None))
        if known is not request:
            return
        if request.num_preemptions or request.num_output_tokens:
            del self._computing[request.request_id]
        if request.num_output_tokens and not request.num_preemptions:
            if not self._warm:  # kernels are compiled for an engine's first prompt
                self._warm = True
                return
            self._speeds.computed(start, request.num_prompt_tokens, self._clock() - began)


def policy_for(name: str, plan: GroupPlan, page_bytes: Mapping[int, int]) -> LoadPolicy:
    """The policy called ``name``, see :data:`lmcache_hybrid.config.options.POLICIES`."""
    return LoadWhenFaster(plan, page_bytes) if name == "faster" else LoadPolicy()
