# SPDX-License-Identifier: Apache-2.0
"""An engine of two ranks in one process: everything real but the model and the collectives.

vLLM's scheduler, ``LMCacheConnectorV1`` with its start-up, sockets and threads, LMCache's engine
and backends of each rank, files and servers. The model is the simulation's toy, which finds every
wrong byte; the ranks are threads (:mod:`.ranks`).
"""

import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lmcache.integration.vllm import utils as lmcache_utils
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_connector as vllms
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.identity.weights import LOADED
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder, VllmServiceFactory
from tests.sim import orders
from tests.sim.model import ToyRank
from tests.sim.setup import Setup, base_config
from tests.sim.storage import N
from tests.sim.truth import Truth

from .ranks import LOCAL, Meeting

SETUP = Setup(groups="sa", ranks=2, blocks=40, batch=3 * N)
# Seconds after which a request that does not end counts as stuck.
PATIENCE = 20.0


class Stuck(AssertionError):
    """A request does not end."""


class Adapters:
    """What vLLM's class loads LoRA adapters with, on all ranks at once."""

    lora_config = SimpleNamespace(enable_tower_connector_lora=False)
    _adapter_manager = SimpleNamespace(moe_ep_load_spec=None)

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        ADAPTERS.serve(self, lambda manager, lora: self._model())

    def list_adapters(self) -> set[int]:
        return self.loaded

    def activate(self, lora: LoRARequest) -> None:
        """As vLLM does before a step with a request of this adapter."""
        if lora.lora_int_id not in self.loaded:
            ADAPTERS.load(lora)
            self.loaded.add(lora.lora_int_id)

    @staticmethod
    def _model() -> SimpleNamespace:
        layer = SimpleNamespace(
            rank=1, lora_alpha=1, scaling=1.0, lora_a=torch.ones(2), lora_b=torch.ones(2)
        )
        return SimpleNamespace(
            rank=1, is_3d_lora_weight=False, loras={"layer": layer}, modules_to_save={}
        )


