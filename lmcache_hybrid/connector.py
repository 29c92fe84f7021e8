# SPDX-License-Identifier: Apache-2.0
"""Connects scheduler side and worker side to vLLM's connector interface."""

import dataclasses
import functools
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

from lmcache_hybrid.config.check import checked_options
from lmcache_hybrid.config.folders import settle_disk_folder
from lmcache_hybrid.config.lmcache_config import load_lmcache_config, settle_lmcache_config
from lmcache_hybrid.config.options import Options
from lmcache_hybrid.config.parallel import (
    check_parallelism,
    check_prefix_cache,
    spans_hosts,
)
from lmcache_hybrid.config.tight_memory import scarce_memory
from lmcache_hybrid.core.by_ray import placed_by_ray
from lmcache_hybrid.core.errors import ConfigError, UnknownContentError
from lmcache_hybrid.core.faults import caught, guarded
from lmcache_hybrid.core.groups import plan_groups
from lmcache_hybrid.core.threads import before_the_process_ends
from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.metrics import HybridStats, counts_of
from lmcache_hybrid.protocol.failed_loads import SlowLoads
from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata
from lmcache_hybrid.protocol.record_reports import RankReports
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.scheduler import HybridScheduler
from lmcache_hybrid.scheduler_side import make_scheduler
from lmcache_hybrid.storage.folder.cleaner import FolderCleaner
from lmcache_hybrid.storage.hosts import Introduction
from lmcache_hybrid.storage.open_store import close_engine, open_backends
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.rpc import LookupClient, LookupServer
from lmcache_hybrid.storage.weights_guard import GuardedLookup, WeightsGuard
from lmcache_hybrid.worker.fingerprint import fingerprints, tell_ranks
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.worker import HybridWorker
from lmcache_hybrid.worker_side import clean_folders, make_worker, map_pages

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_hybrid.core.counts import Ledger
    from lmcache_hybrid.scheduler.save_planner import Offer
    from lmcache_hybrid.upstream.lmcache_home import LMCacheManager

logger = init_logger("vllm.lmcache_hybrid.connector")


def _nothing(connector: "HybridConnector") -> Any:
    return None


