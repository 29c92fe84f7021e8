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
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (
    LMCacheConnectorV1 as UpstreamConnector,
)

from lmcache_hybrid.core.groups import is_served
from lmcache_hybrid.upstream import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def install() -> None:
    """Replace the class in vLLM's own module, where the factory and users find it.

    Raises:
        RuntimeError: the factory does not find it there; vLLM's own class is restored.
    """
    upstream.LMCacheConnectorV1 = LMCacheConnectorV1
    loaded = KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1")
    if loaded is not LMCacheConnectorV1:
        upstream.LMCacheConnectorV1 = UpstreamConnector
        raise RuntimeError(f"KVConnectorFactory still loads {loaded}: its registry has changed")


class LMCacheConnectorV1(UpstreamConnector, SupportsHMA):
    """vLLM's LMCache connector, which also serves hybrid models.

    One object per role and process. For a hybrid model it is of a subclass with the methods of
    :class:`lmcache_hybrid.connector.HybridConnector`; for any other model its methods are vLLM's.

    Attributes:
        kv_cache_config: vLLM's KV cache configuration, groups included.
    """

    _attention_group = 0  # the group whose blocks request_finished gets

    def __new__(
        cls, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> "LMCacheConnectorV1":
        """Choose the class by the model's KV cache groups.

        Raises:
            ValueError: an untested release has other signatures than this package needs.
        """
        if not is_served(kv_cache_config):
            return object.__new__(cls)
        if (problem := versions.changed()) is not None:
            raise ValueError(f"LMCacheConnectorV1 cannot serve this model: {problem}")
        return object.__new__(hybrid_class(cls))

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        self.kv_cache_config = kv_cache_config
        super().__init__(vllm_config, role, kv_cache_config)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forward the selected attention group's blocks."""
        return self.request_finished(request, block_ids[self._attention_group])

    # vLLM also calls these on the class, in the process that serves ``/metrics``.

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """Wrap the ``data`` of a hybrid model's connector; LMCache's own sends none to vLLM."""
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
        """Register our metrics if the hybrid KV cache manager is on: groups are unknown here."""
        from lmcache_hybrid.metrics import HybridPromMetrics

        served = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        build = HybridPromMetrics if served else super().build_prom_metrics
        return build(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def hybrid_class(base: type[LMCacheConnectorV1] = LMCacheConnectorV1) -> type[LMCacheConnectorV1]:
    """Make a hybrid model's connector class. MultiConnector finds its statistics by the name.

    Raises:
        ValueError: vLLM's class has a method that would ask LMCache's own adapter.
    """
    from lmcache_hybrid.connector import HybridConnector

    methods = (name for name, value in vars(UpstreamConnector).items() if callable(value))
    ours, bases = HybridConnector, KVConnectorBase_V1
    if unknown := [m for m in methods if getattr(ours, m, None) is getattr(bases, m, None)]:
        raise ValueError(
            f"LMCacheConnectorV1 cannot serve this model: this vLLM calls its {unknown[0]}(), of "
            f"which this release knows nothing; run `{versions.command()}`."
        )
    return type(base.__name__, (HybridConnector, base), {"__module__": __name__})
