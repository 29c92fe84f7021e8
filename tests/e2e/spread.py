# SPDX-License-Identifier: Apache-2.0
"""Ranks with decode context parallelism on vLLM's CPU backend, see :class:`SpreadWorker`.

vLLM's own code decides which rank holds which token, but for two kernels that it lacks on CPU: the
one that maps tokens to slots, and attention over the tokens of all ranks. Both are here, in torch.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker import block_table
from vllm.v1.worker.cpu_worker import CPUWorker


def slots_of(positions: torch.Tensor, size: int, ranks: int, turn: int) -> tuple:
    """Block, rank and slot there of each token, as ``ComputeSlotMappingKernel`` has them.

    Args:
        size: slots of a block on one rank.
        turn: tokens that a rank holds in turn (``cp_kv_cache_interleave_size``).
    """
    blocks, offsets = positions // (size * ranks), positions % (size * ranks)
    slots = offsets // (ranks * turn) * turn + offsets % turn
    return blocks, offsets // turn % ranks, slots


def map_slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """In place of ``ComputeSlotMappingKernel``; the names are its arguments'."""
    size, turn = KV_CACHE_BLOCK_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    starts = query_start_loc.tolist()
    for row, (start, end) in enumerate(zip(starts, starts[1:])):
        blocks, ranks, slots = slots_of(positions[start:end], size, TOTAL_CP_WORLD_SIZE, turn)
        own = block_table[row, blocks.long()].long() * size + slots
        slot_mapping[start:end] = torch.where(ranks == TOTAL_CP_RANK, own, PAD_ID)


def gathered(own: torch.Tensor) -> torch.Tensor:
    """What all ranks of the group have, by rank; gloo takes bytes only of every dtype."""
    group, data = get_dcp_group(), own.contiguous().view(torch.uint8)
    parts = [torch.empty_like(data) for _ in range(group.world_size)]
    torch.distributed.all_gather(parts, data, group=group.cpu_group)
    return torch.stack(parts).view(own.dtype)


class SpreadAttention:
    """What takes the place of ``CPUAttentionBackendImpl``'s methods of these names.

    A page is [heads, slots, keys and values]. Every rank gets the pages of all and attends to them
    with its own query heads, where kernels for GPUs exchange queries and partial results.
    """

    can_return_lse_for_decode = True

    def do_kv_cache_update(
        self: Any,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        tokens = (slot_mapping >= 0).nonzero().flatten()
        blocks, slots = slot_mapping[tokens] // kv_cache.shape[2], slot_mapping[tokens]
        kv_cache[blocks, :, slots % kv_cache.shape[2]] = torch.cat([key, value], -1)[tokens]

    def forward(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        group, size = get_dcp_group(), kv_cache.shape[2]
        turn = self.vllm_config.parallel_config.cp_kv_cache_interleave_size
        starts = attn_metadata.query_start_loc.tolist()
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            start, end = starts[row : row + 2]
            count = -(-length // (size * group.world_size))
            ids = attn_metadata.block_table[row, :count].long()
            pages = gathered(kv_cache[ids])
            blocks, ranks, slots = slots_of(torch.arange(length), size, group.world_size, turn)
            held = pages[ranks, blocks, :, slots].float()  # [tokens, heads, keys and values]
            keys, values = held.repeat_interleave(self.num_queries_per_kv, 1).chunk(2, -1)
            at = torch.arange(length - (end - start), length)
            seen = at[:, None] >= torch.arange(length)
            out = scaled_dot_product_attention(
                query[start:end].float().transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                seen,
                scale=self.scale,
            )
            output[start:end] = (
                out.transpose(0, 1).to(output.dtype).reshape(output[start:end].shape)
            )
        return output


def install() -> None:
    """Replace vLLM's kernels in this process."""
    kernel: Any = block_table.ComputeSlotMappingKernel.kernel  # vLLM's override of Triton's
    kernel._impl = map_slots
    impl: Any = CPUAttentionBackendImpl
    begin = impl.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.vllm_config = get_current_vllm_config()

    impl.__init__ = __init__
    for name in ("can_return_lse_for_decode", "do_kv_cache_update", "forward"):
        setattr(impl, name, vars(SpreadAttention)[name])


install()  # a rank is a process of its own, and knows only what it imports


class SpreadWorker(CPUWorker):
    """vLLM's CPU worker with these kernels."""
