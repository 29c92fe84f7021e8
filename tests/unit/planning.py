# SPDX-License-Identifier: Apache-2.0
"""vLLM's grouping and sizing of the KV cache, which 0.33 moved to a module of its own."""

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

get_kv_cache_config_from_groups = planning.get_kv_cache_config_from_groups
get_kv_cache_groups = planning.get_kv_cache_groups
get_kv_cache_groups_uniform_page_size = planning._get_kv_cache_groups_uniform_page_size
