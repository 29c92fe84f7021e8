# SPDX-License-Identifier: Apache-2.0
"""What the product only reads in vLLM and torch, beside what :mod:`.vllm` lists."""

from tests.compat.names.resolver import Hook, attributes

_CONFIG = "vllm.config"
_SPECS = "vllm.v1.kv_cache_interface"
_MAMBA = "vllm.model_executor.layers.mamba.abstract"
_LAYER = "vllm.model_executor.layers.attention"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_BACKENDS = "vllm.v1.attention.backends"
_PLATFORM = "vllm.platforms.interface"
_STATE = "vllm.distributed.parallel_state"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
_CORE = "vllm.v1.engine.core"

# The fingerprint reads them, see lmcache_hybrid/worker/fingerprint.py.
ENVIRONMENT = (
    "VLLM_BATCH_INVARIANT VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "VLLM_CPU_INT4_W4A8 VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 "
    "VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE "
    "VLLM_DISABLED_KERNELS VLLM_FLOAT32_MATMUL_PRECISION VLLM_HUMMING_INPUT_QUANT_CONFIG "
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE "
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_ROCM_FP8_MFMA_PAGE_ATTN "
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT "
    "VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_FP4BMM "
    "VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_MOE_SITUV2 "
    "VLLM_USE_FLASHINFER_MOE_INT4 VLLM_XPU_INC_WNA16_BACKEND"
)
# Since 0.33, and what 0.32 has that 0.33 has not.
_NEWER = "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"
_OLDER = attributes("vllm.envs", "environment_variables", "VLLM_ROCM_MONO_DECODE")

