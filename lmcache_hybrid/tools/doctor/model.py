# SPDX-License-Identifier: Apache-2.0
"""Computes groups, block size and bytes of a model with vLLM's own code, but without an engine.

The model is built on torch's meta device: no weights are read or allocated, and vLLM's layers
still return their KV cache specs. The steps are those of vLLM's engine core.
"""

import copy
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.drafts import why_hits_are_shorter
from lmcache_hybrid.config.parallel import check_parallelism, local_ranks, why_no_decode_saves
from lmcache_hybrid.config.tight_memory import taken_beside
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import (
    GroupPlan,
    is_served,
    page_bytes,
    plan_groups,
    suggested_unit,
)
from lmcache_hybrid.tools.doctor.finding import one_line
from lmcache_hybrid.tools.sizing.blocks import GDN_PREFILLS, PLATFORMS, compute
from lmcache_hybrid.tools.sizing.shape import read_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


# Bytes; vLLM asks how much there is, and the groups do not depend on it.
ANY_MEMORY = 1 << 50
CPU = "cpu"
# One of them is in every model's repository.
CONFIGS = ("config.json", "params.json")
NOT_FOUND = "Give a folder, check the name, or set HF_TOKEN if the model is gated or private."


class ModelError(Exception):
    """vLLM or this package refuses the model. The message is one sentence."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        served: whether this package serves its groups, not LMCache's own adapter.
        block_size: N in tokens.
        attention, windows, states: group indices.
        stages: bytes of one rank of each pipeline stage: of all attention pages of one block, and
            of all states at one boundary.
        window_bytes: of all window pages of one block.
        largest: bytes of the largest group's block, the largest payload of a record.
        unit: ``--prefix-match-unit``, 0 where it is not set; with ``dcp`` a state's block then.
        whole: whether it hits at multiples of N only, whatever the unit.
        ranks: ``--tensor-parallel-size``.
        longest: ``max_model_len`` in tokens.
        step_tokens: ``max_num_batched_tokens``.
        device: of vLLM's platform here, such as ``cuda`` or ``cpu``; empty if unknown.
        gpu_sizes: N on a GPU, by prefill kernel, where ``device`` is another; empty if unknown.
        plan: arguments of ``lmcache-hybrid plan`` for the same model and flags.
        drafts: what hits lose beside the drafter and why, in a sentence; empty if nothing.
        local_ranks: see :func:`.parallel.local_ranks`.
        hosts: over which vLLM spreads the ranks of one engine.
        dcp: ``--decode-context-parallel-size``; N is then a state's block times that.
        generates: False for pooling.
        no_decode_saves: why ``save_decode_cache`` is refused, in a sentence; empty if it is not.
        offloaded, nodes, share: see :func:`.tight_memory.tight_memory`.
    """

    served: bool
    block_size: int = 0
    attention: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    stages: tuple[tuple[int, int], ...] = ()
    window_bytes: int = 0
    largest: int = 0
    unit: int = 0
    whole: bool = False
    ranks: int = 1
    longest: int = 0
    step_tokens: int = 0
    device: str = ""
    gpu_sizes: tuple[int, ...] = ()
    plan: str = ""
    drafts: str = ""
    local_ranks: int = 1
    hosts: int = 1
    dcp: int = 1
    generates: bool = True
    no_decode_saves: str = ""
    offloaded: int = 0
    nodes: tuple[int, ...] = ()
    share: float = 0.0

    @property
    def attention_bytes(self) -> int:
        """Of all stages together."""
        return sum(attention for attention, _ in self.stages)

    @property
    def state_bytes(self) -> int:
        """Of all stages together."""
        return sum(states for _, states in self.stages)

    def suggested_unit(self, wanted: int = 64) -> int:
        """Return the best ``--prefix-match-unit``; 0 for none, or if a GPU would refuse it."""
        unit = 0 if self.whole else suggested_unit(self.block_size, wanted)
        return unit if unit and self.fits_gpu(unit) else 0

    def fits_gpu(self, unit: int) -> bool:
        """Whether vLLM takes this unit on a GPU, too."""
        if self.device != CPU:
            return True
        return bool(self.gpu_sizes) and not any(size % unit for size in self.gpu_sizes)


