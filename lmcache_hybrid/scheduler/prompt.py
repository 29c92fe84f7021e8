# SPDX-License-Identifier: Apache-2.0
"""Derives a request's cacheable prefix and its keys."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.identity.adapters import Adapter
from lmcache_hybrid.identity.media import may_cache
from lmcache_hybrid.protocol.prefix import Prefix

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prefix_of(
    request: "Request",
    block_size: int,
    hashes_per_block: int,
    tags: tuple[tuple[str, str], ...] | None = (),
) -> Prefix | None:
    """Return the prompt's whole blocks; None when the request must not be cached.

    vLLM's block hashes cover tokens, multimodal items, LoRA name and path, and cache salt.
    Tags add the user's ``lmcache.tag.*`` and, once the ranks have reported it, the content of the
    LoRA adapter.

    Args:
        tags: the user's, see :class:`.request_options.RequestOptions`.
    """
    if tags is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    if not may_cache(request):
        return None
    lora = request.lora_request
    adapter = None if lora is None else Adapter(lora)
    blocks = request.num_prompt_tokens // block_size
    return extended(Prefix((), tags, adapter), request, blocks, hashes_per_block)


def extended(prefix: Prefix, request: "Request", blocks: int, hashes_per_block: int) -> Prefix:
    """Lengthen ``prefix`` to the request's first ``blocks`` blocks, as far as they have hashes.

    Beside a drafter a full block may have none yet, see :class:`.step_ends.Drafter`.
    """
    first = len(prefix.hashes)
    blocks = min(blocks, len(request.block_hashes) // hashes_per_block)
    ends = slice((first + 1) * hashes_per_block - 1, blocks * hashes_per_block, hashes_per_block)
    more = tuple(map(bytes, request.block_hashes[ends]))
    return msgspec.structs.replace(prefix, hashes=prefix.hashes + more)


def inner_hashes(
    request: "Request", boundaries: Iterable[int], plan: GroupPlan
) -> dict[int, bytes]:
    """vLLM's hash at those ``boundaries`` (multiples of U, in tokens) that lie inside a block."""
    inside = (tokens for tokens in boundaries if tokens % plan.block_size)
    return {tokens: bytes(request.block_hashes[tokens // plan.unit - 1]) for tokens in inside}
