# SPDX-License-Identifier: Apache-2.0
"""Everything in vLLM and LMCache that this package replaces or relies on by name.

What is merely imported is not listed: :func:`missing` reads that off our own files.
Whoever patches or uses another attribute of theirs adds it here; a test compares the
assignments in our code with the ``replaced_in`` below.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_patch.source import Tree, imported, parameters

PACKAGES = ("vllm", "lmcache", "redis")


@dataclass(frozen=True)
class Hook:
    """One name of upstream's.

    Attributes:
        module: where we get it from.
        name: "Class.attribute" or a name in the module.
        takes: positional parameters that we pass, or that it passes to what replaces
            it; upstream may add others that have defaults. None where that is open.
        holds: code that its definition must hold, as ``ast.unparse`` writes it.
        replaced_in: our file that assigns to it, "" where it is only used.
    """

    module: str
    name: str
    takes: tuple[str, ...] | None = None
    holds: tuple[str, ...] = ()
    replaced_in: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    def problem(self, tree: Tree) -> str | None:
        """What is wrong with it in ``tree``, in a few words; None when it is as we need it."""
        found = tree.find(self.module, self.name)
        if found is None:
            return f"{self} is missing"
        node = found.node
        if self.takes is not None and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names, required = parameters(node)
            expected = list(self.takes)
            if names[: len(expected)] != expected or required > len(expected):
                return f"{self} takes ({', '.join(names)}) instead of ({', '.join(expected)})"
        text = ast.unparse(node) if self.holds else ""
        gone = [code for code in self.holds if code not in text]
        return f"{self} no longer holds {gone[0]!r}" if gone else None


def missing(tree: Tree, packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """What our code needs and ``tree`` lacks, in the order of :data:`HOOKS`, imports last."""
    hooks = [hook for hook in (*HOOKS, *imports()) if hook.module.split(".")[0] in packages]
    return [problem for hook in hooks if (problem := hook.problem(tree)) is not None]


def imports() -> list[Hook]:
    """What our files import from upstream."""
    root = Path(__file__).parents[1]
    files = [f for name in ("vllm_patch", "lmcache_hybrid") for f in (root / name).rglob("*.py")]
    return [Hook(module, name) for module, name in sorted(set(imported(files, PACKAGES)))]


def _all(module: str, owner: str, names: str) -> Iterator[Hook]:
    yield from (Hook(module, f"{owner}.{name}") for name in names.split())


_CONFIG_HOOKS = "vllm_patch/config_hooks.py"
_COMPAT = "vllm_patch/compat.py"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_SPECS = "vllm.v1.kv_cache_interface"
_BACKENDS = "lmcache.v1.storage_backend"
_DISK = f"{_BACKENDS}.local_disk_backend"
_REDIS = f"{_BACKENDS}.connector.redis_connector"
_QUEUE = f"{_BACKENDS}.job_executor.pq_executor"

HOOKS = (
    # What vLLM must offer for states to be stored and restored at all
    Hook(f"{_CONNECTOR}.base", "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput.kv_connector_block_state"),
    *_all(
        "vllm.v1.core.sched.output",
        "KVConnectorBlockState",
        "boundary_state_offloads get_block_ids",
    ),
    Hook(f"{_CONNECTOR}.base", "KVConnectorBase_V1.get_transfer_results", ("finished_req_ids",)),
    *_all(f"{_CONNECTOR}.base", "KVConnectorTransferResults", "finished_recving failed_recving"),
    *_all("vllm.v1.outputs", "KVConnectorOutput", "finished_recving failed_recving"),
    Hook("vllm.v1.request", "Request.shared_prefix_boundary", replaced_in=_COMPAT),
    Hook(_SPECS, "MambaSpec.mamba_cache_mode"),
    # vllm_patch/connector.py
    Hook(
        f"{_CONNECTOR}.lmcache_connector",
        "LMCacheConnectorV1",
        holds=("self._lmcache_engine", "self._kv_cache_events"),
        replaced_in="vllm_patch/connector.py",
    ),
    Hook(
        f"{_CONNECTOR}.lmcache_connector",
        "LMCacheConnectorV1.__init__",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    Hook(
        f"{_CONNECTOR}.base",
        "KVConnectorBase_V1.__init__",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    *_all(
        f"{_CONNECTOR}.lmcache_connector",
        "LMCacheConnectorV1",
        "requires_kv_delivery bind_connector_metadata get_kv_connector_kv_cache_events shutdown "
        "update_connector_output reset_cache",
    ),
    Hook(
        f"{_CONNECTOR}.lmcache_connector",
        "LMCacheConnectorV1.get_num_new_matched_tokens",
        ("request", "num_computed_tokens"),
    ),
    Hook(
        f"{_CONNECTOR}.lmcache_connector",
        "LMCacheConnectorV1.update_state_after_alloc",
        ("request", "blocks", "num_external_tokens"),
    ),
    Hook(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.get_connector_class_by_name",
        ("connector_name",),
    ),
    # vllm_patch/config_hooks.py
    Hook("vllm.config", "KVTransferConfig.__post_init__", (), replaced_in=_CONFIG_HOOKS),
    Hook("vllm.config", "KVTransferConfig.kv_role", replaced_in=_CONFIG_HOOKS),
    Hook(
        "vllm.config",
        "VllmConfig._post_init_kv_transfer_config",
        (),
        replaced_in=_CONFIG_HOOKS,
    ),
    Hook(
        "vllm.config",
        "VllmConfig.__post_init__",
        holds=("self._post_init_kv_transfer_config()", "KVConnectorFactory.supports_hma_config("),
    ),
    Hook("vllm.config", "KVTransferConfig.kv_load_failure_policy", replaced_in=_CONFIG_HOOKS),
    Hook("vllm.config", "KVTransferConfig.get_from_extra_config", ("key", "default")),
    Hook("vllm.config", "KVTransferConfig.has_connector", ("connector_name",)),
    Hook("vllm.config", "CacheConfig.mamba_cache_mode", replaced_in=_CONFIG_HOOKS),
    Hook("vllm.config", "CacheConfig.prefix_caching_hash_algo", replaced_in=_CONFIG_HOOKS),
    Hook(
        "vllm.config",
        "SchedulerConfig.disable_hybrid_kv_cache_manager",
        replaced_in=_CONFIG_HOOKS,
    ),
    *_all("vllm.config", "VllmConfig", "weight_transfer_config speculative_config"),
    *_all("vllm.config", "ModelConfig", "is_hybrid hf_text_config"),
    # vllm_patch/compat.py
    Hook(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        ("vllm_config",),
        replaced_in=_COMPAT,
    ),
    Hook("vllm.config", "CacheConfig.block_size", replaced_in=_COMPAT),
    Hook("vllm.config", "CacheConfig.num_gpu_blocks"),
    Hook(
        "vllm.model_executor.layers.mamba.mamba_mixer2",
        "MambaMixer2.get_kv_cache_spec",
        ("vllm_config",),
        replaced_in=_COMPAT,
    ),
    *_all(_SPECS, "MambaSpec", "num_prefill_checkpoint_blocks prefill_checkpoint_alignment"),
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
        ("request",),
        holds=("self.kv_cache_manager.cache_blocks(", "self.failed_recving_kv_req_ids"),
        replaced_in=_COMPAT,
    ),
    Hook(
        _SCHEDULER,
        "Scheduler._update_from_kv_xfer_finished",
        ("kv_connector_output",),
        replaced_in=_COMPAT,
    ),
    Hook(_SCHEDULER, "Scheduler._handle_blocked_waiting_request", ("request",)),
    Hook(
        _SCHEDULER,
        "Scheduler._request_remaining_blocks",
        ("request",),
        holds=("apply_admission_cap=True",),
        replaced_in=_COMPAT,
    ),
    *_all(
        _SCHEDULER,
        "Scheduler",
        "policy waiting finished_recving_kv_req_ids failed_recving_kv_req_ids _inflight_prefills "
        "num_spec_tokens num_lookahead_tokens kv_cache_manager",
    ),
    *_all(
        "vllm.v1.core.sched.request_queue",
        "RequestQueue",
        "remove_requests prepend_requests",
    ),
    *_all(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        "max_admission_blocks_per_request req_to_blocks block_size",
    ),
    Hook("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator.single_type_managers"),
    Hook("vllm.v1.core.kv_cache_utils", "KVCacheBlock.is_null"),
    # lmcache_hybrid, vLLM's side
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "resolve_kv_cache_block_sizes",
        ("kv_cache_config", "vllm_config"),
    ),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids"),
    *_all(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "num_scheduled_tokens total_num_scheduled_tokens",
    ),
    *_all(
        "vllm.v1.request",
        "Request",
        "request_id num_tokens num_prompt_tokens num_computed_tokens block_hashes lora_request "
        "skip_reading_prefix_cache priority",
    ),
    Hook(
        "vllm.v1.request",
        "Request.shared_prefix_boundary",
        replaced_in="lmcache_hybrid/scheduler.py",
    ),
    *_all(_SPECS, "KVCacheConfig", "num_blocks kv_cache_groups"),
    *_all(_SPECS, "KVCacheGroupSpec", "layer_names kv_cache_spec"),
    *_all(_SPECS, "SlidingWindowSpec", "block_size sliding_window extra_retained_tokens"),
    *_all("vllm.config", "VllmConfig", "model_config load_config mamba_config additional_config"),
    *_all("vllm.config", "VllmConfig", "parallel_config lora_config compilation_config"),
    *_all("vllm.config", "ModelConfig", "model model_weights model_impl model_class_overrides"),
    *_all("vllm.config", "ModelConfig", "revision quantization quantization_config seed dtype"),
    *_all("vllm.config", "CacheConfig", "cache_dtype kv_cache_layout use_replayssm"),
    *_all("vllm.config", "CacheConfig", "replayssm_buffer_len enable_prefix_caching"),
    *_all("vllm.config", "LoadConfig", "load_format model_loader_extra_config"),
    *_all("vllm.config", "MambaConfig", "backend enable_stochastic_rounding"),
    *_all("vllm.config", "ParallelConfig", "world_size rank tensor_parallel_size"),
    *_all("vllm.config", "LoRAConfig", "lora_dtype target_modules enable_tower_connector_lora"),
    *_all("vllm.config", "MultiModalConfig", "mm_processor_kwargs media_io_kwargs"),
    *_all("vllm.config", "MultiModalConfig", "video_pruning_rate mm_encoder_attn_dtype"),
    # lmcache_hybrid, LMCache's side
    Hook(
        "lmcache.v1.manager", "LMCacheManager.__init__", ("config", "service_factory", "connector")
    ),
    *_all(
        "lmcache.v1.manager",
        "LMCacheManager",
        "start_services post_init stop_services lmcache_engine config",
    ),
    Hook(
        "lmcache.integration.vllm.vllm_service_factory",
        "VllmServiceFactory.__init__",
        ("lmcache_config", "vllm_config", "role"),
    ),
    *_all(
        "lmcache.integration.vllm.vllm_service_factory",
        "VllmServiceFactory",
        "get_or_create_metadata get_or_create_lmcache_engine maybe_create_lookup_client "
        "maybe_create_lookup_server maybe_create_offload_server",
    ),
    *_all("lmcache.v1.metadata", "LMCacheMetadata", "kv_shape use_mla world_size worker_id"),
    Hook(
        "lmcache.v1.cache_engine",
        "LMCacheEngineBuilder.get_or_create",
        (
            "instance_id",
            "config",
            "metadata",
            "gpu_connector",
            "broadcast_fn",
            "broadcast_object_fn",
        ),
    ),
    *_all(
        "lmcache.v1.cache_engine",
        "LMCacheEngine",
        "storage_manager metadata is_healthy is_frozen retrieve_locations store_location",
    ),
    *_all(
        f"{_BACKENDS}.storage_manager",
        "StorageManager",
        "storage_backends local_cpu_backend batched_contains batched_put allocate clear "
        "get_active_storage_backends",
    ),
    *_all(
        "lmcache.utils",
        "CacheEngineKey",
        "model_name world_size worker_id chunk_hash dtype request_configs from_string to_string",
    ),
    Hook("lmcache.utils", "CacheEngineKey.model_name", replaced_in="lmcache_hybrid/local_disk.py"),
    *_all(
        "lmcache.v1.memory_management",
        "MemoryObj",
        "byte_array tensor ref_count_down get_physical_size",
    ),
    Hook("lmcache.v1.memory_management", "MemoryFormat.KV_2LTD"),
    Hook(
        f"{_BACKENDS}.cache_policy.base_policy",
        "BaseCachePolicy.update_on_hit",
        ("key", "cache_dict"),
    ),
    Hook(
        f"{_BACKENDS}.local_cpu_backend",
        "LocalCPUBackend.allocate",
        ("shapes", "dtypes", "fmt", "eviction", "busy_loop"),
        replaced_in="lmcache_hybrid/lmcache_store.py",
    ),
    *_all(
        f"{_BACKENDS}.local_cpu_backend",
        "LocalCPUBackend",
        "cache_policy cpu_lock hot_cache pin unpin contains remove batched_get_blocking "
        "batched_submit_put_task",
    ),
    Hook(
        _DISK,
        "LocalDiskBackend.read_file",
        ("key", "buffer", "path"),
        replaced_in="lmcache_hybrid/local_disk.py",
    ),
    Hook(
        _DISK,
        "LocalDiskBackend.async_save_bytes_to_disk",
        ("key", "memory_obj"),
        replaced_in="lmcache_hybrid/local_disk.py",
    ),
    Hook(_DISK, "LocalDiskBackend.submit_put_task", holds=("self.async_save_bytes_to_disk",)),
    Hook(_DISK, "LocalDiskBackend.current_cache_size", replaced_in="lmcache_hybrid/local_disk.py"),
    Hook(_DISK, "LocalDiskBackend.usage", replaced_in="lmcache_hybrid/local_disk.py"),
    Hook(_DISK, "LocalDiskBackend.insert_key", ("key", "size", "shape", "dtype", "fmt")),
    Hook(_DISK, "LocalDiskBackend._key_to_path", ("key",)),
    Hook(_DISK, "LocalDiskWorker.remove_put_task", ("key",)),
    *_all(
        _DISK,
        "LocalDiskBackend",
        "path dict disk_lock disk_worker max_cache_size cache_policy pin unpin contains remove "
        "batched_get_blocking",
    ),
    Hook(
        f"{_BACKENDS}.remote_backend",
        "RemoteBackend.init_connection",
        (),
        replaced_in="lmcache_hybrid/remote.py",
    ),
    Hook(f"{_BACKENDS}.remote_backend", "RemoteBackend.get_blocking", ("key",)),
    *_all(f"{_BACKENDS}.remote_backend", "RemoteBackend", "connection loop config"),
    Hook(
        f"{_REDIS}",
        "RedisConnector._exists",
        ("key",),
        holds=("self.connection.exists(key.to_string() + 'metadata')",),
    ),
    Hook(_REDIS, "RedisConnector._get", ("key",), holds=("memory_obj =",)),
    Hook(_REDIS, "RedisConnector._put", holds=("self.connection.set(",)),
    Hook(_REDIS, "RedisConnector.close", holds=("self.pq_executor.shutdown(",)),
    Hook(
        _REDIS,
        "RedisConnector.support_batched_contains",
        (),
        replaced_in="lmcache_hybrid/remote.py",
    ),
    Hook(
        _REDIS,
        "RedisConnector.batched_contains",
        ("keys",),
        replaced_in="lmcache_hybrid/remote.py",
    ),
    *_all(_REDIS, "RedisConnector", "connection sem loop pq_executor"),
    Hook(_REDIS, "Priorities.PEEK"),
    Hook(_QUEUE, "AsyncPQExecutor.submit_job", ("fn",), replaced_in="lmcache_hybrid/remote.py"),
    Hook(_QUEUE, "AsyncPQExecutor.shutdown", ("wait",), replaced_in="lmcache_hybrid/remote.py"),
    Hook(_QUEUE, "AsyncPQExecutor.shutdown_async", ("wait",)),
    Hook(_QUEUE, "AsyncPQExecutor._queue"),
    Hook(
        "lmcache.v1.rpc.zmq_transport",
        "ZmqReqRepClientTransport.__init__",
        ("socket_params", "timeout_ms"),
    ),
    *_all("lmcache.v1.rpc.zmq_transport", "ZmqReqRepClientTransport", "sockets send_and_recv_all"),
    *_all(
        "lmcache.v1.rpc.zmq_transport",
        "ZmqRouterServerTransport",
        "recv_request send_response close",
    ),
    Hook(
        "lmcache.v1.rpc_utils",
        "get_zmq_rpc_path_lmcache",
        ("engine_id", "service_name", "rpc_port", "rank"),
    ),
    Hook(
        "lmcache.v1.config_base",
        "validate_and_set_config_value",
        ("config", "config_key", "value"),
    ),
    *_all(
        "lmcache.v1.config",
        "_CONFIG_DEFINITIONS",
        "local_cpu max_local_cpu_size local_disk max_local_disk_size remote_url "
        "remote_storage_plugins priority_limit min_retrieve_tokens save_decode_cache "
        "lookup_timeout_ms blocking_timeout_secs extra_config",
    ),
    Hook(
        "lmcache.v1.config",
        "_CONFIG_DEFINITIONS.chunk_size",
        replaced_in="lmcache_hybrid/config.py",
    ),
    Hook(
        "lmcache.v1.config",
        "_CONFIG_DEFINITIONS.pre_caching_hash_algorithm",
        replaced_in="lmcache_hybrid/config.py",
    ),
    # The client that LMCache uses
    Hook("redis.asyncio", "Redis.set", replaced_in="lmcache_hybrid/remote.py"),
    Hook("redis.asyncio", "Redis.close", replaced_in="lmcache_hybrid/remote.py"),
)
