# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced in place, as in training by reinforcement."""

from .engine import SimEngine


def reload_weights(engine: SimEngine) -> None:
    """Replace the weights and reset all caches, through vLLM's own call.

    Requests that were running are preempted. vLLM refuses beside a load in flight and an idle
    session; then the weights stay, and it is asked again when that one has ended.
    """
    if not reset_all(engine):
        engine.drain()
        assert reset_all(engine) or engine.silent
    replace_weights(engine)


def reset_all(engine: SimEngine, running: bool = True) -> bool:
    """vLLM's reset of all caches; ``running``: preempt for it what runs."""
    while running and engine._queue:
        engine._finish_step()
    try:
        return engine.scheduler.reset_prefix_cache(running, reset_connector=True)
    except RuntimeError:
        engine.events["reset refused"] += 1
        return False


def replace_weights(engine: SimEngine) -> None:
    """From now on every page and state has other bytes."""
    engine.events["weights replaced"] += 1
    for rank in engine.ranks:
        rank.load_weights(engine.events["weights replaced"])
