# SPDX-License-Identifier: Apache-2.0
"""Repairs vLLM's own hits inside a block (``--prefix-match-unit``), with or without a connector."""

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

# V1 and V2; both import the function by name.
RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")

logger = init_logger("vllm.lmcache_hybrid.partial_hits")


@functools.cache
def copy_whole_pages() -> None:
    """Copy on write must copy every byte of a page. Idempotent.

    Bug: layers of different groups share memory, and ``copy_kv_cache_blocks_inplace`` copies
    one view for each address that views begin at. The first one is a state's, which leaves
    out the padding of its page: there the attention layer of the same address has tokens.
    It shows where one buffer holds all layers; with a buffer for each page it copies whole
    pages whatever the views say.
    Symptom: a hit inside a block reads attention pages whose end is of an earlier prompt:
    wrong tokens, without a connector too.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: the widest view at an address is copied, or all of them.
    """
    from vllm.v1.worker import utils

    original = utils.copy_kv_cache_blocks_inplace

    @functools.wraps(original)
    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[torch.Tensor],
        num_blocks: int,
        kv_cache_block_copies: Sequence[tuple[int, int]],
    ) -> None:
        if kv_cache_block_copies:
            caches = list(kv_caches)
            kept = without_covered(caches, num_blocks)
            if [id(cache) for cache in kept] != [id(cache) for cache in caches]:
                logger.info_once("Repaired vLLM's copy on write: it copies whole pages.")
            original(kept, num_blocks, kv_cache_block_copies)

    utils.copy_kv_cache_blocks_inplace = copy_kv_cache_blocks_inplace
    runner: Any
    for name in RUNNERS:  # one that is not imported yet takes it from there
        runner = sys.modules.get(name)
        if runner is not None:
            runner.copy_kv_cache_blocks_inplace = copy_kv_cache_blocks_inplace


@dataclass(frozen=True)
class _Page:
    """The page of block 0 in a view; addresses in bytes, ``end`` exclusive."""

    storage: int
    start: int
    end: int
    stride: int

    @classmethod
    def of(cls, cache: torch.Tensor, num_blocks: int) -> "_Page":
        per_block = cache.shape[0] // num_blocks
        steps = zip((per_block, *cache.shape[1:]), cache.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        start, size = cache.data_ptr(), cache.element_size()
        stride = cache.stride(0) * per_block * size
        return cls(cache.untyped_storage().data_ptr(), start, start + (last + 1) * size, stride)

    def covers(self, other: "_Page") -> bool:
        same = (self.storage, self.stride) == (other.storage, other.stride)
        within = self.start <= other.start and other.end <= self.end
        # Blocks that are not dense interleave, so their bounds mean nothing.
        return same and within and self.end - self.start <= self.stride


def without_covered(caches: list[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Leave out views whose bytes another view contains, so that each byte is copied once."""
    pages = [_Page.of(cache, num_blocks) for cache in caches]
    kept: list[int] = []
    for index in sorted(range(len(caches)), key=lambda i: pages[i].start - pages[i].end):
        if not any(pages[other].covers(pages[index]) for other in kept):
            kept.append(index)
    return [caches[index] for index in sorted(kept)]
