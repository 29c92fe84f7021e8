# SPDX-License-Identifier: Apache-2.0
"""KV caches as an engine makes them, and what a block is in them.

vLLM's own functions make groups, placement and views from layers' specs. What a block is,
is read off vLLM's logical views, never off our rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import vllm.v1.attention.backends.utils as backend_utils
import xxhash
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_hybrid.core.groups import page_bytes
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage.record_format import HEADER_BYTES, open_record, record_bytes, seal
from lmcache_hybrid.worker.pages import GroupPages

from .planning import get_kv_cache_config_from_groups, get_kv_cache_groups

BLOCKS, N = 9, 128
FROM, TO = 3, 7
KEY, FINGERPRINT = RecordKey(ATTENTION, 0, bytes(32), N), bytes(range(16))


@dataclass(frozen=True)
class Built:
    """A KV cache full of random bytes.

    Attributes:
        config: vLLM's.
        views: per layer, as they are registered with connectors.
        memory: uint8, all of what backs the views.
    """

    config: KVCacheConfig
    views: Mapping[str, torch.Tensor]
    memory: torch.Tensor

    def logical(self, name: str) -> torch.Tensor:
        """[block, (kernel block,) head, token, bytes]: what vLLM means by a block."""
        return group_kernel_blocks(self.views[name].view(torch.uint8), self.config.num_blocks)

    def over(self, memory: torch.Tensor) -> "Built":
        """The same KV cache over other memory."""
        views = {
            name: torch.empty(0, dtype=view.dtype).set_(
                memory.untyped_storage(), view.storage_offset(), view.shape, view.stride()
            )
            for name, view in self.views.items()
        }
        return Built(self.config, views, memory)


@cache
def vllm_config() -> VllmConfig:
    return VllmConfig()


def build(
    layout: KVCacheLayout, specs: Mapping[str, KVCacheSpec], kernel: int = N, blocks: int = BLOCKS
) -> Built:
    """From layers' specs to views. Raises what vLLM raises.

    Args:
        kernel: tokens per kernel block, of groups of attention.
    """
    config = vllm_config()
    config.cache_config.kv_cache_layout = None
    backend_utils.resolve_kv_cache_layout(config, [[layout.name]], specs.values())
    return allocate(config, get_kv_cache_groups(config, dict(specs)), layout, kernel, blocks)


def allocate(
    config: VllmConfig,
    groups: list[KVCacheGroupSpec],
    layout: KVCacheLayout,
    kernel: int | None,
    blocks: int = BLOCKS,
) -> Built:
    """The KV cache of ``groups``; ``kernel`` None leaves blocks whole."""
    config.cache_config.num_gpu_blocks_override = blocks
    made = get_kv_cache_config_from_groups(config, groups, 0)
    sizes = [
        g.kv_cache_spec.block_size if holds_states(g) or not kernel else kernel for g in groups
    ]
    views = allocate_kv_cache(made, torch.device("cpu"), layout, sizes)
    memory = torch.empty(0, dtype=torch.uint8).set_(next(iter(views.values())).untyped_storage())
    memory.copy_(noise(memory.numel()))
    return Built(made, views, memory)


def holds_states(group: KVCacheGroupSpec) -> bool:
    spec = group.kv_cache_spec
    first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return isinstance(first, MambaSpec)


@cache
def _noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (1 << 22,), dtype=torch.uint8, generator=generator)


def noise(size: int) -> torch.Tensor:
    known = _noise()
    return known[:size] if size <= known.numel() else known.repeat(-(-size // known.numel()))[:size]


def assert_a_block_moves(built: Built, group: KVCacheGroupSpec, count: int = 1) -> GroupPages:
    """Through a record, and as a device copies; no other byte changes.

    Args:
        count: blocks in a record. They lie in any order, and far from each other.
    """
    pages = GroupPages(group.layer_names, built.views, built.config.num_blocks, count)
    assert pages.block_bytes == page_bytes(group, pages.layers) * count
    sources, targets = (FROM, 6, 1)[:count], (TO, 2, 5)[:count]
    source, target = (FROM, TO) if count == 1 else (sources, targets)
    before = built.memory.clone()
    expected = built.over(before.clone())
    for name in group.layer_names:
        block = expected.logical(name)
        block[list(targets)] = block[list(sources)]

    record = np.zeros(record_bytes(pages.block_bytes), dtype=np.uint8)
    payload = torch.from_numpy(record)[HEADER_BYTES : HEADER_BYTES + pages.block_bytes]
    digests = pages.gather(source, payload)
    seal(memoryview(record), KEY, FINGERPRINT, digests)
    pages.scatter(target, payload, open_record(memoryview(record), KEY, FINGERPRINT))
    assert torch.equal(built.memory, expected.memory), "through a record"

    built.memory.copy_(before)
    buffer = torch.zeros(pages.block_bytes, dtype=torch.uint8)
    for page, part in pages.pieces(source, buffer):
        part.copy_(page)
    assert torch.equal(buffer, payload), "pieces and gather make other records"
    for page, part in pages.pieces(target, buffer):
        page.copy_(part)
    assert torch.equal(built.memory, expected.memory), "by pieces"
    built.memory.copy_(before)
    return pages


def orders(built: Built, group: KVCacheGroupSpec, pages: GroupPages) -> Iterator[tuple]:
    """Per layer what its part of a record means: the place of each byte in a logical block."""
    blocks = [built.logical(name)[FROM] for name in pages.layers]
    parts, start = [], 0
    for block in blocks:
        whole = block.unsqueeze(0) if block.dim() == 3 else block
        kernels, heads, tokens, content = whole.shape
        index = torch.arange(start, start + whole.numel()).view(heads, kernels, tokens, content)
        parts.append((whole, index.transpose(0, 1), (kernels, heads, tokens, content)))
        start += whole.numel()
    places = np.zeros(pages.block_bytes, dtype=np.int64)
    for shift in (0, 8, 16):
        for whole, index, _ in parts:
            whole.copy_((index >> shift) & 255)
        out = torch.empty(pages.block_bytes, dtype=torch.uint8)
        pages.gather(FROM, out)
        places |= out.numpy().astype(np.int64) << shift
    start = 0
    for whole, _, shape in parts:
        own = places[start : start + whole.numel()] - start
        assert (np.bincount(own, minlength=own.size) == 1).all(), "not layer by layer"
        yield shape, xxhash.xxh3_128_hexdigest(own)
        start += whole.numel()
