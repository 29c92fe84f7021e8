# SPDX-License-Identifier: Apache-2.0
"""Bars boundaries inside media whose tokens attend to each other in both directions.

Such an item (an image of Gemma 3) must be computed in one step. vLLM ends no step inside an item
that begins after the step's start (``Scheduler._try_schedule_encoder_inputs``). It may split one
that begins at the start or before it, so a request must not start at or inside an item.
"""

from typing import TYPE_CHECKING

from lmcache_hybrid.core.groups import GroupPlan

if TYPE_CHECKING:
    from vllm.v1.request import Request


def is_barred(request: "Request", tokens: int, plan: GroupPlan) -> bool:
    """Whether the request must not start from the boundary at ``tokens``."""
    if not plan.whole_items:
        return False
    places = (item.mm_position for item in request.mm_features)
    return any(place.offset <= tokens < place.offset + place.length for place in places)


def barred(request: "Request", plan: GroupPlan) -> tuple[int, ...]:
    """List the boundaries, in tokens, that the request must not start from."""
    if not plan.whole_items:
        return ()
    step = plan.unit or plan.block_size
    places = (item.mm_position for item in request.mm_features)
    return tuple(
        tokens
        for place in places
        for tokens in range(-(-place.offset // step) * step, place.offset + place.length, step)
    )