class Deployment:
    """One life of an engine, from its start to :meth:`stop`."""

    def __init__(self, folder: Path, store: dict[str, Any], events: bool, patch: Any) -> None:
        """Start it.

        Args:
            folder: of the model; another life with the same one finds its records.
            store: LMCache's options.
            patch: a ``pytest.MonkeyPatch`` of this process.

        Raises:
            Exception: the engine does not start.
        """
        self._requests: dict[str, Request] = {}
        self._truths: dict[str, Truth] = {}
        self._loras: dict[str, LoRARequest] = {}
        self.ranks: list[ToyRank] = []
        self._meeting = Meeting(SETUP.ranks)
        self._meeting.install(patch)
        orders.install(patch, lambda: self.ranks[LOCAL.rank].connector)
        patch.setattr(lmcache_utils, "_config_instance", None)
        base, structured = base_config()
        self._adapters = Adapters()
        self._config = self._settings(base, folder, store, events)
        self._cache = SETUP.kv_cache_config()
        LOADED.note(self._config.model_config, f"weights of {folder}")
        self._hasher = get_request_block_hasher(N, sha256_cbor)
        with mock.patch.dict("os.environ", VLLM_USE_V2_MODEL_RUNNER="0"):
            self.scheduler = self._config.scheduler_config.get_scheduler_cls()(
                vllm_config=self._config,
                kv_cache_config=self._cache,
                structured_output_manager=structured,
                block_size=N,
                hash_block_size=N,
            )
        self._name_engines(patch)
        self.ranks = [self._make_rank(number) for number in range(SETUP.ranks)]
        self._meeting.run(self._start_rank)
        # Of LMCache's pool, by rank: bytes that are given out while nothing is stored.
        self._at_rest = {
            number: self._used(worker.store.manager) for number, worker in self._serving()
        }
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, SETUP.ranks)

    def _settings(self, base: Any, folder: Path, store: dict[str, Any], events: bool) -> Any:
        config = SETUP.vllm_config(base)
        config.model_config.model = str(folder)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.world_size = SETUP.ranks
        config.parallel_config.tensor_parallel_size = SETUP.ranks
        extra = {f"lmcache.{name}": value for name, value in store.items()}
        extra["lmcache.enable_kv_events"] = events
        config.kv_transfer_config = KVTransferConfig(
            "LMCacheConnectorV1", kv_role="kv_both", kv_connector_extra_config=extra
        )
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
        if events:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return config

    @staticmethod
    def _make_rank(number: int) -> ToyRank:
        return ToyRank(
            number, SETUP.blocks, N, (1,), (0,), layers=SETUP.layers(number), draft_blocks=0
        )

    def _start_rank(self, number: int) -> None:
        """As ``Worker.initialize_from_config``: the connector, and then its pages."""
        rank, config = self.ranks[number], copy.copy(self._config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = number
        rank.connector = vllms.LMCacheConnectorV1(config, KVConnectorRole.WORKER, self._cache)
        rank.order = orders.make_order("v1", rank.connector, config, False)
        rank.connector.register_kv_caches(rank.kv_caches())

    @staticmethod
    def _name_engines(patch: Any) -> None:
        """Name LMCache's engines by rank: there is one of a name in a process."""
        make = LMCacheEngineBuilder.get_or_create
        patch.setattr(
            LMCacheEngineBuilder,
            "get_or_create",
            lambda name, *args, **kwargs: make(f"rank{LOCAL.rank}", *args, **kwargs),
        )
        patch.setattr(
            VllmServiceFactory,
            "get_engine_instance_id",
            lambda self: f"rank{getattr(LOCAL, 'rank', '')}",
        )

    def _hybrid(self, number: int) -> Any:
        return self.ranks[number].connector

    def _serving(self) -> list[tuple[int, Any]]:
        """Number and worker of each rank that serves."""
        workers = [(number, self._hybrid(number).worker) for number in range(SETUP.ranks)]
        return [(number, worker) for number, worker in workers if worker is not None]

    @property
    def off(self) -> bool:
        """Whether a side could not start, so that no prompt is loaded."""
        scheduler = self.scheduler.connector.scheduler
        return scheduler is None or len(self._serving()) < SETUP.ranks

    @property
    def stores(self) -> list[Any]:
        """LMCache's StorageManager of each rank that serves."""
        return [worker.store.manager for _, worker in self._serving()]

    @staticmethod
    def _used(manager: Any) -> int:
        allocator = manager.local_cpu_backend.memory_allocator.pin_allocator
        return allocator.address_manager.total_allocated_size

    # Requests

    def add(
        self, request_id: str, prompt: list[int], output: int, lora: LoRARequest | None = None
    ) -> None:
        owner = "" if lora is None else lora.lora_name
        self._truths[request_id] = Truth(prompt, owner, SETUP.longest + 3)
        if lora is not None:
            self._loras[request_id] = lora
        self._requests[request_id] = request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            lora_request=lora,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def is_loading(self, request_id: str) -> bool:
        return self._requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def step(self) -> None:
        output = self.scheduler.schedule()
        for request_id in output.num_scheduled_tokens:
            if request_id in self._loras:
                self._adapters.activate(self._loras[request_id])
        results = self._meeting.run(lambda rank: self.ranks[rank].execute(output, self._truths))
        result = self._aggregator.aggregate(results)
        self.scheduler.update_from_output(output, result)
        for request_id in output.num_scheduled_tokens:
            request, truth = self._requests[request_id], self._truths[request_id].tokens
            got = list(request.output_token_ids)
            assert got == truth[request.num_prompt_tokens : request.num_tokens], "other tokens"
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)

    def drain(self) -> None:
        """Run until every request has ended. Raises Stuck."""
        until = time.monotonic() + PATIENCE
        while self.scheduler.has_requests():
            if time.monotonic() > until:
                live = [r for r, each in self._requests.items() if not each.is_finished()]
                raise Stuck(f"{live} do not end")
            self.step()
        self.step()

    def ask(self, request_id: str, prompt: list[int], lora: LoRARequest | None = None) -> None:
        """Empty vLLM's own cache, so that what can be loaded is, and answer a prompt."""
        self.scheduler.reset_prefix_cache()
        self.add(request_id, prompt, 2, lora)
        self.drain()

    # Stores

    def settle(self) -> None:
        """Wait until what was saved is written, or a moment where that does not happen."""
        until = time.monotonic() + 2.0
        while time.monotonic() < until and any(
            getattr(backend, "put_tasks", None)
            for manager in self.stores
            for backend in manager.storage_backends.values()
        ):
            time.sleep(0.005)

    def evict(self, *backends: str) -> None:
        """Lose all records in these backends' indexes."""
        for manager in self.stores:
            for name in backends:
                backend = manager.storage_backends.get(name)
                index = getattr(backend, "hot_cache", None)
                index = getattr(backend, "dict", {}) if index is None else index
                for key in list(index):
                    backend.remove(key)

    def sleep(self) -> None:
        """Free the KV cache and allocate it anew, on each rank."""
        for rank in self.ranks:
            rank.connector.unregister_kv_caches()
            rank.connector.restore_kv_caches()

    @property
    def hits(self) -> int:
        scheduler = self.scheduler.connector.scheduler
        return 0 if scheduler is None else scheduler.counts.hits.total()

    # The end

    def check_empty(self) -> None:
        """Raises AssertionError when ended requests left something behind. Empties RAM."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are leaked"
        hybrid = self.scheduler.connector.scheduler
        if hybrid is not None:
            assert not hybrid._trackers, "requests are still tracked"
            assert not hybrid._loading and not hybrid._loads, "loads are under way"
        self.evict("LocalCPUBackend")
        for number, worker in self._serving():
            assert not worker.loads._running, "loads are not reported"
            assert not worker._lookup._claims, f"rank {number} holds claims"
            self._check_pins(number, worker.store.manager)
            kept = self._used(worker.store.manager) - self._at_rest[number]
            assert not kept, f"rank {number} keeps {kept} bytes of LMCache's pool"

    def _check_pins(self, number: int, manager: Any) -> None:
        for name, backend in manager.storage_backends.items():
            index = getattr(backend, "hot_cache", None)
            index = getattr(backend, "dict", {}) if index is None else index
            pinned = [key for key, each in list(index.items()) if not each.can_evict]
            assert not pinned, f"rank {number} pins {len(pinned)} records in {name}"
            if isinstance(backend, LocalDisk):
                assert not backend.put_tasks, f"rank {number} has writes that do not end"
                backend.check_integrity()

    def stop(self) -> None:
        self.scheduler.shutdown()
        self._meeting.run(lambda rank: self.ranks[rank].connector.shutdown())
