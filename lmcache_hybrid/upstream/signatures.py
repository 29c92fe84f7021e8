# SPDX-License-Identifier: Apache-2.0
"""Lists functions of vLLM and LMCache that this package replaces or relies on, with parameters.

They are checked, by import, on untested releases only. Functions whose absence fails start-up
with a clear error anyway are left out. Add each function that you replace:
tests/unit/test_hooks.py compares.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from lmcache_hybrid.upstream import lmcache_home

# By module: one line per function, with the positional parameters passed, without self; upstream
# may add others with defaults. (...) leaves them open.
Signatures = dict[str, str]

# Replaced when the plugin loads, which imports their modules anyway.
AT_START: Signatures = {
    "vllm.config": """
        KVTransferConfig.__post_init__()
        KVTransferConfig.has_connector(connector_name)
        VllmConfig._post_init_kv_transfer_config()
        VllmConfig._resolve_mm_embedding_inputs()""",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": """
        KVConnectorBase_V1.__init__(vllm_config, role, kv_cache_config)
        KVConnectorBase_V1.build_connector_worker_meta()
        KVConnectorBase_V1.get_transfer_results(finished_req_ids)
        SupportsHMA.request_finished_all_groups(request, block_ids)""",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector": """
        LMCacheConnectorV1.__init__(vllm_config, role, kv_cache_config)
        LMCacheConnectorV1.get_num_new_matched_tokens(request, num_computed_tokens)
        LMCacheConnectorV1.update_state_after_alloc(request, blocks, num_external_tokens)""",
    "vllm.entrypoints.generate.beam_search.utils": "BeamSearchSequence.get_prompt()",
    "vllm.lora.worker_manager": """
        WorkerLoRAManager.__init__(vllm_config, device, embedding_modules)
        WorkerLoRAManager._load_adapter(lora_request)""",
    "vllm.model_executor.model_loader.base_loader": """
        BaseModelLoader.__init__(load_config)
        BaseModelLoader.load_model(vllm_config, model_config, prefix)
        BaseModelLoader.load_weights(model, model_config)""",
    "vllm.renderers.base": """
        BaseRenderer._process_multimodal(prompt, mm_data, mm_uuids, mm_processor_kwargs)""",
    "vllm.v1.core.kv_cache_coordinator": """
        KVCacheCoordinator.__init__(...)
        KVCacheCoordinator.cache_blocks(request, num_computed_tokens)""",
    "vllm.v1.core.sched.scheduler": """
        Scheduler.__init__(...)
        Scheduler._handle_blocked_waiting_request(request)
        Scheduler._mamba_block_aligned_split(request, num_new_tokens, \
            num_new_local_computed_tokens, num_external_computed_tokens)
        Scheduler._preempt_request(request, timestamp)
        Scheduler._request_remaining_blocks(request)
        Scheduler._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        Scheduler._update_from_kv_xfer_finished(kv_connector_output)
        Scheduler._update_request_as_session(session, update)
        Scheduler._update_waiting_for_remote_kv(request)
        Scheduler.reset_prefix_cache(reset_running_requests, reset_connector)""",
    "vllm.v1.core.single_type_kv_cache_manager": """
        FullAttentionManager.cache_blocks(...)
        MambaManager._cache_partial_tail_block(request, num_tokens, retention_interval)
        SingleTypeKVCacheManager.get_num_blocks_to_allocate(request_id, num_tokens, \
            new_computed_blocks, total_computed_tokens, num_local_computed_tokens, \
            num_tokens_main_model, apply_admission_cap, prefill_end)
        SingleTypeKVCacheManager.new_step_starts()""",
    "vllm.v1.engine.input_processor": """
        InputProcessor.process_inputs(request_id, prompt, params, supported_tasks)""",
    "vllm.v1.executor.abstract": "Executor.__init__(vllm_config)",
}

# Replaced or called where a model is served. Other processes do not import their modules.
SERVING: Signatures = {
    "vllm._custom_ops": "swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)",
    "vllm.v1.attention.backends.triton_attn": "TritonAttentionImpl._ensure_scale_caches(kv_cache)",
    "vllm.v1.worker.gpu_worker": """
        Worker.discard(tags)
        Worker.finish_weight_update(...)
        Worker.reload_weights(...)
        Worker.reset_weights(...)
        Worker.sleep(level)
        Worker.update_weights(...)
        Worker.wake_up(tags)""",
    "vllm.v1.worker.mamba_utils": """
        cleanup_mamba_state_idx(scheduler_output, mamba_state_idx)""",
    "vllm.v1.worker.utils": """
        copy_kv_cache_blocks_inplace(kv_caches, num_blocks, kv_cache_block_copies)""",
    "lmcache.utils": "CacheEngineKey.with_new_worker_id(new_worker_id)",
    "lmcache.v1.cache_engine": """
        LMCacheEngineBuilder.get_or_create(instance_id, config, metadata, gpu_connector, \
            broadcast_fn, broadcast_object_fn)""",
    "lmcache.v1.platform.base.device_ops": """
        DeviceOps.alloc_hugepage_pinned_numa_ptr(size, numa_id)
        DeviceOps.alloc_hugepage_pinned_ptr(size, device_id)
        DeviceOps.alloc_pinned_numa_ptr(size, numa_id)
        DeviceOps.alloc_pinned_ptr(size, device_id)
        DeviceOps.bind_native(module)
        DeviceOps.free_hugepage_pinned_numa_ptr(ptr, size)
        DeviceOps.free_hugepage_pinned_ptr(ptr, size)
        DeviceOps.free_pinned_numa_ptr(ptr, size)
        DeviceOps.free_pinned_ptr(ptr)""",
    "lmcache.v1.platform.base.device_spec": """
        DeviceSpec.pin_memory(ptr, size, flags)
        DeviceSpec.unpin_memory(ptr)""",
    "lmcache.v1.storage_backend.cache_policy.base_policy": """
        BaseCachePolicy.update_on_hit(key, cache_dict)""",
    "lmcache.v1.storage_backend.connector": """
        ConnectorContext.__init__(url, loop, local_cpu_backend, config, metadata, plugin_name)
        parse_remote_url(url)""",
    "lmcache.v1.storage_backend.connector.base_connector": """
        RemoteConnector.__init__(config, metadata)
        RemoteConnector.batched_put(keys, memory_objs)
        RemoteConnector.get(key)
        RemoteConnector.put(key, memory_obj)
        RemoteConnector.remove_sync(key)""",
    "lmcache.v1.storage_backend.cache_policy.fifo": """
        FIFOCachePolicy.get_evict_candidates(cache_dict, num_candidates)""",
    "lmcache.v1.storage_backend.cache_policy.lfu": """
        LFUCachePolicy.get_evict_candidates(cache_dict, num_candidates)""",
    "lmcache.v1.storage_backend.cache_policy.lru": """
        LRUCachePolicy.get_evict_candidates(cache_dict, num_candidates)""",
    "lmcache.v1.storage_backend.cache_policy.mru": """
        MRUCachePolicy.get_evict_candidates(cache_dict, num_candidates)""",
    "lmcache.v1.storage_backend.local_cpu_backend": """
        LocalCPUBackend.allocate(shapes, dtypes, fmt, eviction, busy_loop)""",
    "lmcache.v1.storage_backend.local_disk_backend": """
        LocalDiskBackend.__init__(config, loop, local_cpu_backend, dst_device, lmcache_worker, \
            metadata)""",
    "lmcache.v1.storage_backend.path_sharder": """
        PathSharder.__init__(raw_csv, strategy, dst_device, create_dirs)""",
    "lmcache.v1.storage_backend.remote_backend": """
        CreateConnector(url, loop, local_cpu_backend, config, metadata, plugin_name)
        RemoteBackend.get_blocking(key)
        RemoteBackend.init_connection()""",
}
ALL = AT_START | SERVING


def listed(signatures: Signatures) -> Iterator[tuple[str, str, tuple[str, ...] | None]]:
    """Yield (module, name in it, parameters) of each function; None if these are open."""
    for module, lines in signatures.items():
        for line in filter(None, map(str.strip, lines.splitlines())):
            name, _, inside = line.removesuffix(")").partition("(")
            takes = tuple(word.strip() for word in inside.split(",") if word.strip())
            yield module, name, None if takes == ("...",) else takes


def problems(signatures: Signatures, packages: tuple[str, ...]) -> list[str]:
    """Describe where the installed release differs, a few words for each function.

    Imports the modules.

    Args:
        packages: "vllm", "lmcache"; functions of others are left out.
    """
    return [
        said
        for module, name, takes in listed(signatures)
        if module.split(".")[0] in packages and (said := _problem(module, name, takes)) is not None
    ]


def _problem(module: str, name: str, takes: tuple[str, ...] | None) -> str | None:
    try:
        function = _find(module, name)
    except AttributeError:
        return f"{module}.{name} is missing"
    except Exception as error:  # a module of another release may raise anything
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    if takes is None:
        return None
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _COLLECTING]
    found = [p.name for p in parameters if p.kind in _POSITIONAL or p.name in needed]
    if tuple(found[: len(takes)]) == takes and set(needed) <= set(takes):
        return None
    return f"{module}.{name} takes ({', '.join(found)}) instead of ({', '.join(takes)})"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _find(module: str, name: str) -> Any:
    """Import the function; LMCache's in-process part has two homes.

    Raises:
        AttributeError: it is not there.
    """
    first, *rest = name.split(".")
    source = lmcache_home if first in lmcache_home.NAMES else importlib.import_module(module)
    found = getattr(source, first)
    for attribute in rest:
        found = getattr(found, attribute)
    return found
