# SPDX-License-Identifier: Apache-2.0
"""Makes the ranks agree on the boundary of a hit: their smallest result is the next limit."""

from collections.abc import Callable, Generator

import msgspec

from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest, LookupResult


def agree(
    ask: Callable[[LookupRequest], list[LookupResult]], request: LookupRequest
) -> LookupResult:
    """Ask all ranks until they name one boundary; UNAVAILABLE where one does not answer.

    Takes one round trip, and one more for each boundary that some rank lacks. Each rank then
    holds a claim for the result, or none for a miss. If a rank falls silent, others may hold
    claims until these are released.

    Args:
        ask: sends a request to all ranks; returns [] when one did not answer.
    """
    calls = rounds(request)
    request = next(calls)
    while True:
        try:
            request = calls.send(ask(request))
        except StopIteration as end:
            result: LookupResult = end.value
            return result


def rounds(
    request: LookupRequest,
) -> Generator[LookupRequest, list[LookupResult], LookupResult]:
    """Yield what all ranks must be asked, and return what :func:`agree` does.

    Takes their results after each; [] when one did not answer.
    """
    while True:
        results = yield request
        if not results:
            return UNAVAILABLE
        attention = min(result.attention for result in results)
        states = tuple(sorted(set.intersection(*(set(result.states) for result in results))))
        lowest = min(result.end for result in results)
        available = all(result.available for result in results)
        blocks, tail = lowest
        if all(result.end == lowest for result in results):
            return LookupResult(
                blocks, attention, results[0].sources, available, tail=tail, states=states
            )
        request = msgspec.structs.replace(request, limit=blocks, limit_tail=tail, again=True)
        if not any(lowest):
            if request.claims:
                yield request.release()  # makes the other ranks release their claims
            return LookupResult(0, attention, available=available, states=states)
