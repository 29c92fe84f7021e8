# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lmcache_hybrid.core.errors import ConfigError, RecordError
from lmcache_hybrid.storage.record_format import CHUNK_BYTES, digests_of
from lmcache_hybrid.worker.pages import GroupPages

from .helpers import PLAN, make_pages, state_view

BLOCKS, PAGE = 7, 256


def random_bytes(size: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def scatter(pages: GroupPages, block: int, data: torch.Tensor) -> None:
    pages.scatter(block, data, digests_of(memoryview(data.numpy())))


def gather(pages: GroupPages, block: int, out: torch.Tensor) -> None:
    assert pages.gather(block, out) == digests_of(memoryview(out.numpy()))


def attention_cache(seed: int = 0) -> torch.Tensor:
    return random_bytes(BLOCKS * PAGE, seed).view(torch.bfloat16).view(BLOCKS, 2, 8, 8)


def test_gather_is_the_layers_bytes_in_order():
    caches = {"a": attention_cache(1), "b": attention_cache(2)}
    pages = GroupPages(["b", "a"], caches)
    out = torch.empty(pages.block_bytes, dtype=torch.uint8)
    gather(pages, 3, out)
    expected = [caches[name][3].flatten().view(torch.uint8) for name in ("b", "a")]
    assert torch.equal(out, torch.cat(expected))
    assert pages.block_bytes == 2 * PAGE and pages.num_blocks == BLOCKS


@pytest.mark.parametrize("block", [1, 3, BLOCKS - 1])
@pytest.mark.parametrize("state_bytes", [1, 100, PAGE])
def test_scatter_writes_one_states_bytes_and_no_padding(block, state_bytes):
    buffer = random_bytes(BLOCKS * PAGE).view(torch.int8).view(BLOCKS, PAGE)
    before = buffer.clone()
    pages = GroupPages(["m"], {"m": state_view(buffer, state_bytes)})
    assert pages.block_bytes == state_bytes
    data = random_bytes(state_bytes, 5)
    scatter(pages, block, data)
    expected = before.clone()
    expected[block, :state_bytes] = data.view(torch.int8)
    assert torch.equal(buffer, expected)
    out = torch.empty(state_bytes, dtype=torch.uint8)
    gather(pages, block, out)
    assert torch.equal(out, data)


def test_gather_changes_no_page():
    buffer, pages = make_pages()
    before = buffer.clone()
    for group in pages.values():
        gather(group, 4, torch.empty(group.block_bytes, dtype=torch.uint8))
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("group", [*PLAN.attention, *PLAN.states])
def test_groups_that_overlay_each_other_touch_their_own_block_only(group):
    """All groups share one buffer; block ids keep them apart."""
    buffer, pages = make_pages()
    before = buffer.clone()
    scatter(pages[group], 5, random_bytes(pages[group].block_bytes))
    changed = (buffer != before).any(dim=2)
    assert changed[:, 5].all()
    changed[:, 5] = False
    assert not changed.any()


def test_block_moves_between_ids_bit_for_bit():
    buffer, pages = make_pages()
    for group in pages.values():
        out = torch.empty(group.block_bytes, dtype=torch.uint8)
        gather(group, 2, out)
        scatter(group, 9, out)
        again = torch.empty_like(out)
        gather(group, 9, again)
        assert torch.equal(out, again)
    assert torch.equal(buffer[:, 2], buffer[:, 9])  # the attention group covers the page


def test_a_view_that_starts_inside_its_storage():
    buffer = random_bytes(3 * BLOCKS * PAGE).view(torch.int8).view(3, BLOCKS, PAGE)
    pages = GroupPages(["m"], {"m": state_view(buffer[1], 40)})
    out = torch.empty(40, dtype=torch.uint8)
    gather(pages, 2, out)
    assert torch.equal(out.view(torch.int8), buffer[1, 2, :40])


@pytest.mark.parametrize("block", [0, -1, BLOCKS, BLOCKS + 5])
@pytest.mark.parametrize("copy", [gather, scatter])
def test_refuses_the_null_block_and_blocks_that_do_not_exist(block, copy):
    cache = attention_cache()
    before = cache.clone()
    pages = GroupPages(["a"], {"a": cache})
    with pytest.raises(ValueError):
        copy(pages, block, random_bytes(PAGE))
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    "data",
    [random_bytes(PAGE - 1), random_bytes(PAGE + 1), torch.zeros(PAGE, dtype=torch.int8)],
)
@pytest.mark.parametrize("copy", [gather, scatter])
def test_refuses_memory_of_another_size_or_type(data, copy):
    pages = GroupPages(["a"], {"a": attention_cache()})
    with pytest.raises(ValueError):
        copy(pages, 1, data)


