# SPDX-License-Identifier: Apache-2.0
"""Keeps errors away from the threads that run the model and the scheduler.

A store, a folder or an adapter may raise an unexpected error, which would end the engine if it
reached vLLM. It becomes a miss, a dropped save or a failed load instead, and is always counted.
"""

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger

logger = init_logger("vllm.lmcache_hybrid.core.faults")

# Environment variable for tests: caught errors are raised again, so that none is hidden.
STRICT = "LMCACHE_HYBRID_STRICT"
# How often each place has caught an error in this process.
COUNTS: Counter[str] = Counter()
COUNTED = "only counted (vllm:lmcache_hybrid_*_errors_total)"
_lock = threading.Lock()

P = ParamSpec("P")
R = TypeVar("R")


def caught(
    place: str, error: Exception, consequence: str, ledger: Ledger[Any] | None = None
) -> None:
    """Count and log an error that goes no further. Thread-safe.

    Args:
        place: one name, for the counter; its first error is logged with a traceback.
        consequence: what happens instead, as a part of a sentence.
        ledger: of the side that it happened on; None where that side is off.

    Raises:
        Exception: ``error`` itself, in tests (:data:`STRICT`).
    """
    with _lock:
        COUNTS[place] += 1
        first = COUNTS[place] == 1
    if ledger is not None:
        with ledger as counts:
            counts.caught_errors[place] += 1
    if os.environ.get(STRICT):
        raise error
    if first:
        logger.warning(
            "%s failed (%r), so %s. Further errors there are %s; please report this one.",
            place,
            error,
            consequence,
            "not logged" if ledger is None else COUNTED,
            exc_info=error,
        )


class _Side(Protocol):
    @property
    def ledger(self) -> Ledger[Any] | None:
        """The ledger of this side; None while it is off."""


S = TypeVar("S", bound=_Side)


def guarded(
    consequence: str, instead: Callable[Concatenate[S, P], R]
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method that vLLM calls, so that it raises nothing.

    Args:
        consequence: see :func:`caught`.
        instead: called with the same arguments after an error. Restores the bookkeeping and
            returns the result for vLLM; must be too simple to fail.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                caught(method.__name__, error, consequence, self.ledger)
                return instead(self, *args, **kwargs)

        return call

    return decorate
