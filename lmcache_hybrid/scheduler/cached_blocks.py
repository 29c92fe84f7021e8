# SPDX-License-Identifier: Apache-2.0
"""Says whether a block that vLLM hands off still holds the state of its boundary.

vLLM queues a hand-off when it hashes the block. With asynchronous scheduling, or with drafts since
0.33, it does so when a step has ended; the next pass may free that block, and give it to another
request, before it passes the hand-off on. A block that is given away loses its hash.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

# A state that vLLM hands off: (KV cache group, block id, boundary in tokens).
Offer = tuple[int, int, int]


class CachedBlocks:
    """What vLLM's prefix cache knows its blocks as. Used by the scheduler's thread only."""

    def __init__(self, pool: "BlockPool | None", hash_block_size: int) -> None:
        """
        Args:
            pool: vLLM's; None holds no state at all.
            hash_block_size: tokens per entry of ``request.block_hashes``.
        """
        self._pool, self._hash_block_size = pool, hash_block_size

    def hold(self, request: "Request", offer: Offer) -> bool:
        """Whether the offered block is known as the request's at the offered boundary."""
        group, block_id, tokens = offer
        end = tokens // self._hash_block_size
        if self._pool is None or not 0 < end <= len(request.block_hashes):
            return False
        block = self._pool.blocks[block_id]
        known_as = make_block_hash_with_group_id(request.block_hashes[end - 1], group)
        return block.block_hash == known_as and block.block_hash_num_tokens == tokens
