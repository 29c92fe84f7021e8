# SPDX-License-Identifier: Apache-2.0
"""Our connector in the simulation: the real one without what a process needs."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import lmcache_hybrid.connector
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.scheduler import HybridScheduler
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.worker import HybridWorker

from . import device
from .device import Device
from .storage import ManualExecutor
from .threads import Executor
from .threads import Pool as ThreadPool

NEVER_MS = 10**9


class SimConnector(lmcache_hybrid.connector.HybridConnector):
    """HybridConnector without processes, sockets and start-up of LMCache."""

    building: Any  # whose connectors are being made
    rank = 0

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        self.engine = engine = SimConnector.building
        self.plan = engine.plan
        self.scheduler = self.worker = None
        self._guard = WeightsGuard()
        self._metadata = NOTHING
        if role == KVConnectorRole.SCHEDULER:
            asking = LookupQueue(engine.ask, NEVER_MS, engine.asking)
            self.scheduler = HybridScheduler(engine.plan, engine.options, engine.hash_size, asking)
            self._client, self._queue = self, self  # what a reset asks of both
        else:
            rank = engine.ranks[SimConnector.rank]
            self._registered = self.kv_caches = rank.kv_caches()
            self._device = rank.device
            pages = {
                group: GroupPages([f"layer{group}"], self.kv_caches) for group in self.plan.groups
            }
            if rank.device is not None:
                pages = {
                    group: device.on_device(each, rank.device) for group, each in pages.items()
                }
            self.worker = HybridWorker(
                self.plan,
                pages,
                engine.stores[SimConnector.rank],
                engine.lookups[SimConnector.rank],
                torch.device("cpu") if rank.device is None else rank.device.torch_device,
                engine.setup.part_bytes,
            )
            self._replace_threads(rank.device)

    def _replace_threads(self, on_device: Device | None) -> None:
        if on_device is None:
            self.worker.loads._executor = ManualExecutor()
            return
        threads, held = on_device.threads, lambda: self.engine.holding
        self.worker.loads._executor = Executor(threads, held, by_hand=True)
        self.worker.saves._finisher = Executor(threads)
        self.worker.loads._threads = ThreadPool(threads, held)

    def run(self, function: Callable[[], bool]) -> bool:
        """Between two questions to the ranks, as :meth:`LookupQueue.run`."""
        while self.engine.asking.run():
            pass
        return function()

    def clear(self, epoch: int) -> bool:
        """As :meth:`LookupClient.clear`; lost with a rank's other messages."""
        silent = self.engine.silent
        if silent not in ("lost", "late"):
            for rank in self.engine.ranks:
                rank.connector._hybrid.worker.reset(epoch)
        return not silent

    def restore_kv_caches(self) -> None:
        super().restore_kv_caches()
        if self._device is not None:
            for pages in self.worker.pages.values():
                device.on_device(pages, self._device)

    def register_kv_caches(self, kv_caches) -> None:
        return  # the pages are known from the start