def read_model(arguments: "EngineArgs") -> Model:
    """
    Args:
        arguments: of the engine. A ``prefix_match_unit`` need not fit the model. One copy of a
            data parallel engine is read.

    Raises:
        ModelError: vLLM or this package refuses the model or its configuration.
    """
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    model, unit = arguments.model, arguments.prefix_match_unit or 0
    one = copy.copy(arguments)
    one.load_format, one.prefix_match_unit = "dummy", None
    one.data_parallel_size, one.data_parallel_size_local, one.data_parallel_rank = 1, None, None
    one.data_parallel_hybrid_lb = one.data_parallel_external_lb = False
    if arguments.data_parallel_size > 1:
        one.nnodes, one.node_rank = max(1, arguments.nnodes // arguments.data_parallel_size), 0
    try:
        config = one.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as failure:  # from the hub, transformers, pydantic, vLLM and us
        raise refused(model, failure) from failure
    try:
        check_parallelism(config)
    except ConfigError as failure:
        raise ModelError(str(failure)) from failure
    parallel, here = config.parallel_config, local_ranks(config)
    if config.model_config.is_moe and not arguments.data_parallel_external_lb:
        here *= arguments.data_parallel_size_local or arguments.data_parallel_size
    hosts = parallel.nnodes_within_dp
    parallel.nnodes, parallel.node_rank = 1, 0  # else its layers would wait for the other hosts
    try:
        groups = kv_cache_config(config)
    except Exception as failure:
        raise ModelError(
            f"vLLM cannot build {model!r} without an engine here: {one_line(failure)}.",
            "Run this where the engine runs; the engine's log names groups and block size, too.",
        ) from failure
    if not is_served(groups):
        return Model(False)
    try:
        plan = plan_groups(groups, parallel.decode_context_parallel_size)
    except ConfigError as failure:
        raise ModelError(str(failure)) from failure
    _check_retention(config, plan.block_size)
    stages = _bytes_of_stages(config, groups, plan)
    windows = tuple(window.group for window in plan.windows)
    unit = unit or plan.with_unit(plan.state_tokens).unit  # as vLLM, where ranks share blocks
    hits_at = plan.with_unit(unit or plan.block_size).unit or plan.block_size
    return Model(
        True,
        plan.block_size,
        plan.attention,
        windows,
        plan.states,
        tuple(
            (sum(own[group] for group in plan.attention), sum(own[group] for group in plan.states))
            for own in stages
        ),
        sum(own[group] for own in stages for group in windows),
        max(max(own) for own in stages),
        unit,
        not plan.with_unit(1).unit,
        config.parallel_config.tensor_parallel_size,
        config.model_config.max_model_len,
        config.scheduler_config.max_num_batched_tokens,
        current_platform.device_type,
        gpu_sizes(
            arguments, config.model_config.hf_config.to_dict(), config.num_speculative_tokens
        ),
        plan_of(arguments),
        (plan.states and why_hits_are_shorter(config, hits_at)) or "",
        here,
        hosts,
        plan.dcp,
        config.model_config.runner_type == "generate",
        why_no_decode_saves(config),
        *taken_beside(config, here),
    )


def _bytes_of_stages(
    config: "VllmConfig", groups: "KVCacheConfig", plan: GroupPlan
) -> list[list[int]]:
    """List the bytes of one rank's block of each group, for each pipeline stage."""
    return [
        [
            page_bytes(group, layers) * plan.blocks_per_record(index)
            for index, (group, layers) in enumerate(zip(groups.kv_cache_groups, own, strict=True))
        ]
        for own in layers_of_stages(config, groups)
    ]


def _check_retention(config: "VllmConfig", block_size: int) -> None:
    interval = config.cache_config.prefix_cache_retention_interval or 0
    if interval < 0 or interval % block_size:
        raise ModelError(
            f"vLLM refuses prefix_cache_retention_interval={interval}: it is not a multiple of "
            f"this model's block size {block_size}.",
            f"Set it to a multiple of {block_size} or to 0, or leave it out.",
        )


def layers_of_stages(
    config: "VllmConfig", groups: "KVCacheConfig"
) -> Iterator[list[Sequence[str]]]:
    """Yield the layers of each KV cache group that each pipeline stage has, as vLLM cuts them."""
    from vllm.distributed.utils import get_pp_indices

    names = [group.layer_names for group in groups.kv_cache_groups]
    stages = config.parallel_config.pipeline_parallel_size
    layers = config.model_config.get_total_num_hidden_layers()
    if stages == 1:
        yield names
        return

    def layer_of(name: str) -> int:
        # Falcon-H1 counts a layer's recurrent part behind all layers.
        number = re.search(r"\d+", name)
        return int(number[0]) % layers if number else 0

    for stage in range(stages):
        own = range(*get_pp_indices(layers, stage, stages))
        yield [[name for name in each if layer_of(name) in own] for each in names]


def refused(model: str, failure: Exception) -> ModelError:
    """Tell in vLLM's words why it refuses a model; with a fix if it did not find it."""
    from huggingface_hub import try_to_load_from_cache

    fix = "" if os.path.exists(model) else NOT_FOUND
    with suppress(ValueError):  # no name that the hub can have
        if any(isinstance(try_to_load_from_cache(model, name), str) for name in CONFIGS):
            fix = ""
    return ModelError(f"vLLM refuses {model!r}: {one_line(failure)}.", fix)


# Of vLLM's flags: the one of `lmcache-hybrid plan` for it, and the value that says nothing.
_PLAN_FLAGS = {
    "tensor_parallel_size": ("--tp", 1),
    "decode_context_parallel_size": ("--decode-context-parallel-size", 1),
    "dtype": ("--dtype", "auto"),
    "kv_cache_dtype": ("--kv-cache-dtype", "auto"),
    "mamba_ssm_cache_dtype": ("--ssm-dtype", "auto"),
    "block_size": ("--block-size", None),
}


def plan_of(arguments: "EngineArgs") -> str:
    """Return the arguments of ``lmcache-hybrid plan`` for this model and these flags."""
    words = [arguments.model]
    for name, (flag, default) in _PLAN_FLAGS.items():
        if (value := getattr(arguments, name)) != default:
            words += [flag, str(value)]
    return shlex.join(words)


def gpu_sizes(arguments: "EngineArgs", config: dict[str, Any], drafts: int) -> tuple[int, ...]:
    """Compute N on a GPU, by prefill kernel; empty for a model that cannot be sized.

    Args:
        config: of the model.
        drafts: speculative tokens.
    """
    gpu, chosen = PLATFORMS["gpu"], arguments.gdn_prefill_backend
    try:
        shape = read_shape(config)
        if arguments.dtype != "auto":
            shape = shape.with_dtype(str(arguments.dtype).removeprefix("torch."))
        return tuple(
            {
                compute(
                    shape,
                    gpu.with_gdn_prefill(backend),
                    tp=arguments.tensor_parallel_size,
                    kv_dtype=arguments.kv_cache_dtype,
                    ssm_dtype=arguments.mamba_ssm_cache_dtype,
                    block_size=arguments.block_size or 0,
                    drafts=drafts,
                ).block_size: None
                for backend in ([chosen] if chosen in GDN_PREFILLS else GDN_PREFILLS)
            }
        )
    except ConfigError:
        return ()


def kv_cache_config(config: "VllmConfig") -> "KVCacheConfig":
    """Make the model's groups, without memory. Mutates ``config`` as an engine does."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.worker.worker_base import WorkerBase

    with set_current_vllm_config(config), _one_of(config.parallel_config.tensor_parallel_size):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        found = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        specs = {name: spec for name, spec in found.items() if spec is not None}
        names = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
        layout = resolve_kv_cache_layout(config, [names], list(specs.values()))
        config.cache_config.kv_cache_layout = layout.name
        return _planned(config, specs)


def _planned(config: "VllmConfig", specs: "dict[str, KVCacheSpec]") -> "KVCacheConfig":
    """Group and size the layers, in two steps with vLLM 0.33 and in one with 0.32."""
    from vllm.v1.engine import core

    group = getattr(core, "get_global_kv_cache_groups", None)
    groups = () if group is None else (group(config, [specs]),)
    return core.get_kv_cache_configs(config, [specs], [ANY_MEMORY], *groups)[0]


@contextmanager
def _one_of(ranks: int) -> Iterator[None]:
    """Make layers see rank 0 of ``ranks`` ranks when they are built."""
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        parallel_state.get_tp_group().world_size = ranks  # none of the others is ever called
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
