# SPDX-License-Identifier: Apache-2.0
"""Selects vLLM's settings that enter the fingerprint.

Every field of the sections named here enters unless it is listed with a reason, so a setting
that a new release adds enters by default.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Reasons why a field does not count.
_LAYER = "what became of it is read off the layers and their pages"
_SUMS = "changes the order of sums only, as batches do"
_SPEED = "changes when something is done, not what"
_ROOM = "how much there is of it"
_BLOCKS = "part of the plan, or of vLLM's block hashes"

NOT_COUNTED: Mapping[str, Mapping[str, str]] = {
    "attention_config": {
        "backend": _LAYER,
        "backend_per_kind": _LAYER,
        "flash_attn_max_num_splits_for_cuda_graph": _SUMS,
        "tokenspeed_mla_min_split_kv": _SUMS,
        "tq_max_kv_splits_for_cuda_graph": _SUMS,
        "sparse_mla_prefill_workspace_factor": _ROOM,
        "indexer_tp_shard_min_rows": "which rank scores a row, not how",
        "flex_attn_block_m": _SUMS,
        "flex_attn_block_n": _SUMS,
        "flex_attn_q_block_size": _SUMS,
        "flex_attn_kv_block_size": _SUMS,
    },
    "kernel_config": {
        "ir_op_priority": _SUMS,
        "enable_flashinfer_autotune": _SUMS,
        "enable_rocm_segmented_attn_autotune": _SUMS,
        "enable_cutedsl_warmup": _SPEED,
        "enable_jit_warmup": _SPEED,
    },
    "mamba_config": {"ssu_algorithm": _SUMS},
    "cache_config": {
        "block_size": _BLOCKS,
        "user_specified_block_size": _BLOCKS,
        "prefix_match_unit": _BLOCKS,
        "gpu_memory_utilization": _ROOM,
        "is_attention_free": _LAYER,
        "num_gpu_blocks_override": _ROOM,
        "enable_prefix_caching": _SPEED,
        "prefix_caching_hash_algo": _BLOCKS,
        "prefix_cache_retention_interval": _ROOM,
        "kv_cache_dtype_skip_layers": _LAYER,
        "mamba_page_size_padded": _LAYER,
        "skip_page_size_padded": _LAYER,
        "mamba_block_size": _BLOCKS,
        "mamba_cache_dtype": _LAYER,
        "mamba_ssm_cache_dtype": _LAYER,
        "mamba_cache_mode": _BLOCKS,
        "enable_mamba_shared_prefix_checkpoint": _BLOCKS,
        "replayssm_buffer_len": "counts where use_replayssm does",
        "num_gpu_blocks": _ROOM,
        "num_cpu_blocks": _ROOM,
        "simple_cpu_offload_num_blocks": _ROOM,
        "effective_attention_block_size": _BLOCKS,
        "kv_cache_size_tokens": _ROOM,
        "kv_cache_max_concurrency": _ROOM,
        "hash_block_size": _BLOCKS,
        "cache_hit_alignment_tokens": _BLOCKS,
        "kv_cache_memory_bytes": _ROOM,
        "kv_offloading_size": _ROOM,
        "kv_offloading_backend": _ROOM,
        "_block_size_resolved": _BLOCKS,
    },
}


def counted(vllm_config: Any) -> dict[str, dict[str, Any]]:
    """Return the settings that count, by section and name."""
    return {
        section: {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if field.name not in excluded
        }
        for section, excluded in NOT_COUNTED.items()
        if (config := getattr(vllm_config, section)) is not None
    }