@pytest.mark.parametrize(
    "cache, rows",
    [
        # K and V apart, the block in the second dimension.
        (torch.zeros(2, BLOCKS, 8, 8).transpose(0, 1), 2),
        (torch.zeros(BLOCKS, 8, 16)[:, :, ::2], 8 * 8),  # slow, and right
        (torch.zeros(8, BLOCKS, 4).permute(1, 2, 0), 8),
    ],
)
def test_blocks_in_several_pieces_are_copied_piece_by_piece(cache, rows):
    cache.copy_(random_bytes(cache.numel()).view(cache.shape))
    before = cache.clone()
    pages = GroupPages(["a"], {"a": cache})
    assert len(pages.rows) == rows
    out = torch.empty(pages.block_bytes, dtype=torch.uint8)
    gather(pages, 3, out)
    scatter(pages, 5, out)
    before[5] = before[3]
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(BLOCKS, 8).as_strided((BLOCKS, 4, 8), (8, 0, 1)),
        torch.zeros(64).as_strided((BLOCKS, 8), (4, 1)),  # blocks overlap
        torch.zeros(64).as_strided((BLOCKS, 4, 2), (8, 1, 1)),
        torch.zeros(1, 8).expand(BLOCKS, 8),
        torch.zeros(64).as_strided((2 * BLOCKS, 4), (2, 1)),  # kernel blocks overlap
    ],
)
def test_refuses_values_that_share_bytes(cache):
    with pytest.raises(ConfigError) as error:
        GroupPages(["a"], {"a": cache}, BLOCKS)
    assert str(error.value) == (
        f"KV cache of layer a with shape {tuple(cache.shape)} and strides {cache.stride()} has "
        "values that share bytes, so its blocks cannot be stored one by one; set "
        "VLLM_KV_CACHE_LAYOUT=LBNHC or choose another --attention-backend."
    )


@pytest.mark.parametrize("cache", [torch.zeros(BLOCKS), torch.zeros(BLOCKS, 0), torch.zeros(0, 8)])
def test_refuses_a_tensor_without_blocks(cache):
    """Also the raw memory that vLLM registers for specs without a view per layer."""
    with pytest.raises(ConfigError, match=r"layer a .* has no blocks.* --attention-backend or"):
        GroupPages(["a"], {"a": cache})


@pytest.mark.parametrize("blocks", [2, 4, BLOCKS - 1, BLOCKS + 1, 2 * BLOCKS])
def test_refuses_another_number_of_blocks(blocks):
    with pytest.raises(ConfigError) as error:
        GroupPages(["a"], {"a": attention_cache()}, blocks)
    assert str(error.value) == (
        f"KV cache of layer a has {BLOCKS} blocks, which is not a multiple of vLLM's {blocks}; "
        "choose another --attention-backend."
    )


