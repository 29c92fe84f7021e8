# SPDX-License-Identifier: Apache-2.0
"""Makes the worker side of a connector: maps a rank's pages and opens its store."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.config.store_sizes import check_folder_limit, check_sizes
from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan, page_bytes
from lmcache_hybrid.core.lmcache_stats import LMCacheMonitor
from lmcache_hybrid.storage.folder.cleaner import FolderCleaner, start_cleaners
from lmcache_hybrid.storage.open_store import open_store
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.residency import Residency
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.scales import reset_scales
from lmcache_hybrid.worker.worker import HybridWorker

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine


def map_pages(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    plan: GroupPlan,
    kv_caches: dict[str, torch.Tensor],
    config: "LMCacheEngineConfig | None",
    options: Options,
) -> dict[int, GroupPages]:
    """Map the pages of every group.

    Args:
        kv_caches: by layer.
        config: LMCache's; None where LMCache did not start, and no store is checked.

    Raises:
        ConfigError: they cannot be stored.
    """
    groups, num_blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    count = plan.blocks_per_record
    pages = {
        index: GroupPages(groups[index].layer_names, kv_caches, num_blocks, count(index))
        for index in plan.groups
    }
    for index, group in pages.items():
        wanted = page_bytes(groups[index], group.layers) * group.count
        if group.block_bytes != wanted:
            raise ConfigError(
                f"blocks of KV cache group {index} have {group.block_bytes} bytes instead of "
                f"the {wanted} of their specs; choose another --attention-backend."
            )
    context = vllm_config.compilation_config.static_forward_context
    reset_scales(kv_cache_config, kv_caches, context)
    if config is not None:
        sizes = [group.block_bytes for group in pages.values()]
        check_sizes(config, max(sizes), sum(sizes), len(sizes))
        check_folder_limit(options, sum(sizes), len(sizes))
    return pages


def make_worker(
    engine: "LMCacheEngine",
    vllm_config: "VllmConfig",
    plan: GroupPlan,
    pages: dict[int, GroupPages],
    options: Options,
    device: torch.device,
    name: bytes,
    replicas: Replicas | None,
) -> tuple[HybridWorker, RankLookup]:
    """Make a rank's worker side, and what answers lookups there.

    Args:
        engine: LMCache's, whose backends are open.
        device: where the KV cache lies.
        name: this rank's fingerprint.
        replicas: groups that other ranks also hold.
    """
    from lmcache_hybrid.storage.host_memory import report_pool

    with ExitStack() as undo:
        residency = None
        if options.events:
            residency = Residency(vllm_config.parallel_config.rank)
            undo.callback(residency.close)
        store = open_store(
            engine,
            vllm_config.model_config.model,
            name,
            replicas,
            max(group.block_bytes for group in pages.values()),
            options.digester,
            residency,
        )
        undo.callback(store.close)
        monitor = LMCacheMonitor(engine.stats_monitor)
        lookup = RankLookup(plan, store, monitor)
        worker = HybridWorker(
            plan, pages, store, lookup, device, monitor=monitor, residency=residency
        )
        undo.pop_all()
        undo.callback(worker.shutdown)
        report_pool(engine.storage_manager.local_cpu_backend, device)
        undo.pop_all()
    return worker, lookup


def clean_folders(
    config: "LMCacheEngineConfig", options: Options, ledger: Ledger[WorkerCounts]
) -> list[FolderCleaner]:
    """Start the cleaners of this engine's folders; none where they do not start."""
    try:
        return start_cleaners(config, options.folder_limits, ledger)
    except Exception as error:
        caught("start_cleaner", error, "this engine deletes no old records", ledger)
        return []
