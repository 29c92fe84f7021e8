# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's own hits inside a block (``--prefix-match-unit``). One function each."""

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_patch.configuration import is_ours

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

# V1 and V2; both import the function by name.
RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")

logger = init_logger("vllm.lmcache_hybrid.partial_hits")


def install() -> None:
    """Apply the repairs of the scheduler. Mutates vLLM's classes."""
    stop_at_the_next_boundary()
    copy_what_is_computed()
    publish_no_state_late()


def stop_at_the_next_boundary() -> None:
    """A prefill chunk that starts inside a block must end at that block's end.

    Bug: with ``--prefix-match-unit`` a request can resume inside a block. Where the model
    writes a checkpoint inside its last chunk (``num_prefill_checkpoint_blocks``), that chunk
    runs past the end of the block it started in, and the block gets the hash of its end.
    Symptom: the state of an earlier token is found, and offered to connectors, as that of the
    boundary: the next request with this prefix gets wrong tokens, with or without a connector.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``is_mamba_prefill_checkpoint_valid`` declines a start inside a block.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._mamba_block_aligned_split

    @functools.wraps(original)
    def _mamba_block_aligned_split(
        self: Scheduler, request: "Request", num_new_tokens: int, *computed: int, **more: int
    ) -> int:
        count = original(self, request, num_new_tokens, *computed, **more)
        if not is_ours(self.vllm_config):
            return count
        start = request.num_computed_tokens + sum(computed) + sum(more.values())
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        to_boundary = -start % self.cache_config.block_size
        if not to_boundary or start >= prefill_end:
            return count
        return min(count, to_boundary)

    Scheduler._mamba_block_aligned_split = _mamba_block_aligned_split


def publish_no_state_late() -> None:
    """A state inside a block must not be published when the request's next step overwrites it.

    Bug: with a drafter of several MTP modules whose KV cache group vLLM does not know, vLLM takes
    every group for it and publishes the last tokens of a step with the request's next step (as in
    :func:`.scheduler_repairs.publish_where_steps_ended`). The
    state of a token inside a block is in the request's running block, which has gone on by then.
    Symptom: with ``--prefix-match-unit`` the state of a later token is found, and offered to
    connectors, as that of the boundary: the next request with this prefix gets wrong tokens, with
    or without a connector.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``KVCacheCoordinator.get_num_cacheable_tokens`` leaves out no tokens of states.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    begin, publish = KVCacheCoordinator.__init__, MambaManager._cache_partial_tail_block

    @functools.wraps(begin)
    def __init__(self: KVCacheCoordinator, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for manager in self.single_type_managers:
            manager._hybrid_late = self.num_reprefillable_tokens

    @functools.wraps(publish)
    def _cache_partial_tail_block(
        self: MambaManager, request: "Request", num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        late = self.use_eagle and self._hybrid_late
        # A checkpoint inside a chunk has a block of its own.
        if late and num_tokens % self.block_size and request.request_id not in self._checkpoints:
            return None
        return publish(self, request, num_tokens, *args, **kwargs)

    KVCacheCoordinator.__init__ = __init__
    MambaManager._cache_partial_tail_block = _cache_partial_tail_block


def copy_what_is_computed() -> None:
    """A hit inside an attention block must wait for the step that computes this block.

    Bug: with ``--prefix-match-unit`` a hit can end inside a block, of which the request then gets
    a copy. Blocks get their hash when they are allocated, and copies are made before the step's
    forward: of a block that another request computes in this step nothing is there yet. vLLM's
    states wait for the next step, its attention does not.
    Symptom: of two requests that arrive together and share more than the cached state has seen,
    the second one gets wrong tokens, with or without a connector. A connector stores them too.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``FullAttentionManager`` has ``cached_blocks_this_step``, as ``MambaManager``.
    """
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        SingleTypeKVCacheManager,
    )

    start, cache, count = (
        SingleTypeKVCacheManager.new_step_starts,
        FullAttentionManager.cache_blocks,
        SingleTypeKVCacheManager.get_num_blocks_to_allocate,
    )

    @functools.wraps(start)
    def new_step_starts(self: SingleTypeKVCacheManager) -> None:
        start(self)
        vars(self).pop("_hybrid_uncomputed", None)

    @functools.wraps(cache)
    def cache_blocks(
        self: FullAttentionManager, request: "Request", *args: Any, **kwargs: Any
    ) -> None:
        if self.block_size == self.block_pool.hash_block_size:
            return cache(self, request, *args, **kwargs)
        first = self.num_cached_block.get(request.request_id, 0)
        blocks = self.req_to_blocks.get(request.request_id, ())[first:]
        before = [block.block_hash for block in blocks]
        cache(self, request, *args, **kwargs)
        fresh = {block.block_id for block, had in zip(blocks, before) if block.block_hash != had}
        vars(self).setdefault("_hybrid_uncomputed", set()).update(fresh)

    @functools.wraps(count)
    def get_num_blocks_to_allocate(
        self: SingleTypeKVCacheManager,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: "Sequence[KVCacheBlock]",
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        uncomputed = vars(self).get("_hybrid_uncomputed", ())
        if (
            uncomputed
            and self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens)
            and new_computed_blocks[-1].block_id in uncomputed
        ):
            return self.block_pool.num_gpu_blocks + 1  # more than there are: not in this step
        return count(
            self,
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            *args,
            **kwargs,
        )

    SingleTypeKVCacheManager.new_step_starts = new_step_starts
    FullAttentionManager.cache_blocks = cache_blocks
    SingleTypeKVCacheManager.get_num_blocks_to_allocate = get_num_blocks_to_allocate


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
