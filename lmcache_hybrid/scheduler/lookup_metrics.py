# SPDX-License-Identifier: Apache-2.0
"""Counts and logs lookups and loads."""

import logging
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.lookup_metrics")


def count_lookup(
    ledger: Ledger[SchedulerCounts],
    asked: LookupRequest,
    result: LookupResult,
    seconds: float,
    block_size: int,
    known: bool,
) -> None:
    """Count an answered lookup.

    Args:
        seconds: that it took.
        known: False where the ranks do not know the request's adapter.
    """
    # Past the limit nothing could be loaded in any case.
    found = result.tokens(block_size)
    reach = min(result.attention, asked.limit) * block_size
    lost = reach - max(found, asked.floor * block_size)
    with ledger as counts:
        counts.lookups[_outcome(asked, result)] += 1
        counts.lookup_seconds.append(seconds)
        if not known:
            counts.skipped_requests["adapter"] += 1
        if lost > 0:
            counts.lost_hits += 1
            counts.lost_tokens += lost


def _outcome(asked: LookupRequest, result: LookupResult) -> str:
    """One word for counters."""
    if not result.available:
        return "unavailable"
    if result.hit:
        return "hit"
    return "local" if asked.limit + bool(asked.limit_tail) <= asked.floor else "miss"


def log_lookup(
    request: "Request", floor: int, result: LookupResult, block_size: int, first: bool
) -> None:
    """Log a lookup in LMCache's own words; at INFO only a request's first.

    Args:
        floor: local blocks.
    """
    found = result.tokens(block_size)
    logger.log(
        logging.INFO if first else logging.DEBUG,
        "Reqid: %s, Total tokens %d, Inference Engine computed tokens: %d, "
        "LMCache hit tokens: %d, need to load: %d",
        request.request_id,
        request.num_tokens,
        floor * block_size,
        found,
        max(0, found - floor * block_size),
    )


def count_skipped(ledger: Ledger[SchedulerCounts], result: LookupResult, tokens: int) -> None:
    """Count a hit of ``tokens`` that is computed because that is faster."""
    with ledger as counts:
        counts.skipped_loads[result.source] += 1
        counts.skipped_load_tokens[result.source] += tokens


def count_hit(
    ledger: Ledger[SchedulerCounts],
    result: LookupResult,
    start: int,
    block_size: int,
    in_flight: int,
) -> None:
    """Count a load that begins at block ``start``.

    Args:
        in_flight: loads under way, this one included.
    """
    with ledger as counts:
        counts.hits[result.source] += 1
        for source, blocks in result.last(result.boundary - start + bool(result.tail)):
            counts.hit_tokens[source] += blocks * block_size
        if result.tail:
            counts.hit_tokens[result.source] -= block_size - result.tail
        counts.loads_in_flight = in_flight
