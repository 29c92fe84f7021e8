# SPDX-License-Identifier: Apache-2.0
"""Follows sleep mode, in which a worker frees the KV cache, maybe also the weights.

EngineCore resets all caches, connectors included, before it asks its workers to sleep. Then a rank
calls :meth:`HybridWorker.suspend`.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from lmcache_hybrid.identity.weights import LOADED
from vllm_patch.configuration import hybrids_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

    from lmcache_hybrid.connector import HybridConnector


def follow(worker: "type[Worker]") -> None:
    """Hook the sleeps of this class's workers. Mutates the class.

    vLLM's CPU worker overrides them and frees nothing.
    """
    notice_discarded_weights(worker)
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        tell_of_freed_pages(worker)


def notice_discarded_weights(worker: "type[Worker]") -> None:
    """Note that no weights are known after a sleep that discards them (level 2)."""
    original = worker.sleep

    @functools.wraps(original)
    def sleep(self: "Worker", level: int = 1) -> None:
        if level != 1:
            LOADED.discarded = True
        original(self, level)

    worker.sleep = sleep


def tell_of_freed_pages(worker: "type[Worker]") -> None:
    """A connector must let go of the KV cache before its memory is freed.

    Bug: ``Worker.sleep`` and ``Worker.discard`` free it, and no connector is told.
    Symptom: a copy that is still under way ends the process ("illegal memory access").
    Seen in: vLLM 0.32.0; gone in 0.33.0.
    Remove when: vLLM >= 0.33, which calls ``unregister_kv_caches``, is the oldest
    supported version.
    """
    sleep, wake_up, discard = worker.sleep, worker.wake_up, worker.discard

    @functools.wraps(sleep)
    def sleeping(self: "Worker", level: int = 1) -> None:
        for connector in _hybrids():
            connector.unregister_kv_caches()
        sleep(self, level)

    @functools.wraps(discard)
    def discarding(self: "Worker", tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            for connector in _hybrids():
                connector.unregister_kv_caches()
        discard(self, tags)

    @functools.wraps(wake_up)
    def waking(self: "Worker", tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        if tags is None or "kv_cache" in tags:
            for connector in _hybrids():
                connector.restore_kv_caches()

    worker.sleep, worker.discard, worker.wake_up = sleeping, discarding, waking


def _hybrids() -> "Iterator[HybridConnector]":
    """Yield the hybrid connectors of this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        yield from hybrids_of(get_kv_transfer_group())
