# SPDX-License-Identifier: Apache-2.0
"""States that vLLM offers inside a block, and what becomes of them."""

from .engine import SimEngine
from .storage import N

INSIDE, JUNCTION = "offers inside a block", "offers at a junction inside a block"
LOADS, SHORT = "loads that end inside a block", "loads of prompts shorter than a block"
MIXED = "loads that end inside a block beside local tokens"
AT_THE_END = "states handed off by requests that end"
CHUNKS = "states at the end of a chunk"


def note_offers(engine: SimEngine) -> SimEngine:
    """Count states offered at tokens which are no block boundary, and loads that end there."""
    _note_loads(engine)
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


def _note_loads(engine: SimEngine) -> None:
    step, size = engine.hybrid.build_connector_meta, engine.plan.block_size

    def stepped(output):
        metadata = step(output)
        for save in metadata.saves:
            offers = output.kv_connector_block_state.boundary_state_offloads
            offered = {tokens for _, _, tokens in offers.get(save.request_id, ())}
            engine.events[CHUNKS] += sum(end * size not in offered for end, _ in save.states)
        for load in metadata.loads:
            engine.events[LOADS] += load.tail > 0
            engine.events[SHORT] += load.tail > 0 == load.boundary
            engine.events[MIXED] += load.tail > 0 < load.start
        engine.events[AT_THE_END] += sum(s.request_id in metadata.ended for s in metadata.saves)
        return metadata

    engine.hybrid.build_connector_meta = stepped
