# SPDX-License-Identifier: Apache-2.0
"""A prompt that the stores of an engine hold, and what is done with it."""

from vllm.v1.request import RequestStatus

from .engine import SimEngine
from .program import TRUNKS
from .storage import N

PROMPT = TRUNKS[0][: 4 * N + 3]


def hits(engine: SimEngine) -> int:
    return engine.hybrid.counts.lookups.get("hit", 0)


def wait_for_load(engine: SimEngine, request_id: str) -> None:
    """Ask the prompt again until its load waits to be run."""
    engine.holding = True
    engine.add(request_id, PROMPT, 2)
    status = RequestStatus.WAITING_FOR_REMOTE_KVS
    for _ in range(20):
        engine.step()
        if engine.requests[request_id].status == status:
            return
    raise AssertionError("the prompt does not hit")
