# SPDX-License-Identifier: Apache-2.0
"""Every KV cache that vLLM can build for layers of one kind, a block through a record.

What vLLM cannot build is listed with vLLM's words: what becomes buildable fails here, too.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.ops.ultraquant.format import slot_size
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_hybrid.core.errors import ConfigError

from .layouts import N, assert_a_block_moves, build, orders

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 3
HEADS, KERNELS = (1, 2, 8), (N, 64, 32, 16)


# What vLLM can size


def full(heads: int, dtype=torch.bfloat16, mode=KVQuantMode.NONE, **more) -> FullAttentionSpec:
    shape = {"block_size": N, "num_kv_heads": heads, "head_size": 4}
    return FullAttentionSpec(**(shape | more), dtype=dtype, kv_quant_mode=mode)


def mla(_: int, dtype=torch.bfloat16, mode=KVQuantMode.NONE, **more) -> MLAAttentionSpec:
    shape = {"block_size": N, "num_kv_heads": 1, "head_size": 24}
    return MLAAttentionSpec(**(shape | more), dtype=dtype, kv_quant_mode=mode)


def triton(mode: KVQuantMode, dtype: torch.dtype) -> Callable[[int], AttentionSpec]:
    return lambda heads: TritonAttentionBackend.customize_spec(full(heads, dtype, mode))


def turboquant(mode: KVQuantMode) -> Callable[[int], AttentionSpec]:
    return lambda heads: TurboQuantAttentionBackend.customize_spec(
        full(heads, torch.uint8, mode, head_size=16)
    )


def nvfp4(heads: int) -> FullAttentionSpec:
    """As FlashInfer's backend packs it, which cannot be imported without flashinfer."""
    content, slots = nvfp4_kv_cache_full_dim(16), 2 * heads
    more = {"num_head_slots": slots, "state_content_bytes": content}
    return full(heads, torch.uint8, KVQuantMode.NVFP4, **more)


def ultraquant(heads: int) -> FullAttentionSpec:
    """As its backend packs it, which cannot be imported without a GPU's Triton."""
    more = {"head_size": 32, "state_content_bytes": slot_size(32)}
    return full(heads, torch.uint8, KVQuantMode.ULTRAQUANT_4BIT, **more)


Q = KVQuantMode
KINDS: dict[str, Callable[[int], AttentionSpec]] = {
    "bfloat16": full,
    "float32": lambda heads: full(heads, torch.float32),
    "fp8": lambda heads: full(heads, torch.uint8, Q.FP8_PER_TENSOR),
    "float8": lambda heads: full(heads, torch.float8_e4m3fn, Q.FP8_PER_TENSOR),
    "int8 per token and head": triton(Q.INT8_PER_TOKEN_HEAD, torch.int8),
    "fp8 per token and head": triton(Q.FP8_PER_TOKEN_HEAD, torch.uint8),
    "int4 per token and head": triton(Q.INT4_PER_TOKEN_HEAD, torch.uint8),
    "nvfp4": nvfp4,
    **{mode.name: turboquant(mode) for mode in Q if mode.is_turboquant},
    "ultraquant": ultraquant,
    "K and V of other sizes": lambda heads: full(heads, head_size_v=2),
    "K and V in two slots": lambda heads: full(heads, num_head_slots=2, state_content_bytes=32),
    "padded": lambda heads: full(heads, page_size_padded=full(heads).page_size_bytes + 96),
    "padded fp8": lambda heads: full(heads, torch.uint8, page_size_padded=heads << 11),
    "aligned": lambda heads: full(heads, block_stride_alignment=1000),
    "MLA": mla,
    "MLA fp8": lambda _: mla(1, torch.uint8, Q.FP8_PER_TENSOR),
    "MLA fp8_ds_mla": lambda _: mla(
        1, torch.uint8, Q.FP8_PER_TENSOR, state_content_bytes=656, block_size=N
    ),
    "MLA nvfp4_ds_mla": lambda _: mla(1, torch.uint8, Q.NVFP4_DS_MLA, state_content_bytes=352),
    "MLA int8 per token": lambda _: MLACommonBackend.customize_spec(
        mla(1, torch.int8, Q.INT8_PER_TOKEN_HEAD)
    ),
    "MLA padded": lambda _: mla(1, alignment=4096 + 512),
    "MLA aligned": lambda _: align_blocks_to_rows(mla(1), 5),
    "MLA of four tokens a state": lambda _: mla(1, tokens_per_state=4),
    "two states a token": lambda heads: full(heads, tokens_per_state=Fraction(1, 2)),
}
# One latent vector for all heads.
ONE_HEAD = {name for name in KINDS if name.startswith("MLA")}