class HybridConnector(KVConnectorBase_V1):
    """LMCache for a model with state groups, or with windows beside full attention.

    One object per role and process, of a class that :func:`vllm_patch.connector.hybrid_class`
    makes of this one and vLLM's ``LMCacheConnectorV1``.

    No error leaves it once the engine has started: errors of stores and folders become misses,
    dropped saves or failed loads (:mod:`lmcache_hybrid.core.faults`). At start-up an error stops
    the engine, or switches one side off, which then serves nothing but still answers.

    Attributes:
        kv_cache_config: vLLM's, groups included.
        plan: the model's groups.
        scheduler: set in the scheduler role; None there where it is off.
        worker: set in the worker role once the KV cache is registered and the
            store is up; None means that this rank computes everything.
        kv_caches: by layer, for LMCache's API server; empty while vLLM sleeps.

    vLLM calls the scheduler role on its scheduler's thread and the worker role on the thread
    that runs the model. Lookups come in on a thread of :class:`LookupServer`.
    """

    _events: KVEvents | None = None
    _client: LookupClient | None = None
    _server: LookupServer | None = None
    _introduction: Introduction | None = None
    _hosts = False  # whether the ranks are on several
    _problem: str | None = None  # why this side is off
    _ended = False
    scheduler: HybridScheduler | None = None
    worker: HybridWorker | None = None

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Read and check the configuration, start this role's services.

        Raises:
            ConfigError: the configuration cannot be served; the engine must not start.
        """
        try:
            self._start(vllm_config, role, kv_cache_config)
        except Exception as error:
            if role == KVConnectorRole.WORKER:
                # The other ranks wait for this one in register_kv_caches.
                tell_ranks(vllm_config, f"it does not start: {error}")
            raise

    def _start(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.kv_cache_config = kv_cache_config
        check_parallelism(vllm_config)
        check_prefix_cache(vllm_config)
        # Each engine has one scheduler role, which warns.
        config = load_lmcache_config(vllm_config, quiet=role == KVConnectorRole.WORKER)
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        plan = plan_groups(kv_cache_config, dcp)
        _, unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self.plan = dataclasses.replace(
            plan.with_unit(unit),
            whole_items=vllm_config.model_config.is_mm_prefix_lm,
        )
        self._attention_group = plan.attention[0]
        self._options = options = checked_options(vllm_config, config, self.plan.block_size)
        settle_lmcache_config(config, self.plan.block_size)
        self._metadata: ConnectorMetadata = NOTHING
        self._queue: LookupQueue | None = None
        self._cleaners: list[FolderCleaner] = []
        self._manager: LMCacheManager | None = None
        self._guard = WeightsGuard()
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._registered = self.kv_caches
        parallel = vllm_config.parallel_config
        settle_disk_folder(config, parallel)
        self._hosts = spans_hosts(parallel)
        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # the engine lives in the user's script
            shutdown = weakref.WeakMethod(self.shutdown)
            before_the_process_ends(lambda: (shutdown() or int)())
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._start_scheduler(config, options, unit)
            else:
                ADAPTERS.rank, ADAPTERS.ranks = parallel.rank, parallel.world_size
                ADAPTERS.stages = parallel.pipeline_parallel_size
                self._server = LookupServer(vllm_config)
            self._manager = self._start_lmcache(config, role.name.lower())
        except ConfigError:
            raise
        except Exception as error:
            self._switch_off(error)

    @property
    def requires_kv_delivery(self) -> bool:
        # A dropped save only costs a later miss.
        return False

    @property
    def ledger(self) -> "Ledger[Any] | None":
        """The ledger of this side; None while it is off."""
        side = self.scheduler or self.worker
        return side.ledger if side is not None else None

    @guarded("its counts come with those of the next step", _nothing)
    def get_kv_connector_stats(self) -> HybridStats | None:
        """Return what this side counted since the last call; None for nothing."""
        if self.worker is not None:
            self.worker.count_kept()
        news = self.ledger.report() if self.ledger is not None else None
        return HybridStats(news) if news else None

    # Start-up

    def _switch_off(self, error: Exception) -> None:
        """Serve nothing on this side, which could not start, and log why."""
        known = isinstance(error, UnknownContentError)
        self._problem = str(error) if known else f"it could not start: {error!r}"
        worker, self.scheduler, self.worker = self.worker, None, None
        off = "LMCache is off on this rank, which computes every prompt"
        if known:
            logger.warning("%s, because %s.", off, error)
        else:
            caught("start", error, off)
        if worker is not None:
            try:
                worker.shutdown()
            except Exception as second:
                logger.debug("%r", second, exc_info=True)

    def _start_scheduler(self, config: "LMCacheEngineConfig", options: Options, unit: int) -> None:
        timeout_ms = config.lookup_timeout_ms
        self._client = LookupClient(self._vllm_config, timeout_ms)
        self._queue = LookupQueue(
            self._client.ask,
            timeout_ms,
            contents=self._client.contents,
            drop=self._client.drop,
            keep=self._client.keep,
        )
        self.scheduler = make_scheduler(
            self._vllm_config, self.kv_cache_config, self.plan, unit, config, options, self._queue
        )
        self._events = self.scheduler.events

    def _start_lmcache(self, config: "LMCacheEngineConfig", role: str) -> "LMCacheManager":
        from lmcache_hybrid.storage.service_factory import start_lmcache

        return start_lmcache(config, self._vllm_config, self.kv_cache_config, self.plan, role, self)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Map the pages, open the store, and answer lookups from now on.

        A collective call that every rank makes: a rank that fails tells the others.

        Raises:
            ConfigError: the KV cache cannot be served; the engine must not start.
        """
        if self._registered:
            # vLLM keeps one connector for all engines of a process.
            raise ConfigError(
                "LMCacheConnectorV1 serves one engine of a process, and another one has registered "
                "its KV cache; end that engine first (llm.llm_engine.engine_core.shutdown()), or "
                "unset VLLM_ENABLE_V1_MULTIPROCESSING for a process each."
            )
        self.kv_caches = self._registered = kv_caches
        pages: dict[int, GroupPages] = {}
        refusal: ConfigError | None = None
        problem = self._problem
        try:
            config = self._manager and self._manager.config
            pages = map_pages(
                self._vllm_config, self.kv_cache_config, self.plan, kv_caches, config, self._options
            )
        except Exception as error:
            refusal = error if isinstance(error, ConfigError) else None
            problem = problem or f"its KV cache cannot be mapped: {error!r}"
        self._warn_of_scarce_memory()
        try:
            # Collective, so it comes before anything that may fail on one rank.
            name, replicas = fingerprints(self._vllm_config, self.plan, pages, problem)
            if self._server is not None:  # on all ranks: none has a problem
                self._introduction = self._server.introduce()
            if refusal is None:
                self._open(pages, name, replicas)
        except Exception as error:
            if refusal is None and isinstance(error, ConfigError):
                raise
            if refusal is None and self._problem is None:
                self._switch_off(error)
        if refusal is not None:
            raise refusal

    def _warn_of_scarce_memory(self) -> None:
        """Warn where pinned pools do not fit; the first rank of a host speaks for its others."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu() or self._manager is None:
            return
        parallel = self._vllm_config.parallel_config
        here = 1 if placed_by_ray(parallel) else parallel.local_world_size
        if parallel.rank % here == 0:
            for sentence in scarce_memory(self._manager.config, here):
                logger.warning("%s", sentence)

    def get_handshake_metadata(self) -> Introduction | None:
        """Return what the scheduler needs to ask ranks on several hosts, on rank 0."""
        return self._introduction

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Connect to the ranks, from now on they are asked."""
        for introduction in metadata.values():
            if isinstance(introduction, Introduction) and self._client is not None:
                try:
                    self._client.connect(introduction)
                except Exception as error:
                    self._switch_off(error)

    def _open(self, pages: dict[int, GroupPages], name: bytes, replicas: Replicas | None) -> None:
        """Start LMCache's backends on this rank, and serve."""
        assert self._manager is not None
        config = self._manager.config
        options, device = self._options, next(iter(self.kv_caches.values())).device
        engine = open_backends(self._manager)
        if engine is None:
            return
        assert self._server is not None
        worker, lookup = make_worker(
            engine, self._vllm_config, self.plan, pages, options, device, name, replicas
        )
        self.worker, self._guard = worker, WeightsGuard()
        self._cleaners = clean_folders(config, options, worker.ledger)
        # Last: from now on this rank makes promises.
        guarded_lookup = GuardedLookup(lookup, self._guard)
        self._server.serve(guarded_lookup, self._reset, worker.ledger, worker.drop, worker.keep)

    def _unmap(self) -> None:
        if self.worker is not None:
            self.worker.unmap()

    @guarded("LMCache loads and stores nothing on this rank until it wakes up", _unmap)
    def unregister_kv_caches(self) -> None:
        """Stop using the KV cache: vLLM is about to free its memory (sleep mode). Idempotent."""
        self.kv_caches = {}
        if self.worker is not None:
            self.worker.suspend()

    @guarded("LMCache loads and stores nothing on this rank any more", _unmap)
    def restore_kv_caches(self) -> None:
        """Use the KV cache again: vLLM has reallocated its memory. Idempotent."""
        self.kv_caches = self._registered
        if self.worker is None:
            return
        try:
            self.worker.resume(self.kv_caches)
        except ConfigError as error:
            logger.error("LMCache loads and stores nothing on this rank any more: %s", error)

    def _reset(self, epoch: int) -> None:
        """Forget all that this rank stored. Runs on the thread that answers lookups."""
        assert self.worker is not None
        self.worker.reset(epoch)
        # Last: a step in flight must not be stored under the old weights' name.
        self._guard.reset()

    def shutdown(self) -> None:
        """Stop threads, flush and close LMCache's backends. Idempotent."""
        if self._ended:
            return
        self._ended = True
        services = (*self._cleaners, self._server, self._queue, self._client)
        ends = [service.close for service in services if service is not None]
        if self.worker is not None:
            ends.append(self.worker.shutdown)
        if self._manager is not None:
            close = functools.partial(close_engine, self._manager)
            ends += (self._manager.stop_services, close)
        for end in ends:
            try:
                end()
            except Exception as error:
                caught("shutdown", error, "a part of LMCache was not ended", self.ledger)

    # Worker side

    def _refuse_loads(self, metadata: ConnectorMetadata) -> None:
        if self.worker is not None:
            self.worker.refuse_loads(metadata)

    @guarded("loads of this step are computed", _refuse_loads)
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        if self._hosts:
            metadata = metadata.on_this_clock()
        KVConnectorBase_V1.bind_connector_metadata(self, metadata)
        # Stays after the step; vLLM clears its own.
        self._metadata = metadata
        self._handled = sys.exc_info()[1]  # by who called the engine, which is no failure of it
        if self.worker is not None:
            # With asynchronous loads vLLM calls start_load_kv after the forward, to keep its cost
            # off the critical path. Here it costs next to nothing, and a load that runs beside
            # the forward is reported a whole step earlier.
            self.worker.start_loads(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None and not self._metadata.idle:
            self._guard.computing()

    def _skip_saves(self) -> None:
        if self.worker is not None:
            self.worker.skip_saves(self._metadata)

    # The exception that was being handled when the step began.
    _handled: BaseException | None = None

    @guarded("what the step computed is not stored", _skip_saves)
    def wait_for_save(self) -> None:
        if sys.exc_info()[1] not in (None, self._handled):
            # The V1 runner calls this for a step that failed, too: its blocks hold anything.
            self._skip_saves()
        elif self.worker is not None and self._guard.stands():
            self.worker.save(self._metadata)
        else:  # the other ranks wait for this one
            ADAPTERS.all_hold([save.prefix.adapter for save in self._metadata.saves])

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def _ended_only(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report what needs no worker: ended requests, and loads that cannot run."""
        failed = set(self._metadata.unloadable)
        if self.worker is None:
            failed.update(load.request_id for load in self._metadata.loads)
        return KVConnectorTransferResults(
            finished_sending=set(self._metadata.ended),
            finished_recving=failed,
            failed_recving=set(failed),
        )

    @guarded("loads that ended are reported with the next step", _ended_only)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._ended_only(finished_req_ids)
        if self.worker is None:
            return results
        loads = self.worker.results(finished_req_ids, self._metadata.waits)
        if not self._guard.stands():
            self.worker.fail(loads)
        results.finished_recving.update(loads.finished_recving)
        results.failed_recving.update(loads.failed_recving)
        return results

    @guarded("why loads failed is not known", _nothing)
    def build_connector_worker_meta(self) -> SlowLoads | None:
        return self.worker.failed_loads() if self.worker is not None else None

    @guarded("KV cache events may miss what changed in a store", _nothing)
    def get_kv_connector_kv_cache_events(self) -> RankReports | None:
        report = self.worker.report(self._guard.stands) if self.worker is not None else None
        return RankReports([report]) if report else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        if self.scheduler is not None:
            self.scheduler.bind(gpu_block_pool)

    def _compute(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler is not None:
            self.scheduler.give_up(request.request_id)
        return 0, False

    @guarded("its prompt is computed", _compute)
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def _fail_load(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self.scheduler is not None:
            self.scheduler.give_up(request.request_id, waits=num_external_tokens > 0)

    @guarded("its prompt is computed", _fail_load)
    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(
                request, blocks.get_block_ids(), num_external_tokens
            )

    def _send_what_is_ready(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        if self.scheduler is None:
            return NOTHING
        return self.scheduler.send(scheduler_output, [])

    @guarded("what the step computes is not stored", _send_what_is_ready)
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        if self.scheduler is None:
            return NOTHING
        return self.scheduler.build_connector_meta(scheduler_output)

    def _end_loads(self, output: "KVConnectorOutput") -> None:
        if self.scheduler is not None:
            self.scheduler.end_loads(output)

    @guarded("what ranks said of this step is lost, but for the ends of loads", _end_loads)
    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        if self.scheduler is not None:
            self.scheduler.update_connector_output(output)
            if counts := counts_of(output.kv_connector_stats):
                self.scheduler.store_watch.reported(counts)

    def _leave_tail(
        self, request: "Request", block_ids: tuple[list[int], ...], offers: Sequence["Offer"]
    ) -> bool:
        if self.scheduler is not None:
            self.scheduler.leave_tail(request.request_id)
        return False

    @guarded("its last state is not stored", _leave_tail)
    def register_finished_partial_tail(
        self, request: "Request", block_ids: tuple[list[int], ...], offers: Sequence["Offer"]
    ) -> bool:
        if self.scheduler is None:
            return False
        return self.scheduler.register_finished_partial_tail(request, block_ids, offers)

    def _free_blocks(self, request: "Request", block_ids: list[int]) -> Any:
        return False, None

    @guarded("a part of its books stays", _free_blocks)
    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is None:
            return False, None
        return False, self.scheduler.request_finished(request)

    @guarded("KV cache events of this step are lost", lambda self: [])
    def take_events(self) -> "list[KVCacheEvent]":
        return self._events.drain() if self._events else []

    @guarded(
        "no step is made for KV cache events, nor for loads during a pause", lambda self: False
    )
    def has_pending_push_work(self) -> bool:
        """Whether vLLM must make steps although no request can run.

        For KV cache events, and for loads: a pause with ``mode=keep`` must find none.
        """
        if self._events is not None and self._events.pending:
            return True
        return self.scheduler is not None and self.scheduler.loads_in_flight

    @guarded("KV cache events may leave out what LMCache holds", _nothing)
    def cleared(self) -> None:
        """Announce everything again: vLLM's own cache was reset, see :mod:`vllm_patch.events`."""
        if self._events is not None:
            self._events.cleared()

    def _stay_closed(self) -> bool:
        if self.scheduler is not None:
            self.scheduler.end_reset(False)
        return False

    @guarded("the reset fails", _stay_closed)
    def reset_cache(self) -> bool:
        """Forget all that was stored, on every rank; False when a rank did not confirm it."""
        if self.scheduler is None:
            return True  # nothing is served and stored
        assert self._queue is not None and self._client is not None
        clear = functools.partial(self._client.clear, self.scheduler.begin_reset())
        done = self._queue.run(clear)
        self.scheduler.end_reset(done)
        return done

    @guarded("nothing is served until a reset succeeds", _stay_closed)
    def reset_failed(self) -> bool:
        """Serve and store nothing until a reset succeeds: vLLM's own cache was not reset."""
        if self.scheduler is not None and not self.scheduler.closed:
            self.scheduler.begin_reset()
            self.scheduler.end_reset(False)
        return False
