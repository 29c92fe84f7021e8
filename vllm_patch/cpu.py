# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's CPU backend. One function each."""

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger("vllm.lmcache_hybrid.cpu")

# The function that vLLM's own repair of ``keep_cpu_block_size`` calls.
CHOSEN_ONCE = "_preferred_block_size_for_backends"


def install() -> None:
    """Apply all repairs, on CPU only. Mutates vLLM's classes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_cpu_block_size()
        no_cpu_prefill_checkpoints()


def keep_cpu_block_size() -> None:
    """EngineCore's second ``VllmConfig.__post_init__`` must not reset the block size.

    Bug: after the engine is built, the start-up handshake runs
    ``__post_init__`` again (vllm/v1/engine/core.py, ``_perform_handshakes``)
    and ``CpuPlatform.check_and_update_config`` sets ``cache_config.block_size``
    back to 128.
    Symptom: the scheduler splits prefills on a 128-token grid, so no chunk
    ends on a state boundary: boundaries are never offered, or hold the state
    of another token. A vLLM that chooses the size only once is left alone.
    Seen in: vLLM 0.32.0; gone in 0.33.0.
    Remove when: vLLM >= 0.33 is the oldest supported version.
    """
    from vllm.platforms.cpu import CpuPlatform

    if CHOSEN_ONCE in inspect.getsource(CpuPlatform.update_block_size_for_backend):
        return
    original = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(original)
    def check_and_update_config(cls: type, vllm_config: "VllmConfig") -> None:
        cache_config = vllm_config.cache_config
        # num_gpu_blocks is set once the KV cache exists; then the size is fixed.
        settled = cache_config.block_size if cache_config.num_gpu_blocks else None
        original(cls, vllm_config)
        if settled is not None and cache_config.block_size != settled:
            logger.info_once(
                "Repaired vLLM's CPU platform: kept block size %d, which the "
                "handshake had reset to %d.",
                settled,
                cache_config.block_size,
            )
            cache_config.block_size = settled

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def no_cpu_prefill_checkpoints() -> None:
    """Mamba2 on CPU must not announce prefill checkpoints.

    Bug: ``MambaMixer2.get_kv_cache_spec`` announces one checkpoint block on
    every platform, but the CPU chunk scan returns no intermediate states.
    Symptom: "index ... is out of bounds" on the first prompt longer than a
    block with prefix caching on.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: the CPU kernel returns intermediate states, or the spec asks
    the platform.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    @functools.wraps(original)
    def get_kv_cache_spec(self: MambaMixer2, vllm_config: "VllmConfig") -> "KVCacheSpec | None":
        spec = original(self, vllm_config)
        if not getattr(spec, "num_prefill_checkpoint_blocks", 0):
            return spec
        logger.info_once(
            "Repaired vLLM's Mamba2 on CPU: prefill checkpoints turned off, "
            "which its kernel does not write."
        )
        return dataclasses.replace(
            spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
        )

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
