# SPDX-License-Identifier: Apache-2.0
"""Our connector in the simulation: the real one without what a process needs."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

import lmcache_hybrid.connector
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.scheduler.load_policy import LoadWhenFaster
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.pin_limit import Pins
from lmcache_hybrid.scheduler.scheduler import HybridScheduler
from lmcache_hybrid.scheduler.shared_prefills import step_tokens_of
from lmcache_hybrid.scheduler.step_ends import Drafter
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.worker import HybridWorker

from . import device
from .device import Device
from .storage import RECORD_BYTES, ManualExecutor
from .threads import Executor
from .threads import Pool as ThreadPool

NEVER_MS = 10**9


class RandomPolicy(LoadWhenFaster):
    """Decides at random, and measures on a clock that goes on at random."""

    def __init__(self, plan, page_bytes, seed: int) -> None:
        super().__init__(plan, page_bytes, self._read)
        self._random, self._now = random.Random(seed), 0.0

    def _read(self) -> float:
        self._now += self._random.choice((0.0, 1e-4, 1e-2, 1.0))
        return self._now

    def judge(self, request, result, start) -> float | None:
        seconds = super().judge(request, result, start)
        match self._random.randrange(6):
            case 0:
                return 0.0 if seconds is not None else None
            case 1:
                return None
            case 3:
                return math.inf
        return seconds


class SimConnector(lmcache_hybrid.connector.HybridConnector):
    """HybridConnector without processes, sockets and start-up of LMCache."""

    building: Any  # whose connectors are being made
    rank = 0

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.engine = engine = SimConnector.building
        self.plan = engine.plan
        self.scheduler = self.worker = None
        self._guard = WeightsGuard()
        self._metadata = NOTHING
        if role == KVConnectorRole.SCHEDULER:
            asking = LookupQueue(
                engine.ask, NEVER_MS, engine.asking, drop=engine.drop, keep=engine.keep
            )
            sizes = dict.fromkeys(engine.plan.groups, engine.plan.block_size * 8)
            policy = RandomPolicy(engine.plan, sizes, engine.setup.seed)
            records = dict.fromkeys(engine.plan.groups, RECORD_BYTES)
            pool_gib = engine.setup.waiting * RECORD_BYTES / (1 << 30) or None
            self.scheduler = HybridScheduler(
                engine.plan,
                engine.options,
                engine.hash_size,
                asking,
                policy if engine.setup.faster else None,
                pins=Pins(engine.plan, records, pool_gib),
            )
            self.scheduler.drafter = Drafter.of(vllm_config)
            if engine.setup.share:
                most = step_tokens_of(vllm_config.scheduler_config)
                self.scheduler.prefills.step_tokens = most
            self._client, self._queue = self, self  # what a reset asks of both
        else:
            rank = engine.ranks[SimConnector.rank]
            self._registered = self.kv_caches = rank.kv_caches()
            self._device = rank.device
            pages = {
                group: GroupPages(
                    rank.layers[group],
                    self.kv_caches,
                    rank.num_blocks,
                    self.plan.blocks_per_record(group),
                )
                for group in self.plan.groups
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
                rank.connector.worker.reset(epoch)
        return not silent

    def restore_kv_caches(self) -> None:
        super().restore_kv_caches()
        if self._device is not None:
            for pages in self.worker.pages.values():
                device.on_device(pages, self._device)

    def register_kv_caches(self, kv_caches) -> None:
        return  # the pages are known from the start
