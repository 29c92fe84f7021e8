# SPDX-License-Identifier: Apache-2.0
"""Refuses unsupported parallelism, and says how many ranks there are and where."""

from typing import TYPE_CHECKING, Any

import zmq
from vllm import envs

from lmcache_hybrid.core.by_ray import placed_by_ray
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_parallelism(vllm_config: "VllmConfig") -> None:
    """Refuse parallelism that splits prompts over ranks, and some that spreads ranks over hosts.

    Raises:
        ConfigError: prefill context parallelism, decode context parallelism beside a drafter,
            ranks on several hosts beside data parallelism or another connector, or a drafter over
            the pipeline stages of vLLM's V1 model runner.
    """
    parallel = vllm_config.parallel_config
    if (size := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise ConfigError(
            f"prefill_context_parallel_size={size} splits a prompt over {size} ranks, and no rank "
            "has the state behind its part: a state needs all tokens before it; use "
            "--tensor-parallel-size."
        )
    size = getattr(parallel, "decode_context_parallel_size", 1)
    if size > 1 and vllm_config.speculative_config:
        # A drafter's layers may be spread over the ranks or not, and vLLM's runners differ in it.
        raise ConfigError(
            f"decode_context_parallel_size={size} with --speculative-config has not been tested: "
            "a drafter's layers may keep their tokens in another way than the model's; remove one "
            "of the two."
        )
    if spans_hosts(parallel):
        _check_hosts(vllm_config)
    stages = parallel.pipeline_parallel_size
    if stages > 1 and vllm_config.speculative_config and not vllm_config.use_v2_model_runner:
        # V1 calls ``wait_for_save`` of a step with drafts on the last stage only.
        raise ConfigError(
            f"pipeline_parallel_size={stages} with --speculative-config on vLLM's V1 model runner "
            "lets only the last stage save, so nothing could be hit; unset "
            "VLLM_USE_V2_MODEL_RUNNER=0, or remove one of the two."
        )


def why_no_decode_saves(vllm_config: "VllmConfig") -> str:
    """Return why ``save_decode_cache`` is refused, as a sentence; "" where it is served.

    With drafts a stage moves the state at a boundary to its block once it knows which drafts were
    accepted. The last stage does so at the end of the step, the others some steps later, when the
    state has been stored already.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    drafts, has_states = vllm_config.speculative_config, vllm_config.model_config.is_hybrid
    if stages == 1 or not drafts or not has_states:
        return ""
    return (
        f"LMCache option save_decode_cache=True with pipeline_parallel_size={stages} and "
        "--speculative-config would store states of generated tokens before every stage has them; "
        "set it to false, or remove one of the two flags."
    )


def spans_hosts(parallel: Any) -> bool:
    """Whether the ranks of this engine may be on several hosts (``--nnodes``, or placed by Ray).

    Args:
        parallel: vLLM's ParallelConfig.
    """
    return getattr(parallel, "nnodes_within_dp", 1) > 1 or placed_by_ray(parallel)


def _check_hosts(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError where ranks on several hosts cannot be asked."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    executor = parallel.distributed_executor_backend
    size = f"nnodes={getattr(parallel, 'nnodes_within_dp', 1)}"
    if placed_by_ray(parallel):
        size = f"distributed_executor_backend={getattr(executor, '__name__', executor)}"
        _check_ray(size, executor)
    elif executor != "mp":
        raise ConfigError(
            f"{size} with distributed_executor_backend={executor} "
            "has a scheduler that knows one host's ranks only; use --distributed-executor-backend "
            "mp."
        )
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"{size} with data_parallel_size={parallel.data_parallel_size} may spread each of "
            "several engines over hosts, whose ranks do not know each other; start them without "
            "--data-parallel-size, behind a router."
        )
    if transfer.get_from_extra_config(BESIDE_KEY, False):
        raise ConfigError(
            f"{size} with a MultiConnector passes on one connector's handshake only, and lookups "
            "between hosts need it; use LMCacheConnectorV1 alone."
        )
    if not zmq.has("curve"):
        raise ConfigError(
            f"{size} needs lookups between hosts to be encrypted, and this libzmq cannot (it has "
            "no CURVE); install pyzmq from its wheel."
        )


def _check_ray(which: str, executor: Any) -> None:
    """Raise ConfigError unless the executor is vLLM's second one for Ray."""
    if executor != "ray":
        raise ConfigError(
            f"{which} places ranks by Ray in a way of its own, and which rank has which part of "
            "the model is not known; use --distributed-executor-backend ray."
        )
    if not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):
        raise ConfigError(
            f"{which} with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is vLLM's first executor for Ray, "
            "with which nothing has been tested; unset it."
        )


def check_prefix_cache(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError if vLLM turned its prefix cache off while it built the layers."""
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching=False, set by vLLM while it built the model (its log says why), "
            "leaves nothing to store; choose another --attention-backend, unset "
            "VLLM_BATCH_INVARIANT, or remove --kv-transfer-config."
        )


def local_ranks(vllm_config: "VllmConfig") -> int:
    """Return the ranks of this engine on this machine, 1 where Ray places them.

    With those of the engines of data parallelism beside it, as far as vLLM tells an engine: it does
    for models with experts.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    if parallel is None or placed_by_ray(parallel):
        return 1
    ranks: int = parallel.local_world_size * max(1, parallel.data_parallel_size_local or 1)
    return ranks
