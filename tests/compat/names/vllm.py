# SPDX-License-Identifier: Apache-2.0
"""What the product replaces in vLLM or relies on; for what it only reads see :mod:`.vllm_read`."""

from tests.compat.names.resolver import Hook, attributes

_CONFIGURATION = "vllm_patch/configuration.py"
_COMPAT = "vllm_patch/scheduler_repairs.py"
_CPU = "vllm_patch/cpu.py"
_PARTIAL = "vllm_patch/partial_hits.py"
_SESSIONS = "vllm_patch/sessions.py"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
_OUTPUT = "vllm.v1.core.sched.output"
_REQUEST = "vllm.v1.request"
_CONFIG = "vllm.config"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_LMCACHE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
_EVENTS = "vllm.distributed.kv_events"
_SPECS = "vllm.v1.kv_cache_interface"
_TRITON = "vllm.v1.attention.backends.triton_attn"
_ENGINE = "vllm.v1.engine.llm_engine"
_DOCTOR = "lmcache_hybrid/tools/doctor/model.py"
_MEDIA = "vllm_patch/media_marks.py"
_LOADER, _LOADERS = "vllm.model_executor.model_loader", "vllm_patch/loaders.py"
_SLEEP = "vllm_patch/sleep.py"
_LORA = "vllm.lora.worker_manager"


