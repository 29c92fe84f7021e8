# SPDX-License-Identifier: Apache-2.0
"""Joins scheduler side and worker side to vLLM's connector interface.

One object per role and process. It answers the calls that vLLM's
``LMCacheConnectorV1`` passes on, see :mod:`vllm_patch.connector`.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

from lmcache_hybrid.config import s3
from lmcache_hybrid.config.options import (
    Options,
    check_lengths,
    check_pool,
    load_lmcache_config,
    log_events,
    read_options,
    settle_lmcache_config,
)
from lmcache_hybrid.config.parallel import check_parallelism, check_prefix_cache, settle_disk_folder
from lmcache_hybrid.config.redis_credentials import unencrypted
from lmcache_hybrid.core.errors import ConfigError, UnknownContentError
from lmcache_hybrid.core.groups import layer_specs, page_bytes, plan_groups
from lmcache_hybrid.core.lmcache_stats import LMCacheMonitor
from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.metrics import HybridStats
from lmcache_hybrid.protocol.changes import RankReports
from lmcache_hybrid.protocol.failures import FailedLoads
from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.load_policy import policy_for
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.patience import EmptySteps
from lmcache_hybrid.scheduler.pins import Pins
from lmcache_hybrid.scheduler.scheduler import HybridScheduler
from lmcache_hybrid.storage.disk.prompts_file import prompts_file_for
from lmcache_hybrid.storage.folder.cleaner import FolderCleaner, start_cleaner
from lmcache_hybrid.storage.notes import StoreNotes
from lmcache_hybrid.storage.open_store import open_store
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.rpc import LookupClient, LookupServer
from lmcache_hybrid.storage.weights_guard import GuardedLookup, WeightsGuard
from lmcache_hybrid.worker.fingerprint import fingerprints
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.scales import reset_scales
from lmcache_hybrid.worker.worker import HybridWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_hybrid.scheduler.cached_blocks import Offer
    from lmcache_hybrid.upstream.lmcache_home import LMCacheManager

logger = init_logger("vllm.lmcache_hybrid.connector")


class HybridConnector:
    """LMCache for a model with state groups.

    Attributes:
        plan: the model's groups.
        scheduler: set in the scheduler role.
        worker: set in the worker role once the KV cache is registered and the
            store is up; None means that this rank computes everything.
        kv_caches: by layer, for LMCache's API server; empty while vLLM sleeps.

    vLLM calls the scheduler role on its scheduler's thread and the worker role on the thread
    that runs the model. Lookups come in on a thread of :class:`LookupServer`.
    """

    _events: KVEvents | None = None

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Read and check the configuration, start this role's services.

        Raises:
            ConfigError: the configuration cannot be served; the engine must not start.
        """
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        check_parallelism(vllm_config)
        check_prefix_cache(vllm_config)
        config = load_lmcache_config(vllm_config)
        self._options = options = read_options(vllm_config, config)
        plan = plan_groups(kv_cache_config, options.attention_group)
        _, unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self.plan = plan.with_unit(unit)
        settle_lmcache_config(config, self.plan.block_size)
        check_lengths(options, self.plan.block_size)
        self.scheduler: HybridScheduler | None = None
        self.worker: HybridWorker | None = None
        self._metadata: ConnectorMetadata = NOTHING
        self._client: LookupClient | None = None
        self._queue: LookupQueue | None = None
        self._server: LookupServer | None = None
        self._lookup: RankLookup | None = None
        self._cleaner: FolderCleaner | None = None
        self._guard = WeightsGuard()
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._registered = self.kv_caches
        parallel = vllm_config.parallel_config
        settle_disk_folder(config, parallel)
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(config, options, unit)
        else:
            ADAPTERS.rank, ADAPTERS.ranks = parallel.rank, parallel.world_size
            ADAPTERS.stages = parallel.pipeline_parallel_size
            self._server = LookupServer(vllm_config)
        self._manager = self._start_lmcache(config, role)

    def get_kv_connector_stats(self) -> HybridStats | None:
        """Return what this side counted since the last call; None for nothing."""
        side = self.scheduler or self.worker
        news = side.ledger.report() if side is not None else None
        return HybridStats(news) if news else None

    # Start-up

    def _start_scheduler(self, config: "LMCacheEngineConfig", options: Options, unit: int) -> None:
        if url := unencrypted(config.remote_url) or s3.unencrypted(config):
            logger.warning(
                "Records go to %s unencrypted, and they are the prompts: use TLS or a network of "
                "its own, see docs/security.md.",
                url,
            )
        self._client = LookupClient(self._vllm_config, config.lookup_timeout_ms)
        self._queue = LookupQueue(
            self._client.ask, config.lookup_timeout_ms, contents=self._client.contents
        )
        plan, groups = self.plan, self._kv_cache_config.kv_cache_groups
        sizes = {i: page_bytes(groups[i]) * plan.blocks_per_record(i) for i in plan.groups}
        policy = policy_for(options.load_policy, plan, sizes)
        parallel = self._vllm_config.parallel_config
        known = prompts_file_for(self._vllm_config, config, options, plan.block_size, unit)
        if options.events:
            self._events = KVEvents(plan, groups, parallel.world_size, known)
        log_events(self._vllm_config, config)
        pins = Pins(plan, sizes, config.max_local_cpu_size if config.local_cpu else None)
        self.scheduler = HybridScheduler(
            plan, options, unit, self._queue, policy, self._events, pins
        )
        self.scheduler.empty_steps = EmptySteps.of(parallel)
        logger.info(
            "LMCache serves hybrid groups: blocks of %d tokens, attention groups %s, "
            "window groups %s, state groups %s.",
            *(plan.block_size, plan.attention, tuple(w.group for w in plan.windows), plan.states),
        )

    def _start_lmcache(
        self, config: "LMCacheEngineConfig", role: KVConnectorRole
    ) -> "LMCacheManager":
        from lmcache_hybrid.storage.service_factory import HybridServiceFactory
        from lmcache_hybrid.upstream.lmcache_home import LMCacheManager

        groups = [self._kv_cache_config.kv_cache_groups[i] for i in self.plan.attention]
        factory = HybridServiceFactory(
            config,
            self._vllm_config,
            role.name.lower(),
            next(iter(layer_specs(groups[0]))),
            sum(len(group.layer_names) for group in groups),
        )
        manager = LMCacheManager(config, factory, connector=self)
        manager.start_services()
        return manager

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Map the pages, open the store, and answer lookups from now on."""
        self.kv_caches = self._registered = kv_caches
        groups, num_blocks = self._kv_cache_config.kv_cache_groups, self._kv_cache_config.num_blocks
        count = self.plan.blocks_per_record
        pages = {
            index: GroupPages(groups[index].layer_names, kv_caches, num_blocks, count(index))
            for index in self.plan.groups
        }
        for index, group in pages.items():
            wanted = page_bytes(groups[index], group.layers) * group.count
            if group.block_bytes != wanted:
                raise ConfigError(
                    f"blocks of KV cache group {index} have {group.block_bytes} bytes instead of "
                    f"the {wanted} of their specs; choose another --attention-backend."
                )
        context = self._vllm_config.compilation_config.static_forward_context
        reset_scales(self._kv_cache_config, kv_caches, context)
        check_pool(self._manager.config, max(group.block_bytes for group in pages.values()))
        try:
            # All ranks take part in it, so it comes before anything that may fail on one.
            name, replicas = fingerprints(self._vllm_config, self.plan, pages)
        except UnknownContentError as error:
            logger.warning(
                "LMCache is off on this rank, which computes every prompt, because %s.", error
            )
            return
        self._manager.post_init()
        engine = self._manager.lmcache_engine
        if engine is None or engine.storage_manager is None:
            logger.error(
                "LMCache could not open its store (see above): this rank computes every prompt "
                "until the engine is restarted with a working store."
            )
            return
        self._open_store(engine, pages, name, replicas)

    def unregister_kv_caches(self) -> None:
        """Stop using the KV cache: vLLM is about to free its memory (sleep mode). Idempotent."""
        self.kv_caches = {}
        if self.worker is not None:
            self.worker.suspend()

    def restore_kv_caches(self) -> None:
        """Use the KV cache again: vLLM has allocated its memory anew. Idempotent."""
        self.kv_caches = self._registered
        if self.worker is None:
            return
        try:
            self.worker.resume(self.kv_caches)
        except ConfigError as error:
            logger.error("LMCache loads and stores nothing on this rank any more: %s", error)

    def _open_store(
        self,
        engine: Any,
        pages: dict[int, GroupPages],
        name: bytes,
        replicas: Replicas | None,
    ) -> None:
        from lmcache_hybrid.storage.host_memory import report_pool

        assert self._server is not None
        notes = StoreNotes(self._vllm_config.parallel_config.rank) if self._options.events else None
        store = open_store(
            engine,
            self._vllm_config.model_config.model,
            name,
            replicas,
            max(group.block_bytes for group in pages.values()),
            self._options.digester,
            notes,
        )
        monitor = LMCacheMonitor(engine.stats_monitor)
        self._lookup = RankLookup(self.plan, store, monitor)
        first = next(iter(self.kv_caches.values()))
        self.worker = HybridWorker(
            self.plan, pages, store, self._lookup, first.device, monitor=monitor, notes=notes
        )
        report_pool(engine.storage_manager.local_cpu_backend, first.device)
        self._guard = WeightsGuard()
        self._server.serve(GuardedLookup(self._lookup, self._guard), self._reset)
        self._cleaner = start_cleaner(
            self._manager.config.remote_url, self._options.folder_limits, self.worker.ledger
        )

    def _reset(self, epoch: int) -> None:
        """Forget all that this rank stored. Runs on the thread that answers lookups."""
        assert self.worker is not None
        self.worker.reset(epoch)
        # Last: a step under way must not be stored under the old weights' name.
        self._guard.reset()

    def shutdown(self) -> None:
        """Stop threads, flush and close LMCache's backends."""
        service: Any
        for service in (self._cleaner, self._server, self._queue, self._client, self._events):
            if service is not None:
                service.close()
        if self.worker is not None:
            self.worker.shutdown()
        self._manager.stop_services()

    # Worker side

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        self._metadata = metadata
        if self.worker is not None:
            # vLLM calls start_load_kv after the forward where no load is synchronous, to keep
            # what that costs off the critical path. Here it costs next to nothing, and a load
            # that runs beside the forward is reported a whole step earlier.
            self.worker.start_loads(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None and not self._metadata.idle:
            self._guard.computing()

    def wait_for_save(self) -> None:
        if self.worker is not None and self._guard.stands():
            self.worker.save(self._metadata)
        else:  # the other ranks wait for this one
            ADAPTERS.all_hold([save.prefix.adapter for save in self._metadata.saves])

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker is None:
            return KVConnectorTransferResults(finished_sending=set(self._metadata.ended))
        results = self.worker.results(finished_req_ids, self._metadata.waits)
        if not self._guard.stands():
            results.failed_recving.update(results.finished_recving)
            self.worker.loads.failed = dict.fromkeys(results.finished_recving)
        results.finished_sending.update(self._metadata.ended)
        return results

    def build_connector_worker_meta(self) -> FailedLoads | None:
        return self.worker.failed_loads() if self.worker is not None else None

    def get_kv_connector_kv_cache_events(self) -> RankReports | None:
        report = self.worker.report(self._guard.stands) if self.worker is not None else None
        return RankReports([report]) if report else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        assert self.scheduler is not None
        return self.scheduler.step(scheduler_output)

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        assert self.scheduler is not None
        self.scheduler.transferred(output)

    def register_finished_partial_tail(
        self, request: "Request", block_ids: tuple[list[int], ...], offers: "Sequence[Offer]"
    ) -> bool:
        assert self.scheduler is not None
        return self.scheduler.finished_inside(request, block_ids, offers)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        self.scheduler.finished(request)
        return False, None

    def take_events(self) -> "list[KVCacheEvent]":
        return self._events.take() if self._events else []

    def has_pending_push_work(self) -> bool:
        return self._events is not None and self._events.pending

    def cleared(self) -> None:
        if self._events is not None:
            self._events.cleared()

    def reset_cache(self) -> bool:
        """Forget all that was stored, on every rank; False when a rank did not confirm it."""
        assert self._queue is not None and self._client is not None and self.scheduler
        clear = functools.partial(self._client.clear, self.scheduler.begin_reset())
        done = self._queue.run(clear)
        self.scheduler.end_reset(done)
        return done

    def reset_failed(self) -> None:
        """Serve and store nothing until a reset succeeds: vLLM's own cache was not emptied."""
        assert self.scheduler is not None
        if not self.scheduler.closed:
            self.scheduler.begin_reset()
            self.scheduler.end_reset(False)
