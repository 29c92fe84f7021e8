# SPDX-License-Identifier: Apache-2.0
"""What the product replaces in LMCache, or relies on there and in redis-py."""

from tests.compat.names.resolver import Hook, attributes

_BACKENDS = "lmcache.v1.storage_backend"
_S3 = f"{_BACKENDS}.connector.s3_connector"
_QUEUE = f"{_BACKENDS}.job_executor.pq_executor"
_ZMQ = "lmcache.v1.rpc.zmq_transport"
_REMOTE_PATCH = "lmcache_hybrid/storage/tiers/remote.py"
_MAKE_CONNECTOR = "lmcache_hybrid/storage/remote/make_connector.py"
_CREDENTIALS = "lmcache_hybrid/config/redis_credentials.py"
_DOCTOR = "lmcache_hybrid/tools/doctor/backends.py"
_CONFIG = "lmcache.v1.config"
_OPS = "lmcache.v1.platform.base.device_ops"
_SPEC = "lmcache.v1.platform.base.device_spec"

LMCACHE = (
    Hook("lmcache.v1.cache_engine", "LMCacheEngine.stats_monitor"),
    *attributes(
        "lmcache.integration.vllm.vllm_service_factory",
        "VllmServiceFactory",
        "lmcache_config role",
    ),
    Hook(f"{_BACKENDS}.remote_backend", "RemoteBackend.put_tasks"),
    Hook(f"{_BACKENDS}.remote_backend", "RemoteBackend.plugin_name"),
    Hook(
        f"{_BACKENDS}.connector.instrumented_connector",
        "InstrumentedRemoteConnector.getWrappedConnector",
        (),
    ),
    Hook(f"{_BACKENDS}.connector.base_connector", "RemoteConnector.remove_sync"),
    Hook(f"{_BACKENDS}.connector", "parse_remote_url"),
    Hook("lmcache.v1.config", "_update_config_from_env", holds=("self._user_set_keys.add(name)",)),
    # lmcache_hybrid/storage/remote, lmcache_hybrid/tools/stored
    Hook("redis", "RedisError"),
    Hook("redis", "ResponseError"),
    Hook("redis", "BusyLoadingError"),
    Hook("redis.connection", "URL_QUERY_ARGUMENT_PARSERS"),
    Hook("redis.exceptions", "RedisClusterException"),
    Hook("redis.sentinel", "Sentinel.master_for", ("service_name",)),
    Hook("redis.sentinel", "Sentinel.sentinels"),
    Hook("redis.commands.sentinel", "SentinelCommands.sentinel_masters"),
    *attributes("redis.client", "Redis", "from_url execute_command connection_pool"),
    *attributes("redis.client", "Pipeline", "execute"),
    *attributes("redis.commands.core", "ManagementCommands", "ping dbsize"),
    *attributes("redis.commands.core", "ScanCommands", "scan_iter"),
    *attributes(
        "redis.connection",
        "AbstractConnection",
        "on_connect send_command read_response connect disconnect",
    ),
    Hook("redis.connection", "AbstractConnection._sock"),
    Hook("redis", "ConnectionPool"),
    *attributes("redis.connection", "ConnectionPool", "connection_class connection_kwargs"),
    *attributes("redis.cluster", "RedisCluster", "PRIMARIES get_primaries"),
    *attributes(
        "redis.cluster",
        "RedisCluster",
        "get_node get_node_from_key get_redis_connection nodes_manager",
    ),
    Hook("redis.cluster", "NodesManager.initialize"),
    *attributes("redis.exceptions", "AskError", "host port"),
    Hook("redis.cluster", "ClusterNode"),
    Hook(
        "lmcache.v1.manager", "LMCacheManager.__init__", ("config", "service_factory", "connector")
    ),
    *attributes(
        "lmcache.v1.manager",
        "LMCacheManager",
        "start_services post_init stop_services lmcache_engine config _init_failed_reason",
    ),
    Hook(
        "lmcache.integration.vllm.vllm_service_factory",
        "VllmServiceFactory.__init__",
        ("lmcache_config", "vllm_config", "role"),
    ),
    *attributes(
        "lmcache.integration.vllm.vllm_service_factory",
        "VllmServiceFactory",
        "get_or_create_metadata get_or_create_lmcache_engine maybe_create_lookup_client "
        "maybe_create_lookup_server maybe_create_offload_server maybe_create_internal_api_server",
    ),
    *attributes(
        "lmcache.v1.internal_api_server.api_server", "InternalAPIServer", "enable app stop"
    ),
    *attributes(
        "lmcache.v1.metadata", "LMCacheMetadata", "kv_shape role use_mla world_size worker_id"
    ),
    Hook("lmcache.v1.cache_engine", "LMCacheEngineBuilder.get_or_create"),
    *attributes(
        "lmcache.v1.cache_engine",
        "LMCacheEngine",
        "storage_manager metadata is_healthy is_frozen retrieve_locations store_location",
    ),
    # The acceptance test asks one tier at a time.
    Hook(
        "lmcache.v1.cache_engine",
        "LMCacheEngine.retrieve_locations",
        replaced_in="lmcache_hybrid/tools/accept/worker.py",
    ),
    *attributes(
        f"{_BACKENDS}.storage_manager",
        "StorageManager",
        "storage_backends local_cpu_backend batched_put allocate clear get_active_storage_backends",
    ),
    *attributes(
        "lmcache.utils",
        "CacheEngineKey",
        "model_name world_size worker_id chunk_hash dtype request_configs from_string to_string",
    ),
    Hook("lmcache.utils", "CacheEngineKey.with_new_worker_id"),
    Hook(
        "lmcache.utils",
        "CacheEngineKey.model_name",
        replaced_in="lmcache_hybrid/storage/disk/index.py",
    ),
    *attributes(
        "lmcache.v1.memory_management",
        "MemoryObj",
        "byte_array tensor ref_count_up ref_count_down get_physical_size get_shape",
    ),
    Hook("lmcache.v1.memory_management", "MemoryFormat.KV_2LTD"),
    Hook(f"{_BACKENDS}.cache_policy.base_policy", "BaseCachePolicy.update_on_hit"),
    Hook(
        f"{_BACKENDS}.local_cpu_backend",
        "LocalCPUBackend.allocate",
        replaced_in="lmcache_hybrid/storage/read_reservation.py",
    ),
    *attributes(
        f"{_BACKENDS}.local_cpu_backend",
        "LocalCPUBackend",
        "cache_policy cpu_lock use_hot contains remove batched_get_blocking "
        "batched_submit_put_task",
    ),
    Hook(
        f"{_BACKENDS}.local_cpu_backend",
        "LocalCPUBackend.hot_cache",
        replaced_in="lmcache_hybrid/storage/tiers/ram.py",
    ),
    # Its index, which lmcache_hybrid/storage/residency.py copies into a subclass.
    *(
        Hook(f"{_BACKENDS}.cache_policy.{module}", f"{name}.init_mutable_mapping", (), (made,))
        for module, name, made in (
            ("lru", "LRUCachePolicy", "return OrderedDict()"),
            ("mru", "MRUCachePolicy", "return OrderedDict()"),
            ("lfu", "LFUCachePolicy", "return {}"),
            ("fifo", "FIFOCachePolicy", "return {}"),
        )
    ),
    *attributes(
        f"{_BACKENDS}.cache_policy.lru",
        "LRUCachePolicy",
        "update_on_hit update_on_put update_on_force_evict update_chunk_hash_dict",
    ),
    # Each asks the index that it is given, see lmcache_hybrid/storage/keep_shares.py.
    *(
        Hook(
            f"{_BACKENDS}.cache_policy.{module}",
            f"{name}.get_evict_candidates",
            holds=(looks,),
            replaced_in="lmcache_hybrid/storage/keep_shares.py",
        )
        for module, name, looks in (
            ("lru", "LRUCachePolicy", "for key, cache in cache_dict.items():"),
            ("mru", "MRUCachePolicy", "for key, cache in reversed(cache_dict.items()):"),
            ("lfu", "LFUCachePolicy", "if not cache_dict[key].can_evict:"),
            ("fifo", "FIFOCachePolicy", "for key, cache in cache_dict.items():"),
        )
    ),
    *attributes(
        f"{_BACKENDS}.cache_policy.lfu",
        "LFUCachePolicy",
        "update_on_hit update_on_put update_on_force_evict",
    ),
    # lmcache_hybrid/storage/disk: a backend of LMCache's interface, made in the place of its own
    Hook(
        _BACKENDS,
        "LocalDiskBackend",
        replaced_in="lmcache_hybrid/storage/disk/make_backend.py",
    ),
    Hook(
        _BACKENDS,
        "CreateStorageBackends",
        holds=(
            "local_disk_backend = LocalDiskBackend(config, loop, local_cpu_backend, dst_device, "
            "lmcache_worker, metadata)",
            "backend_name = str(local_disk_backend)",
        ),
    ),
    *attributes(
        f"{_BACKENDS}.abstract_backend",
        "StorageBackendInterface",
        "contains exists_in_put_tasks batched_submit_put_task get_blocking batched_get_blocking "
        "pin unpin remove touch_cache get_allocator_backend close",
    ),
    Hook(f"{_BACKENDS}.local_disk_backend", "LocalDiskBackend.__init__"),
    *attributes(f"{_BACKENDS}.path_sharder", "PathSharder", "__init__ selected"),
    Hook(_CONFIG, "_get_extra_config_value", ("key", "default_value")),
    *attributes(_CONFIG, "_CONFIG_DEFINITIONS", "local_disk_path_sharding cache_policy"),
    *attributes("lmcache.observability", "LMCStatsMonitor", "GetOrCreate"),
    Hook("lmcache.observability", "LMCStatsMonitor.update_local_storage_usage", ("usage",)),
    *attributes("lmcache.utils", "DiskCacheMetadata", "size path shape pin unpin can_evict"),
    # What keeps a record that somebody refers to (lmcache_hybrid/storage/tiers/ram.py)
    Hook(
        "lmcache.v1.memory_management",
        "TensorMemoryObj.can_evict",
        holds=("not self.is_pinned and self.get_ref_count() == 1",),
    ),
    Hook(f"{_BACKENDS}.remote_backend", "RemoteBackend.init_connection", replaced_in=_REMOTE_PATCH),
    Hook(f"{_BACKENDS}.remote_backend", "RemoteBackend.get_blocking", replaced_in=_REMOTE_PATCH),
    *attributes(
        f"{_BACKENDS}.remote_backend",
        "RemoteBackend",
        "connection loop config _mla_worker_id_as0_mode",
    ),
    Hook(f"{_BACKENDS}.remote_backend", "CreateConnector", replaced_in=_MAKE_CONNECTOR),
    *attributes(f"{_BACKENDS}.connector", "ConnectorAdapter", "can_parse create_connector"),
    *attributes(
        f"{_BACKENDS}.connector",
        "ConnectorContext",
        "__init__ url local_cpu_backend config metadata",
    ),
    *attributes(
        f"{_BACKENDS}.connector.base_connector",
        "RemoteConnector",
        "__init__ exists exists_sync get put batched_put support_batched_put list close "
        "meta_shapes meta_dtypes",
    ),
    # What it writes and reads before a store that failed is used again.
    Hook(
        "lmcache.v1.health_monitor.checks.remote_backend_check",
        "RemoteBackendHealthCheck._resource_manager",
        holds=("shapes = connector.meta_shapes", "self.backend.get_blocking(key)"),
    ),
    Hook(_QUEUE, "AsyncPQExecutor.shutdown_async"),
    *attributes("lmcache.v1.memory_management", "MemoryObj", "data_ptr get_size"),
    # lmcache_hybrid/storage/remote/s3.py: the connector that makes AWS' client
    Hook(_S3, "S3Connector._format_safe_path", ("key_str",)),
    *attributes(
        _S3,
        "S3Connector",
        "local_cpu_backend loop s3_client s3_endpoint s3_region credentials_provider pq_executor",
    ),
    Hook(f"{_BACKENDS}.connector.s3_adapter", "S3ConnectorAdapter.create_connector", ("context",)),
    Hook(
        _ZMQ,
        "ZmqReqRepClientTransport.__init__",
        ("socket_params", "timeout_ms"),
    ),
    *attributes(
        _ZMQ,
        "ZmqReqRepClientTransport",
        "sockets send_and_recv_all ctx encoder socket_params timeout_ms _create_socket "
        "_recreate_all_sockets",
    ),
    *attributes(
        _ZMQ,
        "ZmqRouterServerTransport",
        "recv_request send_response close ctx decoder socket socket_path",
    ),
    Hook(
        "lmcache.v1.config_base",
        "validate_and_set_config_value",
        ("config", "config_key", "value"),
    ),
    *attributes(
        _CONFIG,
        "_CONFIG_DEFINITIONS",
        "local_cpu "
        "remote_storage_plugins priority_limit min_retrieve_tokens save_decode_cache "
        "lookup_timeout_ms blocking_timeout_secs extra_config enable_kv_events remote_serde "
        "local_cpu_use_hugepages numa_mode reserve_local_cpu_size internal_api_server_enabled "
        "internal_api_server_socket_path_prefix internal_api_server_port_start "
        "internal_api_server_include_index_list",
    ),
    *(
        Hook(
            _CONFIG,
            f"_CONFIG_DEFINITIONS.{name}",
            replaced_in="lmcache_hybrid/config/lmcache_config.py",
        )
        for name in (
            "chunk_size",
            "pre_caching_hash_algorithm",
            "use_layerwise",
            "enable_async_loading",
            "save_unfull_chunk",
            "lmcache_worker_ids",
            "local_disk_path_sharding",
        )
    ),
    Hook(
        _CONFIG,
        "_CONFIG_DEFINITIONS.local_disk",
        replaced_in="lmcache_hybrid/config/folders.py",
    ),
    # The doctor opens every backend, with little memory.
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.max_local_cpu_size", replaced_in=_DOCTOR),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.max_local_disk_size", replaced_in=_DOCTOR),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.remote_url", replaced_in=_DOCTOR),
    Hook(
        _CONFIG,
        "_CONFIG_DEFINITIONS.remote_url",
        replaced_in=_CREDENTIALS,
    ),
    Hook(
        _CONFIG,
        "_CONFIG_DEFINITIONS.remote_url",
        replaced_in="lmcache_hybrid/config/other_names.py",
    ),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.remote_config_url", replaced_in=_DOCTOR),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.remote_config_url", replaced_in=_CREDENTIALS),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.store_location", replaced_in=_DOCTOR),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.retrieve_locations", replaced_in=_DOCTOR),
    Hook(_CONFIG, "_CONFIG_DEFINITIONS.remote_storage_plugins", replaced_in=_DOCTOR),
    *(
        Hook(_CONFIG, f"_CONFIG_DEFINITIONS.{name}", replaced_in=f"lmcache_hybrid/{file}")
        for file, name in (
            ("tools/doctor/folders.py", "local_disk"),
            ("tools/doctor/folders.py", "remote_url"),
            ("config/check.py", "remote_url"),
        )
    ),
    # lmcache_hybrid/storage/host_memory.py
    Hook(_OPS, "DeviceOps.bind_native", holds=("setattr(self, name, native_sym)",)),
    Hook(_OPS, "DeviceOps.device_type"),
    Hook(_OPS, "DeviceOps.alloc_pinned_ptr"),
    Hook(_OPS, "DeviceOps.alloc_pinned_numa_ptr"),
    Hook(_OPS, "DeviceOps.alloc_hugepage_pinned_ptr"),
    Hook(_OPS, "DeviceOps.alloc_hugepage_pinned_numa_ptr"),
    Hook(_OPS, "DeviceOps.free_pinned_ptr"),
    Hook(_OPS, "DeviceOps.free_pinned_numa_ptr"),
    Hook(_OPS, "DeviceOps.free_hugepage_pinned_ptr"),
    Hook(_OPS, "DeviceOps.free_hugepage_pinned_numa_ptr"),
    Hook(
        "lmcache.v1.platform.devices.cuda.device_ops",
        "CudaDeviceOps.ensure_native",
        (),
        holds=("import lmcache.cuda_ops as native", "self.bind_native(native)"),
    ),
    Hook(
        "lmcache.v1.platform.torch_ops.mem_alloc",
        "_alloc_page_aligned_pinned_view",
        holds=("size + _PAGE_SIZE, dtype=torch.uint8, pin_memory=_use_pinned",),
    ),
    Hook(
        "lmcache.v1.memory_management",
        "_resolve_pinned_alloc_free",
        holds=(
            "alloc_fn=device_ops.alloc_pinned_ptr, alloc_args=(size, flags), "
            "free_fn=device_ops.free_pinned_ptr, free_args=()",
            "alloc_fn=device_ops.alloc_pinned_numa_ptr, alloc_args=(size, numa_id), "
            "free_fn=device_ops.free_pinned_numa_ptr, free_args=(size,)",
        ),
    ),
    Hook(_SPEC, "DeviceSpec.pin_memory"),
    Hook(_SPEC, "DeviceSpec.unpin_memory"),
    Hook(f"{_BACKENDS}.local_cpu_backend", "LocalCPUBackend.memory_allocator"),
    *attributes(
        "lmcache.v1.memory_allocators.mixed_memory_allocator",
        "MixedMemoryAllocator",
        "buffer _unregistered",
    ),
    # lmcache_hybrid/core/lmcache_stats.py
    *(
        Hook("lmcache.observability", name, replaced_in="lmcache_hybrid/core/lmcache_stats.py")
        for name in (
            "LookupRequestStats.start_time",
            "RetrieveRequestStats.start_time",
            "StoreRequestStats.start_time",
        )
    ),
    *attributes(
        "lmcache.observability",
        "LMCStatsMonitor",
        "on_lookup_request on_lookup_finished on_retrieve_request on_retrieve_finished "
        "on_store_request on_store_finished",
    ),
)
