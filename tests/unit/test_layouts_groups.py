# SPDX-License-Identifier: Apache-2.0
"""Groups that overlay each other in one buffer, in every layout; their rows and records."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import is_served, page_bytes, plan_groups
from lmcache_hybrid.tools.doctor.model import kv_cache_config
from lmcache_hybrid.tools.tiny_families import FAMILIES
from lmcache_hybrid.worker.pages import GroupPages

from .helpers import engine_config
from .layouts import BLOCKS, FROM, Built, N, allocate, assert_a_block_moves, build

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = (N, 64, 32, 16)
L = KVCacheLayout


def full(heads: int, dtype: torch.dtype = torch.bfloat16, **more) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=N, num_kv_heads=heads, head_size=4, dtype=dtype, **more)


def window(heads: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=N, num_kv_heads=heads, head_size=4, dtype=torch.bfloat16, sliding_window=200
    )


def state(page: int | None, rows: int = 4) -> MambaSpec:
    return MambaSpec(
        block_size=N,
        shapes=((3, 16), (rows, 5, 5)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def pattern(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    """Three times the same layers one behind the other."""
    return {f"layer{i}": spec for i, spec in enumerate(specs * 3)}


def beside(attention: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return pattern(state(attention.page_size_bytes), state(attention.page_size_bytes), attention)


def two_states(heads: int) -> dict[str, KVCacheSpec]:
    page = full(heads).page_size_bytes
    return pattern(state(page), state(page, 7), full(heads))


def two_dtypes(heads: int) -> dict[str, KVCacheSpec]:
    """Some layers keep bfloat16 beside fp8 (``--kv-cache-dtype-skip-layers``)."""
    page = full(heads).page_size_bytes
    narrow = full(heads, torch.uint8, page_size_padded=page)
    return pattern(state(page), narrow, full(heads))


MLA = MLAAttentionSpec(block_size=N, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
MODELS: dict[str, Callable[[int], dict[str, KVCacheSpec]]] = {
    "states beside attention": lambda heads: beside(full(heads)),
    "states beside fp8": lambda heads: beside(full(heads, torch.uint8)),
    "states as large as pages": lambda heads: pattern(
        *[replace(state(None), shapes=((heads, 1024),), dtypes=(torch.bfloat16,))] * 2, full(heads)
    ),
    "states of two shapes": two_states,
    "attention of two types": two_dtypes,
    "states beside MLA": lambda _: beside(MLA),
    "windows beside attention": lambda heads: pattern(window(heads), full(heads)),
    "a drafter with more heads": lambda heads: pattern(
        state(None), state(None), full(heads), full(3 * heads)
    ),
}


@dataclass(frozen=True)
class Case:
    model: str
    layout: KVCacheLayout
    heads: int
    kernel: int

    @property
    def padded(self) -> bool:
        specs = MODELS[self.model](self.heads).values()
        attention = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        return any(spec.page_size_padded is not None for spec in attention)


# (which, vLLM's words, or ours); the first that applies. All others must be built.
NOT_SERVED: list[tuple[Callable[[Case], bool], str]] = [
    (
        lambda c: not c.layout.is_block_compact and c.model != "windows beside attention",
        "Specs with mixed HNC shapes need a block-compact layout",
    ),
    (lambda c: c.kernel < N and c.layout.is_block_outermost, "store blocks as dense, unpadded"),
    (lambda c: c.kernel < N and c.layout in (L.LHBNC, L.BHLNC) and c.heads > 1, "store blocks as"),
    (lambda c: c.kernel < N and c.padded, "store blocks as dense, unpadded pages"),
]
CASES = [
    Case(*case)
    for case in itertools.product(MODELS, KVCacheLayout, (1, 2, 8), KERNELS)
    if case[2] == 1 or case[0] != "states beside MLA"
]


def words_of(case: Case) -> str | None:
    return next((words for applies, words in NOT_SERVED if applies(case)), None)


def assert_all_groups_move(built: Built) -> None:
    plan = plan_groups(built.config)
    assert plan == plan_groups(generate_scheduler_kv_cache_config([built.config]))
    for index in plan.groups:
        group = built.config.kv_cache_groups[index]
        assert_a_block_moves(built, group, plan.blocks_per_record(index))


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", MODELS)
def test_a_block_of_each_group_moves(model, layout):
    for case in CASES:
        if (case.model, case.layout) != (model, layout):
            continue
        said, words = "", words_of(case)
        try:
            built = build(case.layout, MODELS[model](case.heads), case.kernel)
            plan_groups(built.config)
        except (AssertionError, ValueError, ConfigError) as error:
            said = str(error) or repr(error)
        assert (words or "") in said and bool(words) == bool(said), f"{case}: {said or 'built'}"
        if not words:
            try:
                assert_all_groups_move(built)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


def test_how_many_are_served():
    served = [case for case in CASES if words_of(case) is None]
    assert (len(CASES), len(served)) == (528, 211)
    assert {case.model for case in served} == set(MODELS)


def test_a_drafter_makes_groups_of_several_block_sizes():
    """Where layers lie apart vLLM makes blocks larger until all have as many bytes."""
    built = build(L.LBNHC, MODELS["a drafter with more heads"](1))
    sizes = [group.kv_cache_spec.block_size for group in built.config.kv_cache_groups]
    plan = plan_groups(built.config)
    assert sorted(set(sizes)) == [N, 3 * N] and plan.block_size == 3 * N
    assert plan.split == tuple((i, 3) for i in sorted(plan.groups) if sizes[i] == N)
    # Pages of 3 N tokens of each attention group, and one state.
    assert [plan.blocks_per_record(index) for index in plan.states] == [1] * len(plan.states)
    assert {plan.blocks_per_record(index) for index in plan.attention} == {1, 3}


@pytest.mark.parametrize("layout", [L.BLHNC, L.BLNHC])
def test_a_drafter_makes_groups_of_several_specs(layout):
    built = build(layout, MODELS["a drafter with more heads"](2))
    specs = [group.kv_cache_spec for group in built.config.kv_cache_groups]
    assert all(isinstance(spec, UniformTypeKVCacheSpecs) for spec in specs)
    plan = plan_groups(built.config)
    assert (plan.attention, plan.states) == ((2,), (0, 1))
    assert is_served(built.config)
    assert page_bytes(built.config.kv_cache_groups[2]) == 3 * 4 * full(2).page_size_bytes


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if FAMILIES[name].cpu and name != "llama"]
)
def test_groups_of_a_model_as_vllm_makes_them(family):
    """With N, padding and placement of vLLM's own, on CPU and with another layout."""
    config = engine_config(family, connector=None)
    groups = kv_cache_config(config).kv_cache_groups
    for layout, kernel in ((L.LBHNC, None), (L.LBNHC, 32), (L.BLNHC, None)):
        config.cache_config.kv_cache_layout = layout.name
        assert_all_groups_move(allocate(config, groups, layout, kernel))