VLLM = (
    # What vLLM must offer for states to be stored and restored at all
    Hook(_BASE, "SupportsHMA.request_finished_all_groups"),
    Hook(_OUTPUT, "SchedulerOutput.kv_connector_block_state"),
    *attributes(
        _OUTPUT,
        "KVConnectorBlockState",
        "boundary_state_offloads get_block_ids req_ids resolve_block_ids",
    ),
    Hook(_BASE, "KVConnectorBase_V1.register_finished_partial_tail"),
    Hook(_BASE, "KVConnectorBase_V1.get_transfer_results"),
    Hook(_BASE, "KVConnectorBase_V1.build_connector_worker_meta"),
    Hook(_BASE, "KVConnectorWorkerMetadata.aggregate"),
    *attributes(
        _BASE, "KVConnectorTransferResults", "finished_sending finished_recving failed_recving"
    ),
    *attributes(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        "finished_recving failed_recving kv_cache_events kv_connector_worker_meta",
    ),
    Hook(_REQUEST, "Request.shared_prefix_boundary", replaced_in=_COMPAT),
    Hook(_REQUEST, "Request.num_computed_tokens", replaced_in=_COMPAT),
    Hook(_SPECS, "MambaSpec.mamba_cache_mode"),
    # lmcache_hybrid/scheduler/step_ends.py
    Hook(
        _SCHEDULER,
        "Scheduler._mamba_block_aligned_split",
        holds=("last_cache_position = get_mamba_prefill_checkpoint_position(",),
    ),
    Hook(
        _SPECS,
        "get_mamba_prefill_checkpoint_position",
        ("num_tokens", "hash_block_size", "drop_eagle_block"),
    ),
    # vllm_patch/connector.py
    Hook(
        _LMCACHE,
        "LMCacheConnectorV1",
        holds=("self._lmcache_engine", "self._kv_cache_events"),
        replaced_in="vllm_patch/connector.py",
    ),
    Hook(_LMCACHE, "LMCacheConnectorV1.__init__"),
    Hook(_BASE, "KVConnectorBase_V1.__init__"),
    *attributes(
        _LMCACHE,
        "LMCacheConnectorV1",
        "requires_kv_delivery bind_connector_metadata get_kv_connector_kv_cache_events shutdown "
        "update_connector_output reset_cache",
    ),
    Hook(_LMCACHE, "LMCacheConnectorV1.get_num_new_matched_tokens"),
    Hook(_LMCACHE, "LMCacheConnectorV1.update_state_after_alloc"),
    Hook(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.get_connector_class_by_name",
        ("connector_name",),
    ),
    # vllm_patch/loaders.py
    Hook("vllm.v1.worker.gpu_worker", "Worker.reload_weights", replaced_in=_LOADERS),
    Hook("vllm.v1.worker.gpu_worker", "Worker.reset_weights", replaced_in=_LOADERS),
    Hook("vllm.v1.worker.gpu_worker", "Worker.update_weights", replaced_in=_LOADERS),
    Hook("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", replaced_in=_LOADERS),
    # vllm_patch/sleep.py
    Hook("vllm.v1.worker.gpu_worker", "Worker.sleep", replaced_in=_SLEEP),
    Hook("vllm.v1.worker.gpu_worker", "Worker.wake_up", replaced_in=_SLEEP),
    Hook("vllm.v1.worker.gpu_worker", "Worker.discard", replaced_in=_SLEEP),
    Hook("vllm.v1.engine.core", "EngineCore.sleep", holds=("clear_prefix_cache = level >= 1",)),
    Hook("vllm.v1.engine.core", "EngineCore._finish_pause", holds=("self._reset_caches()",)),
    Hook(f"{_LOADER}.base_loader", "BaseModelLoader.__init__", replaced_in=_LOADERS),
    Hook(
        f"{_LOADER}.base_loader",
        "BaseModelLoader.load_model",
        holds=("self.load_weights(model, model_config)",),
        replaced_in=_LOADERS,
    ),
    Hook(f"{_LOADER}.base_loader", "BaseModelLoader.load_weights", replaced_in=_LOADERS),
    Hook(
        f"{_LOADER}.default_loader",
        "DefaultModelLoader.load_weights",
        holds=("model.load_weights(self.get_all_weights(model_config, model))",),
    ),
    Hook(
        f"{_LOADER}.runai_streamer_loader",
        "RunaiModelStreamerLoader.load_weights",
        holds=("model.load_weights(self.get_all_weights(model_config, model))",),
    ),
    Hook(f"{_LOADER}.tensorizer_loader", "TensorizerLoader"),
    Hook(f"{_LOADER}.weight_cache.ipc_loader", "IpcModelLoader"),
    # lmcache_hybrid/identity/weights.py
    Hook(f"{_LOADER}.weight_checksum", "compute_tensor_digests", ("model",)),
    *attributes(
        "vllm.distributed.parallel_state", "GroupCoordinator", "world_size cpu_group rank_in_group"
    ),
    Hook(_CONFIG, "ParallelConfig.enable_elastic_ep"),
    Hook(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.supports_hma_config",
    ),
    Hook(_CONFIG, "SpeculativeConfig.draft_model_config"),
    *attributes(_CONFIG, "ModelConfig", "hf_config"),
    # vllm_patch/configuration.py
    Hook(_CONFIG, "KVTransferConfig.__post_init__", replaced_in=_CONFIGURATION),
    Hook(_CONFIG, "KVTransferConfig.kv_role", replaced_in=_CONFIGURATION),
    Hook(_CONFIG, "VllmConfig._post_init_kv_transfer_config", replaced_in=_CONFIGURATION),
    Hook(_CONFIG, "VllmConfig._resolve_mm_embedding_inputs", replaced_in=_CONFIGURATION),
    Hook(_CONFIG, "MultiModalConfig.allow_missing_mm_embeddings", replaced_in=_CONFIGURATION),
    *attributes(_CONFIG, "MultiModalConfig", "video_pruning_method mm_encoder_fp8_scale_path"),
    Hook(_CONFIG, "MultiModalConfig.is_multimodal_pruning_enabled"),
    Hook(_CONFIG, "ModelConfig.uses_mrope"),
    Hook(_CONFIG, "VllmConfig.num_prefill_lookahead_tokens"),
    # vllm_patch/look_ahead.py
    Hook(
        _CONFIG,
        "VllmConfig.num_hash_lookahead_tokens",
        holds=("self.kv_transfer_config is not None",),
        replaced_in="vllm_patch/look_ahead.py",
        otherwise=(Hook(_CONFIG, "VllmConfig.num_prefill_lookahead_tokens"),),  # 0.32
    ),
    Hook(_CONFIG, "ECTransferConfig.is_ec_consumer"),
    Hook(
        _CONFIG,
        "VllmConfig.__post_init__",
        holds=("self._post_init_kv_transfer_config()", "KVConnectorFactory.supports_hma_config("),
    ),
    Hook(_CONFIG, "KVTransferConfig.kv_load_failure_policy", replaced_in=_CONFIGURATION),
    Hook(_CONFIG, "KVTransferConfig.get_from_extra_config", ("key", "default")),
    Hook(_CONFIG, "KVTransferConfig.has_connector", replaced_in=_CONFIGURATION),
    Hook(_CONFIG, "CacheConfig.prefix_caching_hash_algo", replaced_in=_CONFIGURATION),
    Hook(
        _CONFIG,
        "SchedulerConfig.disable_hybrid_kv_cache_manager",
        replaced_in=_CONFIGURATION,
    ),
    *attributes(
        _CONFIG,
        "VllmConfig",
        "weight_transfer_config speculative_config aux_output_config is_mm_encoder_only",
    ),
    Hook("vllm.config.aux_output", "AuxOutputConfig.enabled"),
    Hook(
        "vllm.distributed.aux_output_connector.connector",
        "AuxOutputSchedulerConnector.cap_external_hit",
        otherwise=(  # 0.32
            Hook("vllm.distributed.aux_output_connector.connector", "AuxOutputSchedulerConnector"),
        ),
    ),
    *attributes(_CONFIG, "ParallelConfig", "enable_fault_tolerance all2all_backend"),
    *attributes(_CONFIG, "ParallelConfig", "distributed_executor_backend"),
    *attributes(
        _CONFIG,
        "ModelConfig",
        "is_hybrid hf_text_config runner_type is_mm_prefix_lm is_attention_free is_moe "
        "has_inner_state",
    ),
    # lmcache_hybrid/scheduler/whole_items.py
    Hook("vllm.multimodal.inputs", "MultiModalFeatureSpec.mm_position"),
    *attributes("vllm.multimodal.inputs", "PlaceholderRange", "offset length"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._try_schedule_encoder_inputs",
        holds=("num_computed_tokens < start_pos",),
    ),
    # vllm_patch/partial_hits.py
    Hook(
        "vllm.v1.worker.utils",
        "copy_kv_cache_blocks_inplace",
        replaced_in=_PARTIAL,
    ),
    Hook("vllm.v1.worker.gpu_model_runner", "copy_kv_cache_blocks_inplace"),
    Hook("vllm.v1.worker.gpu.model_runner", "copy_kv_cache_blocks_inplace"),
    # vllm_patch/cpu.py
    Hook(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        ("vllm_config",),
        replaced_in=_CPU,
    ),
    Hook(_CONFIG, "CacheConfig.block_size", replaced_in=_CPU),
    Hook(_CONFIG, "CacheConfig.num_gpu_blocks"),
    Hook(
        "vllm.model_executor.layers.mamba.mamba_mixer2",
        "MambaMixer2.get_kv_cache_spec",
        ("vllm_config",),
        replaced_in=_CPU,
    ),
    *attributes(_SPECS, "MambaSpec", "num_prefill_checkpoint_blocks prefill_checkpoint_alignment"),
    # vllm_patch/scheduler_repairs.py
    Hook(_SCHEDULER, "Scheduler.kv_holding_waiting", replaced_in=_COMPAT),
    Hook(
        _SCHEDULER,
        "Scheduler.__init__",
        holds=("self.kv_holding_waiting = create_request_queue(self.policy)",),
        replaced_in=_COMPAT,
    ),
    Hook(
        _SCHEDULER,
        "Scheduler._update_waiting_for_remote_kv",
        holds=("self.kv_cache_manager.cache_blocks(", "self.failed_recving_kv_req_ids"),
        replaced_in=_COMPAT,
    ),
    Hook(_SCHEDULER, "Scheduler._update_from_kv_xfer_finished", replaced_in=_COMPAT),
    Hook(_SCHEDULER, "Scheduler._handle_blocked_waiting_request"),
    Hook(
        _SCHEDULER,
        "Scheduler.reset_prefix_cache",
        holds=("self.reset_connector_cache() and reset_successful",),
        replaced_in=_COMPAT,
    ),
    Hook("vllm.v1.executor.abstract", "Executor.__init__", replaced_in="vllm_patch/executors.py"),
    Hook("vllm.v1.executor.abstract", "Executor.uses_ray"),
    # vllm_patch/events.py, lmcache_hybrid/scheduler/events.py
    Hook(_SCHEDULER, "Scheduler.reset_prefix_cache", replaced_in="vllm_patch/events.py"),
    Hook(
        _SCHEDULER,
        "Scheduler.update_from_output",
        holds=("events.extend(connector_events)", "self.kv_event_publisher.publish(batch)"),
    ),
    Hook(_SCHEDULER, "Scheduler.has_requests", holds=("self.connector.has_pending_push_work()",)),
    *attributes(_EVENTS, "BlockRemoved", "block_hashes medium group_idx locality ownership"),
    *attributes(
        _EVENTS,
        "BlockStored",
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys "
        "group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership",
    ),
    *attributes(
        _EVENTS,
        "KVConnectorKVEvents",
        "add_events aggregate increment_workers get_all_events get_number_of_workers clear_events",
    ),
    *attributes(_LMCACHE, "LMCacheConnectorV1", "take_events"),
    Hook(_BASE, "KVConnectorBase_V1.has_pending_push_work"),
    Hook(_CONFIG, "VllmConfig.kv_events_config"),
    Hook(_CONFIG, "KVEventsConfig.enable_kv_cache_events"),
    Hook(_REQUEST, "Request.all_token_ids"),
    Hook("vllm.lora.request", "LoRARequest.adapter_id"),
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    Hook(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
        "MultiConnector.sub_connectors",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler._request_remaining_blocks",
        holds=("apply_admission_cap=True",),
        replaced_in=_COMPAT,
    ),
    Hook(_SCHEDULER, "Scheduler._preempt_request", replaced_in=_COMPAT),
    # vllm_patch/sessions.py
    Hook(
        _SCHEDULER,
        "Scheduler._handle_stopped_request",
        ("request",),
        holds=(
            "request.num_stale_output_tokens = request.num_in_flight_tokens",
            "self._update_request_as_session(request, update)",
        ),
    ),
    Hook(
        _SCHEDULER,
        "Scheduler._update_request_as_session",
        holds=("session.status = RequestStatus.WAITING",),
        replaced_in=_SESSIONS,
    ),
    Hook(_SCHEDULER, "Scheduler._preempt_request", replaced_in=_SESSIONS),
    Hook(
        "vllm.v1.worker.mamba_utils",
        "cleanup_mamba_state_idx",
        replaced_in=_SESSIONS,
    ),
    *attributes(
        _SCHEDULER,
        "Scheduler",
        "_free_request_blocks aux_output_connector encoder_cache_manager kv_cache_config "
        "kv_holding_waiting pause_state",
    ),
    Hook(_REQUEST, "Request.resumable"),
    *(
        Hook(_REQUEST, f"Request.{name}", replaced_in=_SESSIONS)
        for name in ("spec_token_ids", "is_prefill_chunk", "num_preemptions")
    ),
    *attributes(
        _REQUEST, "RequestStatus", "WAITING PREEMPTED WAITING_FOR_STREAMING_REQ FINISHED_ERROR"
    ),
    Hook("vllm.v1.core.sched.interface", "PauseState.PAUSED_NEW"),
    Hook(
        _SCHEDULER,
        "Scheduler._mamba_block_aligned_split",
        holds=("start % block_size != 0 and (not use_internal_checkpoint)",),
        replaced_in=_PARTIAL,
    ),
    Hook(
        _SCHEDULER,
        "Scheduler._reserve_prefill_lookahead",
        replaced_in=_COMPAT,
    ),
    *attributes(
        _SCHEDULER,
        "Scheduler",
        "need_mamba_block_aligned_split mamba_has_prefill_checkpoint_blocks",
    ),
    Hook(
        "vllm.models.kimi_k3.nvidia.kda",
        "KimiK3DeltaAttention._checkpoint_exporter",
        replaced_in="vllm_patch/kimi_k3.py",
    ),
    Hook("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention.conv_size"),
    Hook(
        "vllm.model_executor.layers.mamba.kda_checkpoint",
        "FlashKDAPrefillCheckpointExporter.state_len",
    ),
    Hook(
        _COORDINATOR,
        "KVCacheCoordinator.cache_blocks",
        holds=("self.get_num_cacheable_tokens(num_computed_tokens, group_id)",),
        replaced_in=_COMPAT,
    ),
    Hook(_COORDINATOR, "KVCacheCoordinator.num_reprefillable_tokens"),
    Hook(_COORDINATOR, "KVCacheCoordinator.__init__", replaced_in=_PARTIAL),
    Hook(
        _MANAGER,
        "MambaManager._cache_partial_tail_block",
        holds=("checkpoint = self._checkpoints.get(request.request_id)",),
        replaced_in=_PARTIAL,
    ),
    Hook(_MANAGER, "MambaManager._cache_partial_tail_block", replaced_in=_COMPAT),
    *attributes(_MANAGER, "MambaManager", "_checkpoints _pending_boundary_state_offloads"),
    *attributes(
        "vllm.v1.core.block_pool",
        "BlockPool",
        "evict_blocks get_num_free_blocks hash_block_size num_gpu_blocks",
    ),
    *attributes(
        _SCHEDULER,
        "Scheduler",
        "policy waiting finished_recving_kv_req_ids failed_recving_kv_req_ids _inflight_prefills "
        "num_spec_tokens num_lookahead_tokens kv_cache_manager cache_config",
    ),
    *attributes(
        "vllm.v1.core.sched.request_queue",
        "RequestQueue",
        "remove_requests prepend_requests",
    ),
    Hook(_MANAGER, "SingleTypeKVCacheManager.new_step_starts", replaced_in=_PARTIAL),
    Hook(_MANAGER, "SingleTypeKVCacheManager.get_num_blocks_to_allocate", replaced_in=_PARTIAL),
    Hook(
        _MANAGER,
        "FullAttentionManager.cache_blocks",
        holds=("self._cache_partial_tail_block(request, num_tokens)",),
        replaced_in=_PARTIAL,
    ),
    *attributes(
        _MANAGER,
        "SingleTypeKVCacheManager",
        "max_admission_blocks_per_request req_to_blocks block_size block_pool num_cached_block "
        "_has_partial_local_hit use_eagle kv_cache_group_id",
    ),
    Hook("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator.single_type_managers"),
    Hook("vllm.v1.core.kv_cache_utils", "KVCacheBlock.is_null"),
    # vllm_patch/media_marks.py
    Hook(
        "vllm.renderers.base",
        "BaseRenderer._process_multimodal",
        holds=("parse_mm_uuids(mm_uuids)",),
        replaced_in=_MEDIA,
    ),
    Hook(
        "vllm.renderers.base",
        "BaseRenderer._process_mm_uuids",
        holds=(
            "model_config.multimodal_config.mm_processor_cache_gb == 0 and "
            "(not self.config.cache_config.enable_prefix_caching)",
        ),
    ),
    Hook("vllm.renderers.base", "BaseRenderer.config"),
    Hook(
        "vllm.entrypoints.generate.beam_search.utils",
        "BeamSearchSequence.get_prompt",
        replaced_in=_MEDIA,
    ),
    Hook("vllm.entrypoints.generate.beam_search.utils", "BeamSearchSequence.orig_prompt"),
    Hook("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", replaced_in=_MEDIA),
    Hook("vllm.v1.engine.input_processor", "InputProcessor.vllm_config"),
    *attributes("vllm.v1.engine", "EngineCoreRequest", "mm_features sampling_params"),
    Hook("vllm.multimodal.inputs", "MultiModalFeatureSpec.identifier", replaced_in=_MEDIA),
    Hook("vllm.sampling_params", "SamplingParams.extra_args", replaced_in=_MEDIA),
    Hook(
        "vllm.sampling_params",
        "SamplingParams.extra_args",
        replaced_in="lmcache_hybrid/identity/media.py",
    ),
    *attributes(_CONFIG, "VllmConfig", "ec_transfer_config kv_transfer_config cache_config"),
    Hook(_CONFIG, "ModelConfig.multimodal_config"),
    Hook(_CONFIG, "ModelConfig.get_total_num_hidden_layers"),
    Hook(_CONFIG, "CacheConfig.prefix_cache_retention_interval"),
    Hook(_CONFIG, "MultiModalConfig.mm_processor_cache_gb"),
    # vllm_patch/loaders.py, lmcache_hybrid/identity/adapters.py
    Hook(_CONFIG, "VllmConfig.kv_transfer_config", replaced_in="vllm_patch/loaders.py"),
    Hook(_LORA, "WorkerLoRAManager.__init__", replaced_in=_LOADERS),
    Hook(
        _LORA,
        "WorkerLoRAManager._load_adapter",
        holds=("self._lora_model_cls.from_local_checkpoint(",),
        replaced_in=_LOADERS,
    ),
    Hook(_LORA, "LRUCacheWorkerLoRAManager.add_adapter", holds=("self._load_adapter(",)),
    *attributes(_LORA, "WorkerLoRAManager", "list_adapters _adapter_manager add_adapter"),
    Hook("vllm.distributed.parallel_state", "get_tp_group", ()),
    Hook("vllm.lora.model_manager", "LoRAModelManager.moe_ep_load_spec"),
    *attributes("vllm.lora.lora_model", "LoRAModel", "rank loras modules_to_save"),
    Hook("vllm.lora.lora_model", "LoRAModel.is_3d_lora_weight"),
    *attributes("vllm.lora.lora_model", "MoEEPLoadSpec", "local_num_experts global_num_experts"),
    *attributes(
        "vllm.lora.lora_weights", "LoRALayerWeights", "rank lora_alpha scaling lora_a lora_b"
    ),
    *attributes("vllm.lora.lora_weights", "LoRAFullModuleWeights", "weight bias"),
    *attributes(
        "vllm.lora.request",
        "LoRARequest",
        "lora_name lora_int_id lora_path load_inplace is_3d_lora_weight",
    ),
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "_gen_lora_extra_hash_keys",
        holds=("lora_request.lora_name, lora_request.lora_path",),
    ),
    # lmcache_hybrid, vLLM's side
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "resolve_kv_cache_block_sizes",
        ("kv_cache_config", "vllm_config"),
    ),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids"),
    *attributes(
        _OUTPUT,
        "SchedulerOutput",
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs",
    ),
    *attributes(
        _REQUEST,
        "Request",
        "request_id num_tokens num_prompt_tokens num_computed_tokens block_hashes lora_request "
        "skip_reading_prefix_cache priority mm_features sampling_params cache_salt "
        "num_output_tokens num_preemptions status",
    ),
    Hook(
        _REQUEST,
        "Request.shared_prefix_boundary",
        replaced_in="lmcache_hybrid/scheduler/save_planner.py",
    ),
    Hook(
        "vllm._custom_ops",
        "swap_blocks_batch",
        holds=("torch.ops._C_cache_ops.swap_blocks_batch(",),
    ),
    *attributes(_SPECS, "KVCacheConfig", "num_blocks kv_cache_groups"),
    *attributes(_SPECS, "KVCacheGroupSpec", "layer_names kv_cache_spec"),
    *attributes(_SPECS, "SlidingWindowSpec", "block_size sliding_window extra_retained_tokens"),
    *attributes(_SPECS, "AttentionSpec", "kv_quant_mode real_page_size_bytes"),
    Hook(_SPECS, "MambaSpec.real_page_size_bytes"),
    Hook(_SPECS, "UniformTypeKVCacheSpecs.kv_cache_specs"),
    Hook(_SPECS, "KVQuantMode.is_per_token_head"),
    Hook(
        _TRITON,
        "TritonAttentionImpl._ensure_scale_caches",
        holds=(
            "if self._k_scale_cache is not None:",
            "self._k_scale_cache.fill_(1.0)",
            "self._v_scale_cache.fill_(1.0)",
        ),
    ),
    *attributes(_TRITON, "TritonAttentionImpl", "_k_scale_cache _v_scale_cache"),
    *attributes(_CONFIG, "VllmConfig", "model_config load_config mamba_config additional_config"),
    *attributes(_CONFIG, "VllmConfig", "parallel_config lora_config compilation_config"),
    *attributes(_CONFIG, "ModelConfig", "model model_impl model_class_overrides"),
    *attributes(_CONFIG, "ModelConfig", "hf_config_path trust_remote_code"),
    Hook("vllm.model_executor.layers.linear", "LinearBase.quant_method"),
    *attributes(
        _CONFIG, "ModelConfig", "revision code_revision quantization quantization_config dtype"
    ),
    Hook(_CONFIG, "CacheConfig.kv_cache_layout", replaced_in=_DOCTOR),
    *attributes(_CONFIG, "CacheConfig", "cache_dtype use_replayssm kv_offloading_size"),
    *attributes(_CONFIG, "CacheConfig", "gpu_memory_utilization kv_cache_memory_bytes"),
    Hook(_CONFIG, "KVTransferConfig.kv_connector_module_path"),
    *attributes(_CONFIG, "CacheConfig", "replayssm_buffer_len enable_prefix_caching"),
    Hook(_CONFIG, "LoadConfig.load_format"),
    *attributes(_CONFIG, "MambaConfig", "backend enable_stochastic_rounding"),
    *attributes(_CONFIG, "ParallelConfig", "world_size rank tensor_parallel_size"),
    *attributes(_CONFIG, "ParallelConfig", "local_world_size numa_bind numa_bind_nodes"),
    Hook("vllm.model_executor.models.qwen3_next_mtp", "Qwen3NextMTP.is_unused_checkpoint_weight"),
    Hook(_CONFIG, "VllmConfig.offload_config"),
    Hook("vllm.config.offload", "OffloadConfig.uva"),
    Hook("vllm.config.offload", "UVAOffloadConfig.cpu_offload_gb"),
    *attributes(_CONFIG, "LoRAConfig", "lora_dtype target_modules enable_tower_connector_lora"),
    *attributes(_CONFIG, "MultiModalConfig", "mm_processor_kwargs media_io_kwargs"),
    *attributes(_CONFIG, "MultiModalConfig", "video_pruning_rate mm_encoder_attn_dtype"),
    Hook(_CONFIG, "MultiModalConfig.language_model_only"),
    # lmcache_hybrid/accept
    *attributes(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "model kv_transfer_config worker_extension_cls disable_log_stats",
    ),
    # lmcache_hybrid/doctor, which describes one rank of one copy, without weights
    *(
        Hook("vllm.engine.arg_utils", f"EngineArgs.{name}", replaced_in=_DOCTOR)
        for name in (
            "load_format",
            "prefix_match_unit",
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "nnodes",
            "node_rank",
        )
    ),
    *attributes(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "dtype kv_cache_dtype mamba_ssm_cache_dtype block_size tensor_parallel_size "
        "gdn_prefill_backend",
    ),
    Hook("vllm.distributed.parallel_state", "GroupCoordinator.world_size", replaced_in=_DOCTOR),
    Hook("vllm.engine.arg_utils", "EngineArgs.from_cli_args", ("args",)),
    Hook("vllm.utils.argparse_utils", "FlexibleArgumentParser.error", ("message",)),
    Hook(_ENGINE, "LLMEngine.from_engine_args", ("engine_args", "usage_context")),
    Hook(_ENGINE, "LLMEngine.add_request", ("request_id", "prompt", "params")),
    Hook(_ENGINE, "LLMEngine.collective_rpc", ("method", "timeout", "args")),
    *attributes(
        _ENGINE,
        "LLMEngine",
        "step has_unfinished_requests reset_prefix_cache get_metrics tokenizer engine_core "
        "vllm_config model_config",
    ),
    *attributes("vllm.v1.metrics.reader", "Metric", "name labels"),
    *attributes("vllm.v1.metrics.reader", "Histogram", "sum count"),
    *attributes("vllm.v1.metrics.stats", "RequestStateStats", "first_token_latency"),
    *attributes("vllm.outputs", "RequestOutput", "request_id num_cached_tokens metrics finished"),
    *attributes(_CONFIG, "VllmConfig", "use_v2_model_runner"),
    *attributes(
        _CONFIG,
        "SchedulerConfig",
        "async_scheduling max_num_seqs max_num_batched_tokens max_num_scheduled_tokens "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive",
    ),
    Hook(_CONFIG, "SpeculativeConfig.use_eagle_block_drop", ()),
    Hook(_CONFIG, "CacheConfig.enable_mamba_shared_prefix_checkpoint"),
    Hook(_SPECS, "MambaSpec.num_speculative_blocks"),
    Hook(
        _CONFIG,
        "SpeculativeConfig.disable_lookahead_block_hashes",
        otherwise=(Hook(_CONFIG, "SpeculativeConfig.disable_eagle_block_drop"),),  # 0.32
    ),
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "generate_lookahead_block_hash_extra_keys",
        otherwise=(Hook("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"),),  # 0.32
    ),
    Hook(
        "vllm.distributed.kv_events",
        "BlockStored.lookahead_token_ids",
        otherwise=(Hook("vllm.distributed.kv_events", "BlockStored.extra_keys"),),  # 0.32
    ),
    *attributes("vllm.v1.worker.worker_base", "WorkerBase", "vllm_config device"),
)