def test_kernel_blocks_are_grouped_into_blocks():
    cache = random_bytes(3 * BLOCKS * PAGE).view(3 * BLOCKS, 4, PAGE // 4)
    pages = GroupPages(["a"], {"a": cache}, BLOCKS)
    assert (pages.num_blocks, pages.block_bytes) == (BLOCKS, 3 * PAGE)
    out = torch.empty(3 * PAGE, dtype=torch.uint8)
    gather(pages, 2, out)
    assert torch.equal(out, cache[6:9].flatten())


@pytest.mark.parametrize("made", [False, True], ids=["normal mode", "inference mode"])
def test_any_thread_writes_to_a_kv_cache_of_inference_mode(made):
    """``copy_`` into an inference tensor outside of inference mode is an error."""
    with torch.inference_mode():
        cache = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
    assert cache.is_inference()
    with torch.inference_mode(made):
        pages = GroupPages(["a"], {"a": cache})
    data = random_bytes(PAGE)

    def load() -> None:
        assert not torch.is_inference_mode_enabled()
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            cache[2].copy_(data)
        for page, part in pages.pieces(2, data):
            page.copy_(part)
        scatter(pages, 3, data)

    with ThreadPoolExecutor(1) as thread, torch.inference_mode():
        thread.submit(load).result()
        for page, part in pages.pieces(4, data):
            page.copy_(part)
    assert all(torch.equal(cache[block], data) for block in (2, 3, 4))


@pytest.mark.parametrize("caches", [{}, {"a": [torch.zeros(2, 2)]}])
def test_refuses_a_layer_without_a_single_tensor(caches):
    with pytest.raises(ConfigError, match=r"^layer a has no single KV cache tensor"):
        GroupPages(["a"], caches)


def test_layout_tells_shapes_strides_and_types_apart():
    """It is part of the fingerprint, so equal layouts must mean equal bytes."""
    buffer = torch.zeros(BLOCKS, PAGE, dtype=torch.int8)
    views = [
        attention_cache(),
        attention_cache().view(torch.float16),
        attention_cache().view(BLOCKS, 8, 2, 8),
        torch.zeros(BLOCKS, 8, 2, 8, dtype=torch.bfloat16).permute(0, 2, 1, 3).contiguous(),
        state_view(buffer, 100),
        state_view(buffer, 101),
    ]
    layouts = [GroupPages(["a"], {"a": view}).layout for view in views]
    assert layouts[0] == layouts[3]
    assert len(set(layouts)) == len(views) - 1


def test_padding_is_no_part_of_the_layout():
    """The same state under other padding is the same bytes."""
    narrow = state_view(torch.zeros(BLOCKS, 128, dtype=torch.int8), 100)
    wide = state_view(torch.zeros(BLOCKS, 256, dtype=torch.int8), 100)
    assert GroupPages(["m"], {"m": narrow}).layout == GroupPages(["m"], {"m": wide}).layout


@pytest.mark.parametrize("rows", [(7,), (CHUNK_BYTES,), (CHUNK_BYTES - 1, 2, 3 * CHUNK_BYTES)])
def test_rows_that_end_anywhere_in_a_chunk(rows):
    caches = {f"l{i}": random_bytes(3 * size, i).view(3, size) for i, size in enumerate(rows)}
    pages = GroupPages(list(caches), caches)
    out = torch.empty(sum(rows), dtype=torch.uint8)
    gather(pages, 1, out)
    assert torch.equal(out, torch.cat([cache[1] for cache in caches.values()]))
    for page, part in pages.pieces(1, out):
        assert torch.equal(page, part)
    scatter(pages, 2, out)
    for cache in caches.values():
        assert torch.equal(cache[1], cache[2])


@pytest.mark.parametrize("block", [1, (1, 4), (4, 2, 3)])
def test_spans_are_the_addresses_of_the_pieces(block):
    """One layer lies in two pieces in every block, two others in memory of their own."""
    split = torch.zeros(2, BLOCKS, PAGE, dtype=torch.uint8).transpose(0, 1)
    caches = {"a": split, "b": torch.zeros(BLOCKS, 7, dtype=torch.uint8), "c": attention_cache()}
    pages = GroupPages(list(caches), caches, count=1 if block == 1 else len(block))
    data = torch.empty(pages.block_bytes, dtype=torch.uint8)
    spans, pieces = pages.spans(block, data), pages.pieces(block, data)
    assert len(pieces) == 4 * pages.count
    assert spans.pages.tolist() == [page.data_ptr() for page, _ in pieces]
    assert spans.host.tolist() == [part.data_ptr() for _, part in pieces]
    assert spans.sizes.tolist() == [part.numel() for _, part in pieces]
    assert spans.memory.tolist() == [page.untyped_storage().data_ptr() for page, _ in pieces]
    assert {each.dtype for each in spans} == {np.dtype(np.int64)}


@pytest.mark.parametrize("block", [0, BLOCKS, -1])
def test_spans_never_leave_the_blocks(block):
    pages = GroupPages(["a"], {"a": torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="cannot be copied"):
        pages.spans(block, torch.empty(PAGE, dtype=torch.uint8))
    with pytest.raises(ValueError, match="are not a block of"):
        pages.spans(1, torch.empty(PAGE + 1, dtype=torch.uint8))


def test_no_byte_of_a_damaged_chunk_reaches_a_page():
    size = 2 * CHUNK_BYTES + 5
    cache = torch.zeros(2, size, dtype=torch.uint8)
    pages, data = GroupPages(["a"], {"a": cache}), random_bytes(size)
    digests = digests_of(memoryview(data.numpy()))
    data[CHUNK_BYTES + 3] ^= 1
    with pytest.raises(RecordError, match="checksum"):
        pages.scatter(1, data, digests)
    assert torch.equal(cache[1, :CHUNK_BYTES], data[:CHUNK_BYTES])
    assert not cache[1, CHUNK_BYTES:].any()
