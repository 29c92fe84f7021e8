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


def barred_boundaries(request: "Request", plan: GroupPlan) -> frozenset[int]:
    """Return the boundaries, in tokens, that the request must not start from."""
    if not plan.whole_items:
        return frozenset()
    step = plan.unit or plan.block_size
    places = (item.mm_position for item in request.mm_features)
    return frozenset(
        tokens
        for place in places
        for tokens in range(-(-place.offset // step) * step, place.offset + place.length, step)
    )
