# SPDX-License-Identifier: Apache-2.0
"""Plans a request's lookup and load. Pure functions."""

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.metadata import LoadSpec
from lmcache_hybrid.scheduler.prompt import inner_hashes
from lmcache_hybrid.scheduler.tracker import Loading, RequestTracker


def question_of(
    tracker: RequestTracker, floor: int, plan: GroupPlan, limit: int, tail: int, least: int
) -> LookupRequest:
    """Make the lookup of a request, down to its deepest loadable boundary.

    Hashes each boundary inside a block, so call it only when the request may ask.

    Args:
        floor: local blocks.
        limit, tail: see :func:`limit_of`.
        least: tokens of the shortest hit that is loaded.
    """
    request, prefix = tracker.request, tracker.prefix
    if plan.unit:  # boundaries inside blocks, past the local ones
        inner = range(floor * plan.block_size + plan.unit, tracker.inner + 1, plan.unit)
        prefix = prefix.with_inner(inner_hashes(request, inner, plan))
    return LookupRequest(
        request.request_id,
        prefix,
        limit,
        floor,
        limit_tail=tail,
        barred=tuple(tracker.step_ends.barred),
        states_at=_computed_anyway(tracker, floor, plan.block_size, limit, least),
        claims=not request.skip_reading_prefix_cache,
    )


def _computed_anyway(
    tracker: RequestTracker, floor: int, size: int, limit: int, least: int
) -> tuple[int, ...]:
    """Return the boundaries, in blocks, that a request computes although they may be stored.

    The last one where no hit may end there, those of hits that are too short to load, and all of a
    request that must not read.
    """
    if not tracker.save:
        return ()
    last = len(tracker.prefix.hashes)
    unread = last if tracker.request.skip_reading_prefix_cache else floor + (least - 1) // size
    behind = (last,) if max(limit, unread) < last else ()
    return (*range(floor + 1, min(unread, last) + 1), *behind)


def limit_of(tracker: RequestTracker, floor: int, plan: GroupPlan, most: int) -> tuple[int, int]:
    """Return the deepest loadable boundary: whole blocks, and tokens past them.

    Args:
        floor: local blocks.
        most: max tokens per load, 0 for no limit.
    """
    size, unit = plan.block_size, plan.unit
    # The last token is always computed: a state that has seen it is too deep.
    tokens = tracker.request.num_tokens - 1
    if most:
        tokens = min(tokens, floor * size + most)
    limit = min(tokens // size, len(tracker.prefix.hashes))
    if not unit:
        return limit, 0
    tail = min(tokens, tracker.inner) // unit * unit - limit * size
    return limit, tail if 0 < tail < size else 0


def load_of(
    tracker: RequestTracker,
    plan: GroupPlan,
    block_ids: tuple[list[int], ...],
    start: int,
    result: LookupResult,
) -> LoadSpec:
    """Make the load of the ranks' offer, from block ``start`` on.

    Args:
        block_ids: of the request, per KV cache group.
    """
    boundary = result.boundary
    assert isinstance(tracker.phase, Loading)
    end = result.tokens(plan.block_size)
    last = boundary + bool(result.tail)  # blocks, the partly filled one included
    inner = inner_hashes(tracker.request, (end,), plan)
    return LoadSpec(
        tracker.request.request_id,
        tracker.prefix.up_to(boundary).with_inner(inner),
        start,
        boundary,
        tuple(plan.pages(block_ids[g], g, start, last) for g in plan.attention),
        tuple(plan.state_block(block_ids[g], g, end) for g in plan.states),
        tuple(
            tuple(block_ids[window.group][window.first(start, boundary) : boundary])
            for window in plan.windows
        ),
        result.tail,
        tracker.phase.deadline,
    )
