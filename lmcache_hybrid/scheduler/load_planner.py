# SPDX-License-Identifier: Apache-2.0
"""Plans a request's lookup and load. Pure functions."""

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.metadata import LoadSpec
from lmcache_hybrid.scheduler.prompt import inner_hashes
from lmcache_hybrid.scheduler.tracker import Loading, RequestTracker


def question_of(
    tracker: RequestTracker, floor: int, plan: GroupPlan, limit: int, tail: int
) -> LookupRequest:
    """Make the lookup of a request, down to its deepest loadable boundary.

    It also asks for the state of the last whole block, where no hit may end there: vLLM may hand
    that off, and it may be stored.

    Hashes each boundary inside a block, so call it only when the request may ask.

    Args:
        floor: local blocks.
        limit, tail: see :func:`limit_of`.
    """
    request, prefix = tracker.request, tracker.prefix
    if plan.unit:  # boundaries inside blocks, past the local ones
        inner = range(floor * plan.block_size + plan.unit, tracker.inner + 1, plan.unit)
        prefix = prefix.with_inner(inner_hashes(request, inner, plan))
    last = len(prefix.hashes)
    return LookupRequest(
        request.request_id,
        prefix,
        limit,
        floor,
        limit_tail=tail,
        barred=tuple(tracker.checkpoints.barred),
        states_at=(last,) if tracker.save and limit < last else (),
    )


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
    end = boundary * plan.block_size + result.tail
    last = boundary + bool(result.tail)  # blocks, the partly filled one included
    inner = inner_hashes(tracker.request, (end,), plan)
    return LoadSpec(
        tracker.request.request_id,
        tracker.prefix.up_to(boundary).with_inner(inner),
        start,
        boundary,
        tuple(plan.pages(block_ids[g], g, start, last) for g in plan.attention),
        tuple(plan.state_block(block_ids[g], g, last) for g in plan.states),
        tuple(
            tuple(block_ids[window.group][window.first(start, boundary) : boundary])
            for window in plan.windows
        ),
        result.tail,
        tracker.phase.deadline,
    )
