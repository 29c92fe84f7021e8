# SPDX-License-Identifier: Apache-2.0
"""Starts LMCache, and makes it build its engine, backends and health checks for a hybrid model."""

import dataclasses
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.utils import ENGINE_NAME
from lmcache.v1.metadata import LMCacheMetadata
from vllm.logger import init_logger

from lmcache_hybrid.core.groups import GroupPlan, layer_specs
from lmcache_hybrid.storage import api_server
from lmcache_hybrid.storage.disk import make_backend
from lmcache_hybrid.storage.host_memory import pin_exactly
from lmcache_hybrid.storage.remote import make_connector
from lmcache_hybrid.upstream.lmcache_home import (
    LMCacheEngine,
    LMCacheEngineBuilder,
    LMCacheManager,
    VllmServiceFactory,
)

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

logger = init_logger("vllm.lmcache_hybrid.storage.service_factory")


def start_lmcache(
    config: "LMCacheEngineConfig",
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    plan: GroupPlan,
    role: str,
    connector: Any,
) -> LMCacheManager:
    """Start LMCache's services of a role; :mod:`.open_store` opens a worker's backends."""
    groups = [kv_cache_config.kv_cache_groups[index] for index in plan.attention]
    factory = HybridServiceFactory(
        config,
        vllm_config,
        role,
        next(iter(layer_specs(groups[0]))),
        sum(len(group.layer_names) for group in groups),
    )
    manager = LMCacheManager(config, factory, connector=connector)
    manager.start_services()
    return manager


class HybridServiceFactory(VllmServiceFactory):
    """Builds LMCacheManager's services for a hybrid model.

    Differs from LMCache's own factory where that one assumes attention layers only: the KV
    shape, the connector that copies slots (:mod:`lmcache_hybrid.worker.worker` copies records
    instead), and the lookup by attention chunks (:mod:`lmcache_hybrid.storage.rpc` instead).
    """

    metadata: LMCacheMetadata | None

    def __init__(
        self,
        config: "LMCacheEngineConfig",
        vllm_config: "VllmConfig",
        role: str,
        attention: "AttentionSpec",
        num_attention_layers: int,
    ) -> None:
        super().__init__(config, vllm_config, role)
        self._attention = attention
        self._num_attention_layers = num_attention_layers

    def get_or_create_metadata(self) -> LMCacheMetadata | None:
        if self.metadata is None:
            # Build it as for the scheduler. For a worker LMCache computes its device, which no
            # served backend uses, and raises on all data-parallel engines but the first where vLLM
            # gives each engine its own list of devices, as on CPU: it adds the other engines'
            # devices again.
            asked = VllmServiceFactory(self.lmcache_config, self.vllm_config, "scheduler")
            # LMCache counts every layer of the model, and for MLA stores one rank's bytes for
            # all; but states are sharded, so each rank stores its own. A pipeline stage may have
            # no attention layer.
            self.metadata = dataclasses.replace(
                asked.get_or_create_metadata(),
                role=self.role,
                kv_shape=(
                    max(1, self._num_attention_layers),
                    2,
                    self.lmcache_config.chunk_size,
                    self._attention.num_kv_heads,
                    self._attention.head_size,
                ),
                use_mla=False,
            )
        return self.metadata

    def get_or_create_lmcache_engine(self) -> LMCacheEngine | None:
        if self.role == "scheduler":
            return super().get_or_create_lmcache_engine()
        pin_exactly()
        make_connector.install()
        make_backend.install(self.lmcache_config)
        self.lmcache_engine = LMCacheEngineBuilder.get_or_create(
            ENGINE_NAME,
            self.lmcache_config,
            self.get_or_create_metadata(),
            None,  # no slot copies
            lambda tensor, source: tensor,
            lambda value, source: value,
        )
        return self.lmcache_engine

    def maybe_create_lookup_client(self) -> None:
        """Create none: lookups are :mod:`.rpc`'s, and LMCache offloads by attention slots."""

    maybe_create_lookup_server = maybe_create_offload_server = maybe_create_lookup_client

    def maybe_create_internal_api_server(self, lmcache_manager: LMCacheManager) -> Any:
        try:
            server = super().maybe_create_internal_api_server(lmcache_manager)
        except Exception as error:  # LMCache would start nothing else either
            logger.warning_once(
                "LMCache's internal API server does not start (%s), and all else does. Settings "
                "of it are internal_api_server_socket_path_prefix, internal_api_server_port_start "
                "and extra_config.internal_api_server_log_level.",
                repr(error),
            )
            return None
        if server is not None:
            api_server.guard(server, lmcache_manager)
        return server
