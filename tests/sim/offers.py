# SPDX-License-Identifier: Apache-2.0
"""States that vLLM offers inside a block."""

from .engine import SimEngine
from .storage import N

INSIDE, JUNCTION = "offers inside a block", "offers at a junction inside a block"


def note_offers(engine: SimEngine) -> SimEngine:
    """Count the states that are offered at tokens which are no block boundary."""
    manager = engine.scheduler.kv_cache_manager
    take = manager.take_boundary_state_offloads

    def taken() -> dict[str, list[tuple[int, int, int]]]:
        offers = take()
        for request_id, each in offers.items():
            prompt = engine.requests[request_id].num_prompt_tokens
            inside = [tokens for _, _, tokens in each if tokens % N]
            engine.events[INSIDE] += len(inside)
            # What is offered by itself lies in a prompt's last blocks.
            engine.events[JUNCTION] += sum(tokens <= prompt - 2 * N for tokens in inside)
        return offers

    manager.take_boundary_state_offloads = taken
    return engine
