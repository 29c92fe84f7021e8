# SPDX-License-Identifier: Apache-2.0
"""Refuses vLLM's settings with which stored bytes, or results from them, would be wrong."""

import os

from vllm.config import VllmConfig


def refuse(config: VllmConfig) -> None:
    """Refuse such settings.

    Raises:
        ValueError: a sentence that names setting and fix.
    """
    from vllm.platforms import current_platform

    speculative = config.speculative_config
    if speculative is not None and current_platform.is_cpu() and config.model_config.is_hybrid:
        # States of accepted drafts are moved by a Triton kernel. Without prefix caching
        # nothing moves them, and vLLM's answers are wrong.
        raise ValueError(
            f"speculative_config with method {speculative.method!r} does not work with "
            "recurrent layers on vLLM's CPU backend; remove --speculative-config."
        )
    if (dtype := str(config.cache_config.cache_dtype)).startswith("octave"):
        # vLLM keeps these by a token's slot in the cache, where a load does not write.
        raise ValueError(
            f"kv_cache_dtype={dtype!r} keeps some keys and values beside the KV cache, where "
            "loaded blocks have none; use --kv-cache-dtype auto."
        )
    media = config.model_config.multimodal_config
    pruned = media is not None and media.is_multimodal_pruning_enabled()
    if pruned and config.model_config.uses_mrope:
        # vLLM corrects the positions behind a pruned video only when it computes the video.
        raise ValueError(
            f"video_pruning_rate={media.video_pruning_rate} leaves the text behind a video at "
            "wrong positions after a hit, with a model that has M-RoPE; remove "
            "--video-pruning-rate."
        )
    if config.weight_transfer_config is not None:
        raise ValueError(
            f"weight_transfer_config={config.weight_transfer_config!r} replaces weights while "
            "what the old ones computed stays in LMCache; remove --weight-transfer-config."
        )
    _refuse_steps(config)


def _refuse_steps(config: VllmConfig) -> None:
    """Refuse settings that go on after a step with wrong blocks, or schedule on each rank."""
    parallel = config.parallel_config
    if parallel.enable_fault_tolerance:
        # Blocks of a failed step keep their hashes, and the next request hits them.
        raise ValueError(
            "enable_fault_tolerance=True goes on with blocks that a failed step did not compute, "
            "and LMCache would share them; remove --enable-fault-tolerance."
        )
    if parallel.all2all_backend == "nixl_ep" and parallel.data_parallel_size > 1:
        raise ValueError(
            "all2all_backend='nixl_ep' reports a lost expert after a step's blocks were stored; "
            "choose another --all2all-backend."
        )
    launched = parallel.distributed_executor_backend == "external_launcher"
    if launched and (parallel.world_size > 1 or int(os.environ.get("RANK", "0"))):
        raise ValueError(
            "distributed_executor_backend='external_launcher' gives each rank a scheduler that "
            "must decide alike, and lookups end at different times on them; use 'mp' or 'ray'."
        )
    if config.aux_output_config.enabled and not _caps_hits():
        # Tokens restored by a hit have no auxiliary output; the worker crashes at the first one.
        raise ValueError(
            "aux_output_config with enable_return_routed_experts=True ends the engine at the first "
            "hit in this release of vLLM; remove --enable-return-routed-experts, or use vLLM 0.33."
        )


def _caps_hits() -> bool:
    """Whether this vLLM recomputes tokens without auxiliary output (0.33 does)."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    return hasattr(AuxOutputSchedulerConnector, "cap_external_hit")