def test_every_quantisation_is_there():
    refused = {mode for mode in KVQuantMode if mode.name.startswith("OCTAVE")}
    assert {kind(2).kv_quant_mode for kind in KINDS.values()} == set(KVQuantMode) - refused


# What vLLM cannot build


@dataclass(frozen=True)
class Case:
    kind: str
    layout: KVCacheLayout
    heads: int
    kernel: int

    @property
    def spec(self) -> AttentionSpec:
        return KINDS[self.kind](self.heads)

    @property
    def split(self) -> bool:
        return self.kernel < N

    @property
    def heads_outside(self) -> bool:
        """Heads lie outside of blocks or of layers, and there are several."""
        return not self.layout.is_block_compact and self.spec.num_heads > 1

    @property
    def padded(self) -> bool:
        return self.spec.page_size_padded is not None

    @property
    def aligned(self) -> bool:
        return self.spec.block_stride_alignment is not None


APART = "does not store blocks as dense, unpadded pages"
L = KVCacheLayout
# (which, vLLM's words); the first that applies. All others must be built.
NOT_BUILT: list[tuple[Callable[[Case], bool], str]] = [
    (lambda c: c.aligned and c.layout is L.LHBNC, "cannot pad pages"),
    (lambda c: c.padded and c.heads_outside, "Page padding requires dimensions outside"),
    (lambda c: c.split and c.layout.is_block_outermost, APART),
    (lambda c: c.split and c.heads_outside, APART),
    (lambda c: c.split and (c.padded or c.aligned), APART),
]
CASES = [
    Case(kind, layout, heads, kernel)
    for kind, layout, heads, kernel in itertools.product(KINDS, KVCacheLayout, HEADS, KERNELS)
    if heads == 1 or kind not in ONE_HEAD
]


def words_of(case: Case) -> str | None:
    return next((words for applies, words in NOT_BUILT if applies(case)), None)


@cache
def outcome(case: Case) -> tuple[str, tuple]:
    """(vLLM's words or "", per layer (layout, dtype, meaning))."""
    names = [f"l{i}" for i in range(LAYERS)]
    try:
        built = build(case.layout, dict.fromkeys(names, case.spec), case.kernel)
    except (AssertionError, ValueError) as error:
        return str(error) or repr(error), ()
    (group,) = built.config.kv_cache_groups
    pages = assert_a_block_moves(built, group)
    views = [str(built.views[name].dtype) for name in names]
    return "", tuple(zip(pages.layout, views, orders(built, group, pages)))


# The product


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_moves_through_a_record(kind, layout):
    for case in CASES:
        if (case.kind, case.layout) != (kind, layout):
            continue
        words = words_of(case)
        try:
            said, _ = outcome(case)
        except (AssertionError, ConfigError) as error:
            raise AssertionError(f"{case}: {error}") from error
        assert (words or "") in said and bool(words) == bool(said), f"{case}: {said or 'built'}"


def test_how_many_vllm_builds():
    """Of every layout, heads and kernel block some; the list above hides nothing."""
    built = [case for case in CASES if words_of(case) is None]
    assert (len(CASES), len(built)) == (1560, 762)
    assert {case.layout for case in built} == set(KVCacheLayout)
    for heads, kernel in itertools.product(HEADS, KERNELS):
        assert any((case.heads, case.kernel) == (heads, kernel) for case in built)


def test_equal_layouts_mean_equal_bytes_and_only_they_do():
    meanings: dict[str, set] = {}
    layouts: dict[tuple, set] = {}
    for case in CASES:
        for layout, dtype, meaning in outcome(case)[1]:
            meanings.setdefault(layout, set()).add((dtype, meaning))
            layouts.setdefault((dtype, meaning), set()).add(layout)
    assert len(meanings) > 100
    assert not {name: len(of) for name, of in meanings.items() if len(of) > 1}
    assert not [of for of in layouts.values() if len(of) > 1]
