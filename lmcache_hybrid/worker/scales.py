# SPDX-License-Identifier: Apache-2.0
"""Resets the scales that vLLM keeps beside the values of a page, one per token and head.

vLLM's Triton backend sets a layer's scales to one, in every block, in the layer's first forward.
Blocks loaded before it would lose them, and states of other groups in the same memory would be
overwritten. So it is made to do that before the first load.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import layer_specs

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


def reset_scales(
    kv_cache_config: "KVCacheConfig",
    kv_caches: "Mapping[str, torch.Tensor]",
    layers: Mapping[str, Any],
) -> None:
    """Have each layer reset its scales now, not in its first forward. Mutates the KV cache.

    Args:
        kv_cache_config: of the model.
        kv_caches: as they were registered, with layers that share another one's.
        layers: by name, bound to their KV caches.

    Raises:
        ConfigError: a layer may still reset them later.
    """
    from vllm.v1.kv_cache_interface import kv_cache_uses_per_token_head_scales

    scaled = {
        name
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group)
        if (mode := getattr(spec, "kv_quant_mode", None)) and mode.is_per_token_head
        for name in group.layer_names
    }
    for name, tensor in kv_caches.items():
        layer = layers.get(name)
        dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
        if name in scaled or kv_cache_uses_per_token_head_scales(dtype):
            _reset(name, tensor, layer)


def _reset(name: str, tensor: "torch.Tensor", layer: Any) -> None:
    impl: Any = getattr(layer, "impl", None)
    if hasattr(impl, "_ensure_scale_caches"):
        impl._ensure_scale_caches(layer.kv_cache)
    memory = tensor.untyped_storage().data_ptr()
    for scales in ("_k_scale_cache", "_v_scale_cache"):
        found = getattr(impl, scales, None)
        if found is None or found.untyped_storage().data_ptr() != memory:
            raise ConfigError(
                f"{type(impl).__name__} of layer {name} may reset the scales of loaded blocks, so "
                "--kv-cache-dtype with scales per token and head is not served with it; use "
                "--kv-cache-dtype fp8 or auto, or --attention-backend TRITON_ATTN."
            )