# Rows and records


def pages_of(built: Built) -> GroupPages:
    (group,) = built.config.kv_cache_groups
    return GroupPages(group.layer_names, built.views, built.config.num_blocks)


@pytest.mark.parametrize(
    "layout, heads, kernel, rows",
    [
        (L.LBNHC, 2, N, 3),
        (L.LBNHC, 2, 32, 3),
        (L.LBHNC, 2, N, 3),
        (L.LBHNC, 2, 32, 3),
        (L.BLNHC, 2, N, 1),
        (L.BLHNC, 2, N, 1),
        (L.LHBNC, 2, N, 6),
        (L.BHLNC, 2, N, 6),
        (L.BHLNC, 1, N, 1),
        (L.LHBNC, 1, 32, 3),
    ],
)
def test_what_lies_together_is_one_row(layout, heads, kernel, rows):
    """A device queues one copy per row."""
    pages = pages_of(build(layout, pattern(full(heads)), kernel))
    assert len(pages.rows) == rows
    assert len(pages.pieces(1, torch.empty(pages.block_bytes, dtype=torch.uint8))) == rows
    assert pages.block_bytes == 3 * full(heads).page_size_bytes


@pytest.mark.parametrize(
    "layouts", [(L.LBNHC, L.BLNHC), (L.LBHNC, L.LHBNC, L.BLHNC, L.BHLNC)], ids=["NHC", "HNC"]
)
def test_merged_rows_make_the_same_record(layouts):
    """So where layers and blocks lie is no part of the layout, only the order inside a block."""
    records, texts = set(), set()
    for layout in layouts:
        built = build(layout, pattern(full(8)))
        pages = pages_of(built)
        for number, name in enumerate(pages.layers):
            block = built.logical(name)[FROM]
            values = torch.arange(number, number + block.numel()) * 7919 >> 5
            block.copy_(values.view(block.shape) & 255)
        record = torch.empty(pages.block_bytes, dtype=torch.uint8)
        pages.gather(FROM, record)
        records.add(record.numpy().tobytes())
        texts.add(pages.layout)
    assert len(records) == len(texts) == 1


def test_blocks_and_padding_are_no_part_of_the_layout():
    page = full(2).page_size_bytes
    narrow, wide = (
        pages_of(build(L.LBNHC, pattern(full(2, page_size_padded=page + more)), blocks=blocks))
        for more, blocks in ((32, BLOCKS), (640, BLOCKS + 3))
    )
    assert narrow.layout == wide.layout == pages_of(build(L.LBNHC, pattern(full(2)))).layout


def test_the_split_into_kernel_blocks_is_part_of_the_layout():
    """Heads lie inside of kernel blocks, so the order of bytes changes with it."""
    texts = [pages_of(build(L.LBHNC, pattern(full(2)), kernel)).layout[0] for kernel in KERNELS]
    assert len(set(texts)) == len(KERNELS)


def test_layers_that_share_a_kv_cache_are_stored_once():
    built = build(L.LBNHC, pattern(full(2)), 32)
    (group,) = built.config.kv_cache_groups
    alone = assert_a_block_moves(built, group)
    built.views["shared"] = built.views["layer1"]
    group.layer_names.append("shared")
    shared = assert_a_block_moves(built, group)
    assert (shared.layers, shared.layout, shared.block_bytes) == (
        alone.layers,
        alone.layout,
        alone.block_bytes,
    )
