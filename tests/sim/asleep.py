# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: the KV cache's memory is freed and allocated anew, through vLLM's own calls."""

import numpy as np
from vllm.v1.core.sched.interface import PauseState

from .engine import SimEngine
from .model import ToyRank
from .reset import replace_weights, reset_all

FREED = np.int64(0x0F4EED0F4EED0F4E)
NEW_MEMORY = np.int64(0x0A110CA7ED0A110C)
MODES = ("abort", "wait", "keep")


def sleep(engine: SimEngine, mode: str) -> bool:
    """As ``EngineCore.sleep`` at level 1 or 2; False where vLLM refuses, and a client resumes."""
    scheduler, holding = engine.scheduler, engine.holding
    if mode == "abort":
        for request_id in engine.live:
            engine.abort(request_id)
    scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
    engine.drain()
    engine.holding = holding
    if not reset_all(engine):
        engine.events["sleep refused"] += 1
        scheduler.set_pause_state(PauseState.UNPAUSED)
        return False
    free(engine)
    return True


def free(engine: SimEngine) -> None:
    """As ``Worker.sleep`` on each rank: what touches the pages from now on is an error."""
    engine.events["slept"] += 1
    for rank in engine.ranks:
        ToyRank.running = rank
        rank.connector.unregister_kv_caches()
        if rank.device is not None:
            rank.device.freed = True
            rank.device.drain()
        rank.pages.fill(FREED)
    engine.check_devices()


def wake(engine: SimEngine, level: int) -> None:
    """As ``EngineCore.wake_up``, with other weights after level 2."""
    if level == 2:
        replace_weights(engine)
    for rank in engine.ranks:
        assert (rank.pages == FREED).all(), "memory was written that is freed"
        rank.pages.fill(NEW_MEMORY)
        if rank.device is not None:
            rank.device.freed = False
        ToyRank.running = rank
        rank.connector.restore_kv_caches()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