READ = (
    *attributes("vllm.envs", "environment_variables", ENVIRONMENT),
    *attributes(
        "vllm.envs",
        "environment_variables",
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_RPC_BASE_PATH VLLM_USE_RUST_FRONTEND",
    ),
    # Since 0.33 there is no other executor for Ray.
    *attributes(
        "vllm.envs",
        "environment_variables",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        otherwise=(Hook("vllm.v1.executor.ray_executor_v2", "RayExecutorV2"),),
    ),
    *attributes("vllm.envs", "environment_variables", _NEWER, otherwise=tuple(_OLDER)),
    *attributes(_CONFIG, "VllmConfig", "device_config scheduler_config"),
    *attributes(_CONFIG, "CompilationConfig", "static_forward_context"),
    *attributes(_CONFIG, "KVTransferConfig", "kv_connector kv_connector_extra_config engine_id"),
    *attributes(
        _CONFIG,
        "ModelConfig",
        "architectures enforce_eager max_logprobs max_model_len get_vocab_size",
    ),
    *attributes(
        _CONFIG,
        "ParallelConfig",
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "data_parallel_index data_parallel_size nnodes_within_dp use_ray "
        "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend",
    ),
    Hook(_STATE, "get_dcp_world_size_and_rank", ()),
    *attributes(_CONFIG, "SpeculativeConfig", "method num_speculative_tokens target_model_config"),
    *attributes(_SPECS, "AttentionSpec", "num_kv_heads head_size max_tp_shards"),
    Hook(_SPECS, "KVCacheSpec.prefix_cacheable"),
    Hook(_SPECS, "KVCacheSpec.dcp_sharded"),
    *attributes(_MAMBA, "MambaBase", "get_state_shape get_state_dtype kv_cache get_attn_backend"),
    *attributes(_LAYER, "Attention", "attn_backend kv_cache kv_cache_dtype"),
    # lmcache_hybrid/worker/reviewed_backends.py
    Hook(f"{_BACKENDS}.turboquant_attn", "TurboQuantAttentionImpl._soa_store"),
    Hook(f"{_BACKENDS}.flashinfer", "FlashInferImpl.nvfp4_fa2"),
    Hook(f"{_BACKENDS}.hpc_attn", "HpcAttentionImpl.use_fp8"),
    Hook("vllm.v1.attention.backend", "AttentionImplBase.get_impl_variants"),
    Hook(_GDN, "QwenGatedDeltaNetAttention.gdn_xpu_backend", otherwise=(Hook(_GDN, "", ()),)),
    *attributes(
        f"{_BACKENDS}.cpu_attn",
        "CPUAttentionBackendImpl",
        "num_kv_heads head_size do_kv_cache_update",
    ),
    *attributes(_PLATFORM, "Platform", "_enum device_name fp8_dtype update_block_size_for_backend"),
    Hook("vllm.v1.worker.worker_base", "WorkerBase.get_supported_kv_cache_layouts", ()),
    Hook(
        _CORE,
        "get_kv_cache_configs",
        ("vllm_config", "kv_cache_specs", "available_memory"),
        otherwise=(
            Hook(
                _CORE,
                "get_kv_cache_configs",
                ("vllm_config", "kv_cache_specs", "available_memory", "global_kv_cache_groups"),
            ),
            Hook(_CORE, "get_global_kv_cache_groups", ("vllm_config", "kv_cache_specs")),
        ),
    ),
    Hook(_STATE, "init_distributed_environment"),
    Hook(_STATE, "ensure_model_parallel_initialized"),
    Hook(_STATE, "destroy_model_parallel"),
    Hook(_STATE, "destroy_distributed_environment"),
    Hook("vllm.v1.core.sched.request_queue", "SchedulingPolicy.FCFS"),
    Hook("vllm.v1.request", "RequestStatus.WAITING_FOR_REMOTE_KVS"),
    Hook("vllm.v1.request", "RequestStatus.RUNNING"),
    Hook("vllm.v1.request", "Request.prompt_embeds"),
    Hook("vllm.v1.request", "Request.kv_transfer_params"),
    Hook("vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_id"),
    # lmcache_hybrid/scheduler/save_planner.py
    *attributes("vllm.v1.core.kv_cache_utils", "KVCacheBlock", "block_hash block_hash_num_tokens"),
    Hook(
        "vllm.v1.core.kv_cache_utils", "make_block_hash_with_group_id", ("block_hash", "group_id")
    ),
    Hook("vllm.v1.core.block_pool", "BlockPool.blocks"),
    Hook(f"{_BASE}.base", "KVConnectorBase_V1.bind_gpu_block_pool", ("gpu_block_pool",)),
    # lmcache_hybrid/storage/hosts.py
    Hook(f"{_BASE}.base", "KVConnectorHandshakeMetadata", ()),
    Hook(f"{_BASE}.base", "KVConnectorBase_V1.get_handshake_metadata"),
    Hook(f"{_BASE}.base", "KVConnectorBase_V1.set_xfer_handshake_metadata", ("metadata",)),
    Hook("vllm.utils.network_utils", "get_ip", ()),
    Hook("vllm.utils.network_utils", "get_tcp_uri", ("ip", "port")),
    Hook("vllm.utils.network_utils", "is_valid_ipv6_address"),
    Hook(f"{_BASE}.base", "KVConnectorBase_V1._vllm_config"),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.coordinator"),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.block_pool"),
    Hook("vllm.v1.core.sched.output", "NewRequestData.req_id"),
    # lmcache_hybrid/connector.py
    *attributes("vllm.v1.outputs", "KVConnectorOutput", "kv_connector_stats"),
    Hook(f"{_BASE}.base", "KVConnectorRole.SCHEDULER"),
    Hook(f"{_BASE}.base", "KVConnectorRole.WORKER"),
    Hook(f"{_BASE}.metrics", "KVConnectorPromMetrics.per_engine_labelvalues"),
    Hook("vllm.usage.usage_lib", "UsageContext.OPENAI_API_SERVER"),
    Hook("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    Hook("vllm.utils.argparse_utils", "FlexibleArgumentParser.parse_args"),
    Hook("vllm.entrypoints.llm", "LLM.generate"),
    Hook("vllm.outputs", "RequestOutput.prompt_token_ids"),
    Hook("vllm.outputs", "CompletionOutput.token_ids"),
    Hook("vllm.logprobs", "Logprob.logprob"),
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "hash_block_tokens",
        ("hash_function", "parent_block_hash", "curr_block_token_ids", "extra_keys"),
    ),
    *attributes("vllm.logger", "_VllmLogger", "info_once warning_once"),
    # lmcache_hybrid/tools/bench/client.py
    Hook("vllm.benchmarks.serve", "add_cli_args", ("parser",)),
    Hook("vllm.benchmarks.serve", "main", ("args",)),
    Hook("vllm.benchmarks.serve", "get_samples", ("args", "tokenizer")),
    *attributes(
        "vllm.benchmarks.datasets", "SampleRequest", "prompt prompt_len expected_output_len"
    ),
    Hook("torch.cpu", "_is_amx_tile_supported"),
    Hook("torch.backends.cpu", "get_cpu_capability"),
)
