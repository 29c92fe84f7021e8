# SPDX-License-Identifier: Apache-2.0
"""Makes the scheduler side of a connector, and logs what it serves."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.config.drafts import why_hits_are_shorter
from lmcache_hybrid.config.no_hits import relative, with_few_hits, without_hits
from lmcache_hybrid.config.options import Options, log_events, log_remarks, log_sharing
from lmcache_hybrid.config.parallel import local_ranks
from lmcache_hybrid.config.stores import in_the_clear
from lmcache_hybrid.config.stores.base import folders_in
from lmcache_hybrid.config.tiers import described, prompt_bytes, tiers
from lmcache_hybrid.config.tight_memory import (
    folders_in_memory,
    limits_above_disks,
    taken_beside,
    tight_memory,
)
from lmcache_hybrid.core.groups import GroupPlan, page_bytes, suggested_unit
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.load_policy import policy_for
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.pin_limit import Pins
from lmcache_hybrid.scheduler.scheduler import HybridScheduler
from lmcache_hybrid.scheduler.shared_prefills import step_tokens_of
from lmcache_hybrid.scheduler.step_ends import Drafter
from lmcache_hybrid.scheduler.waits import IdleSteps

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.lmcache_hybrid.connector")


def make_scheduler(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    plan: GroupPlan,
    unit: int,
    config: "LMCacheEngineConfig",
    options: Options,
    queue: LookupQueue,
) -> HybridScheduler:
    """Make an engine's scheduler side, and log what it serves.

    Args:
        unit: tokens per entry of ``request.block_hashes``.
        config: LMCache's, settled for this engine.
        queue: asks the ranks.
    """
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    sizes = {i: page_bytes(groups[i]) * plan.blocks_per_record(i) for i in plan.groups}
    drafter = Drafter.of(vllm_config)
    scheduler = HybridScheduler(
        plan,
        options,
        unit,
        queue,
        policy_for(options.load_policy, plan, sizes),
        KVEvents(plan, groups, parallel.world_size, drafter.look_ahead) if options.events else None,
        Pins(plan, sizes, config.max_local_cpu_size if config.local_cpu else None),
    )
    scheduler.store_watch.in_ram = bool(config.local_cpu)
    scheduler.idle_steps = IdleSteps.of(parallel)
    scheduler.drafter = drafter
    if options.share_prefills:
        scheduler.prefills.step_tokens = step_tokens_of(vllm_config.scheduler_config)
    _warn(vllm_config, plan, config, options)
    _log(vllm_config, plan, config, options, sizes, drafter)
    return scheduler


def _warn(
    vllm_config: "VllmConfig", plan: GroupPlan, config: "LMCacheEngineConfig", options: Options
) -> None:
    """Warn of settings that do nothing, or let others read the prompts."""
    for url in in_the_clear(config):
        logger.warning(
            "Records go to %s unencrypted, and they are the prompts: use TLS or a network of "
            "its own, see docs/security.md.",
            url,
        )
    log_events(vllm_config, config)
    log_sharing(vllm_config, options)
    log_remarks(vllm_config)
    for sentence in with_few_hits(config):
        logger.warning("%s", sentence)
    ranks = local_ranks(vllm_config)
    for sentence in (
        *tight_memory(config, ranks, *taken_beside(vllm_config, ranks)),
        *folders_in_memory(config, ranks, options.folder_limits.max_bytes),
        *limits_above_disks(config, options.folder_limits.max_bytes),
    ):
        logger.warning("%s", sentence)
    if vllm_config.aux_output_config.enabled:
        logger.warning(
            "enable_return_routed_experts=True lets vLLM load only what this process has computed "
            "itself, as far as it still has its experts: nothing of a restart or of another "
            "engine is hit. Remove --enable-return-routed-experts for that."
        )
    for folder in folders_in("local_disk", config.local_disk) if config.local_disk else ():
        if told := relative("local_disk", folder):
            logger.warning("%s; write the whole path.", told)
    finer = suggested_unit(plan.state_tokens) if plan.with_unit(1).unit else 0
    model = vllm_config.model_config
    longest, generates = model.max_model_len, model.runner_type == "generate"
    role = vllm_config.kv_transfer_config.kv_role
    unit, most = plan.unit or plan.block_size, options.max_tokens_per_load
    for sentence in without_hits(config, role, longest, unit, finer, most, generates):
        logger.warning("LMCache will not serve hits: %s", sentence)


def _log(
    vllm_config: "VllmConfig",
    plan: GroupPlan,
    config: "LMCacheEngineConfig",
    options: Options,
    sizes: dict[int, int],
    drafter: Drafter,
) -> None:
    """Log which groups are served, where records are kept and which prompts hit.

    Args:
        sizes: bytes of a record's pages on a rank, by group.
    """
    logger.info(
        "LMCache serves hybrid groups: blocks of %d tokens, attention groups %s, "
        "window groups %s, state groups %s.",
        plan.block_size,
        plan.attention,
        tuple(window.group for window in plan.windows),
        plan.states,
    )
    longest = vllm_config.model_config.max_model_len
    attention, states = (
        sum(sizes[group] for group in groups) for groups in (plan.attention, plan.states)
    )
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    taken = prompt_bytes(
        *(options, longest, step_tokens, plan.block_size, plan.unit, attention, states),
        plan.chunk_unit,
    )
    ranks = vllm_config.parallel_config.tensor_parallel_size
    unit = plan.unit or plan.block_size
    too_short = -(-max(0, options.min_retrieve_tokens - unit) // unit) * unit
    logger.info(
        "LMCache keeps records in %s. Prompts longer than %d tokens hit, at multiples of %d.%s",
        # The number of window pages depends on the prompts.
        described(tiers(config, options), 0 if plan.windows else taken, longest, ranks),
        (drafter.longest_without_state(unit) if plan.states else unit) + too_short,
        unit,
        "" if options.save else " This engine stores nothing.",
    )
    if plan.states and (sentence := why_hits_are_shorter(vllm_config, unit)):
        logger.info("%s", sentence)
