# SPDX-License-Identifier: Apache-2.0
"""Shapes of simulated deployments as vLLM's own configuration objects."""

import copy
import dataclasses
import functools
import math
import tempfile
from pathlib import Path

import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

import vllm_patch
from lmcache_hybrid.tools.tiny_models import make_model

from .model import RATIO
from .storage import N

# Blocks of N tokens in one of a group, by its letter; else one.
WIDE = {"d": 2, "t": 3}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Shape of one simulated deployment.

    Attributes:
        groups: one letter per KV cache group: "a" for attention, "m" for attention with pages that
            are equal on all ranks (MLA), "d" and "t" for attention with blocks of 2 N and 3 N,
            "w" for a window, "s" for states, "c" for scratch.
        window: tokens of sliding windows.
        batch: most tokens per step.
        hash_size: tokens per block hash, N or a divisor.
        retention: ``prefix_cache_retention_interval``.
        drafts: speculative tokens per step; ``mtp`` makes them count as MTP's.
        overlap: asynchronous scheduling.
        chunk_ends: ``lmcache.hybrid_checkpoint_tokens=chunk``, its default.
        share: ``lmcache.hybrid_share_prefills``.
        load_limit: ``lmcache.max_tokens_per_load``.
        part_bytes: bytes of records held at once while loading.
        answers: lookups are answered every so many steps; 0 for at once.
        runner: whose order of the connector's calls: "v1", "v2", or with drafts "v2 deferred".
        device: when queued work runs: "late", "early" or "random"; "" for no device.
        seed: of the order of threads and of a "random" device.
        interior: prefill chunks write a state inside (``num_prefill_checkpoint_blocks``), at
            multiples of this from their start (``prefill_checkpoint_alignment``); 0: they do not.
        junctions: ``enable_mamba_shared_prefix_checkpoint``: with ``mtp`` and a ``hash_size``
            below N a state is kept at a junction inside a block.
        stages: the ranks are the stages of a pipeline, each with other layers. Some have no
            layer of a group.
        waiting: records in RAM of which waiting requests may pin half; 0 for no bound.
        old_hashes: ``disable_lookahead_block_hashes``, which vLLM has since 0.33.
        dcp: ranks that share an attention block's tokens (decode context parallelism), so many
            in turn as ``interleave`` says.
        marked: the first attention group is known as that of MTP's layers; if not, vLLM takes
            every group for it.
    """

    groups: str = "sa"
    ranks: int = 1
    engines: int = 1
    blocks: int = 40
    batch: int = 3 * N
    seqs: int = 4
    hash_size: int = N
    retention: int | None = 0
    drafts: int = 0
    mtp: bool = False
    overlap: bool = False
    priority: bool = False
    load_limit: int = 0
    checkpoint: int = 0
    chunk_ends: bool = False
    share: bool = False
    save_decode: bool = False
    part_bytes: int = 1 << 20
    window: int = N
    answers: int = 0
    runner: str = "v1"
    device: str = ""
    seed: int = 0
    interior: int = 0
    junctions: bool = False
    faster: bool = False
    stages: bool = False
    waiting: int = 0
    old_hashes: bool = False
    marked: bool = True
    dcp: int = 1
    interleave: int = 1

    def layers(self, rank: int) -> list[list[str]]:
        """Names of a rank's layers, by group."""
        if not self.stages:
            return [[f"layer{group}"] for group in range(len(self.groups))]
        counts = [(rank + group) % 3 for group in range(len(self.groups))]
        return [
            [f"layer{group}.{rank}.{i}" for i in range(count)] for group, count in enumerate(counts)
        ]

    @property
    def longest(self) -> int:
        """Most tokens a request may have so that the pool holds it alone."""
        states = self.groups.count("s")
        spare = self.blocks - 2 - states * (3 + self.drafts + bool(self.interior))
        # At its worst a chunk needs all of its blocks in a window group too.
        return min(16, spare // (len(self.groups) - states) - 1) * N

    @property
    def common(self) -> int:
        """Tokens between two boundaries: whole blocks of every group."""
        return N * math.lcm(*self.wide.values()) * self.dcp

    @property
    def wide(self) -> dict[int, int]:
        """How many times N tokens a block has, by group; left out where N."""
        return {group: WIDE[kind] for group, kind in enumerate(self.groups) if kind in WIDE}

    @property
    def ring(self) -> int:
        """Tokens that scratch holds: those not compressed yet, and all drafts."""
        return RATIO * -(-(RATIO + self.drafts) // RATIO)

    def vllm_config(self, base: VllmConfig) -> VllmConfig:
        config = copy.copy(base)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = self.longest
        config.cache_config = cache = copy.copy(config.cache_config)
        cache.block_size = N
        cache.mamba_block_size = N
        cache.num_gpu_blocks = self.blocks
        cache.prefix_match_unit = self.hash_size
        cache.enable_mamba_shared_prefix_checkpoint = self.junctions
        config.scheduler_config = scheduler = copy.copy(config.scheduler_config)
        scheduler.max_num_batched_tokens = self.batch
        scheduler.max_num_scheduled_tokens = None
        scheduler.max_num_seqs = self.seqs
        scheduler.async_scheduling = self.overlap
        scheduler.policy = "priority" if self.priority else "fcfs"
        if self.stages:
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.pipeline_parallel_size = self.ranks
        if self.dcp > 1:
            config.parallel_config = parallel = copy.copy(config.parallel_config)
            parallel.tensor_parallel_size = self.ranks
            parallel.decode_context_parallel_size = self.dcp
            parallel.cp_kv_cache_interleave_size = self.interleave
        if self.drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=self.drafts,
                prompt_lookup_max=2,
                prompt_lookup_min=1,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
            if self.mtp:
                config.speculative_config.method = "mtp"
            config.speculative_config.disable_lookahead_block_hashes = self.old_hashes
        return config

    def kv_cache_config(self, rank: int = 0) -> KVCacheConfig:
        """A rank's; vLLM gives the first one's to the scheduler."""
        groups = []
        attention = next(letter for letter in self.groups if letter in "adtm")
        for index, letter in enumerate(self.groups):
            if letter in "adt":
                size = N * WIDE.get(letter, 1)
                spec = FullAttentionSpec(
                    block_size=size, num_kv_heads=1, head_size=2, dtype=torch.bfloat16
                )
            elif letter == "m":
                spec = MLAAttentionSpec(
                    block_size=N,
                    num_kv_heads=1,
                    head_size=4,
                    dtype=torch.bfloat16,
                    max_tp_shards=1,
                )
            elif letter == "c":
                spec = CircularBufferSpec(
                    block_size=self.ring,
                    num_kv_heads=1,
                    head_size=2 * N // self.ring,
                    dtype=torch.bfloat16,
                )
            elif letter == "w":
                spec = SlidingWindowSpec(
                    block_size=N,
                    num_kv_heads=1,
                    head_size=2,
                    dtype=torch.bfloat16,
                    sliding_window=self.window,
                )
            else:
                spec = MambaSpec(
                    block_size=N,
                    shapes=((2,),),
                    dtypes=(torch.int64,),
                    page_size_padded=N * 8,
                    mamba_cache_mode="align",
                    num_speculative_blocks=self.drafts,
                    num_prefill_checkpoint_blocks=int(self.interior > 0),
                    prefill_checkpoint_alignment=self.interior or None,
                )
            drafts = self.mtp and self.marked and index == self.groups.find(attention)
            groups.append(KVCacheGroupSpec(self.layers(rank)[index], spec, is_eagle_group=drafts))
        return KVCacheConfig(
            num_blocks=self.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention,
        )


# Shared by all programs of a process: starting them costs more than a program.


@functools.cache
def base_config() -> tuple[VllmConfig, StructuredOutputManager]:
    """vLLM's configuration of a small hybrid model with LMCacheConnectorV1."""
    vllm_patch.register()
    init_none_hash(sha256_cbor)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("lfm2", Path(folder, "lfm2"))
        config = EngineArgs(
            model=str(model),
            max_model_len=1024,
            max_num_batched_tokens=1024,
            enforce_eager=True,
            async_scheduling=False,
            kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        ).create_engine_config()
        return config, StructuredOutputManager(config)
