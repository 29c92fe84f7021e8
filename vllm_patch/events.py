# SPDX-License-Identifier: Apache-2.0
"""Keeps KV cache events of the store right when vLLM resets its own cache."""

import functools

from vllm_patch.configuration import hybrids_of, is_ours


def install() -> None:
    """Patch vLLM. Call once per process: each patch notifies connectors once more."""
    announce_what_stays()


def announce_what_stays() -> None:
    """A reset of vLLM's own cache must not withdraw what a connector holds.

    Bug: ``AllBlocksCleared`` names no medium, so consumers forget all of the engine, and
    connectors are not told.
    Symptom: after a reset or a sleep, routers take the store for empty, as far as it was stored
    before.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: the event names its medium, or connectors are told of every reset.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.reset_prefix_cache

    @functools.wraps(original)
    def reset_prefix_cache(
        self: Scheduler, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        done = original(self, reset_running_requests, reset_connector)
        if done and is_ours(self.vllm_config):
            for connector in hybrids_of(self.connector):
                connector.cleared()
        return done

    Scheduler.reset_prefix_cache = reset_prefix_cache
