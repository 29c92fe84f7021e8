# SPDX-License-Identifier: Apache-2.0
"""``LMCacheConnectorV1`` with ``SupportsHMA``.

A model with state groups, or with window groups beside full attention, goes to
:class:`lmcache_hybrid.connector.HybridConnector`; every other model goes to LMCache's
own adapter through vLLM's unchanged class.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (
    LMCacheConnectorV1 as UpstreamConnector,
)
from vllm.logger import init_logger

from lmcache_hybrid.core.groups import is_served
from lmcache_hybrid.upstream import versions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_hybrid.connector import HybridConnector

logger = init_logger("vllm.lmcache_hybrid.connector")


def install() -> None:
    """Replace the class in vLLM's own module, where the factory and users find it.

    Raises:
        RuntimeError: the factory does not find it there. vLLM's own class is back in place.
    """
    upstream.LMCacheConnectorV1 = LMCacheConnectorV1
    loaded = KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1")
    if loaded is not LMCacheConnectorV1:
        upstream.LMCacheConnectorV1 = UpstreamConnector
        raise RuntimeError(f"KVConnectorFactory still loads {loaded}: its registry has changed")


class LMCacheConnectorV1(UpstreamConnector, SupportsHMA):
    """vLLM's LMCache connector, which serves hybrid models too.

    One object per role and process. Calls of a hybrid model go to its ``_hybrid``, all others
    to vLLM's class. Scheduler side and worker side are called by one thread each.

    Attributes:
        kv_cache_config: vLLM's KV cache configuration, groups included.
    """

    _hybrid: "HybridConnector | None"

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self._hybrid = None
        self._attention_group = 0
        if not is_served(kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
            return
        if (problem := versions.changed()) is not None:
            raise ValueError(f"LMCacheConnectorV1 cannot serve this model: {problem}")
        from lmcache_hybrid.connector import HybridConnector

        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._kv_cache_events = None
        self._hybrid = HybridConnector(vllm_config, role, kv_cache_config)
        self._attention_group = self._hybrid.plan.selected_attention
        # vLLM's class delegates to this name; the hybrid adapter answers the same calls.
        self._lmcache_engine = self._hybrid

    @property
    def requires_kv_delivery(self) -> bool:
        # A save that is dropped costs a later miss, no more.
        return False if self._hybrid else super().requires_kv_delivery

    # Metrics

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        if self._hybrid is None:
            return super().get_kv_connector_stats()
        return self._hybrid.get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """Only the hybrid adapter sends ``data``: LMCache's own has no stats for vLLM."""
        from lmcache_hybrid.metrics import HybridStats

        return super().build_kv_connector_stats() if data is None else HybridStats(dict(data))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """Called in the process that serves ``/metrics``, which does not know the groups."""
        from lmcache_hybrid.metrics import HybridPromMetrics

        served = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        build = HybridPromMetrics if served else super().build_prom_metrics
        return build(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker side

    def unregister_kv_caches(self) -> None:
        """Let go of the KV cache, which is about to be freed.

        vLLM 0.33 calls this, for vLLM 0.32 :mod:`vllm_patch.sleep` does.
        """
        if self._hybrid is None:
            super().unregister_kv_caches()
        else:
            self._hybrid.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        if self._hybrid is None:
            super().restore_kv_caches()
        else:
            self._hybrid.restore_kv_caches()

    def bind_connector_metadata(self, connector_metadata: "KVConnectorMetadata") -> None:
        if self._hybrid is None:
            super().bind_connector_metadata(connector_metadata)
            return
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
        self._hybrid.bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._hybrid is None:
            return super().get_transfer_results(finished_req_ids)
        return self._hybrid.get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        """vLLM calls it after :meth:`get_transfer_results`."""
        if self._hybrid is None:
            return super().build_connector_worker_meta()
        return self._hybrid.build_connector_worker_meta()

    def get_kv_connector_kv_cache_events(self) -> "KVConnectorKVEvents | None":
        if self._hybrid is None:
            return super().get_kv_connector_kv_cache_events()
        return self._hybrid.get_kv_connector_kv_cache_events()

    def shutdown(self) -> None:
        if self._hybrid is None:
            super().shutdown()
        else:
            self._hybrid.shutdown()

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._hybrid is not None and self._hybrid.scheduler is not None:
            self._hybrid.scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._hybrid is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self._hybrid.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._hybrid is None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        else:
            self._hybrid.update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._hybrid is None:
            super().update_connector_output(connector_output)
        else:
            self._hybrid.update_connector_output(connector_output)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return super().take_events() if self._hybrid is None else self._hybrid.take_events()

    def has_pending_push_work(self) -> bool:
        if self._hybrid is None:
            return super().has_pending_push_work()
        return self._hybrid.has_pending_push_work()

    def cleared(self) -> None:
        """vLLM's own cache was emptied, see :mod:`vllm_patch.events`."""
        if self._hybrid is not None:
            self._hybrid.cleared()

    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        if self._hybrid is None:
            return super().register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        return self._hybrid.register_finished_partial_tail(
            request, block_ids, partial_tail_offloads
        )

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forward the selected attention group's blocks to the adapter."""
        return self._lmcache_engine.request_finished(request, block_ids[self._attention_group])

    def reset_cache(self) -> bool | None:
        return self._hybrid.reset_cache() if self._hybrid else super().reset_cache()

    def reset_failed(self) -> None:
        """Serve and store nothing until a reset succeeds: the last one failed as a whole."""
        if self._hybrid is not None:
            self._hybrid.reset_failed()
