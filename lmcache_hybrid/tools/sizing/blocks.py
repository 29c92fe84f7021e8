# SPDX-License-Identifier: Apache-2.0
"""Computes N, groups and bytes as vLLM does; each function names vLLM's own."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE, ModelShape

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
STATE_DTYPES = ("float32", "bfloat16", "float16")
# The decode kernels of latent attention need multiples of this.
LATENT_ALIGNMENT = 128
# By prefill kernel of gated delta nets: tokens that N must be a multiple of.
# FlashInfer writes states inside a prefill, from vLLM 0.33 on.
GDN_PREFILLS = {"triton": 1, "flashinfer": 64}


@dataclass(frozen=True)
class Platform:
    """Where an engine runs.

    Attributes:
        block_size: vLLM's default, which hybrid models round up from.
        kernel_block: smallest block of the attention kernels; N is a multiple.
        ssm_dtype: what ``auto`` means for any model; empty to follow the model.
        gdn_prefill: vLLM's ``--gdn-prefill-backend``, of GDN_PREFILLS.
    """

    name: str
    block_size: int
    kernel_block: int
    ssm_dtype: str = ""
    gdn_prefill: str = "triton"

    def with_gdn_prefill(self, backend: str) -> "Platform":
        return replace(self, gdn_prefill=backend)


PLATFORMS = {
    "gpu": Platform("GPU, kernel blocks of 16 tokens (FlashAttention, FlashInfer)", 16, 16),
    # CpuPlatform.check_and_update_config
    "cpu": Platform("CPU with AVX512-BF16, states in float32", 128, 32, "float32"),
}


@dataclass(frozen=True)
class Group:
    """One KV cache group on one rank.

    Attributes:
        kind: ATTENTION or STATE.
        layers: how many share its block table.
        bytes: of a block's pages, or of a boundary's states, without padding.
        replicated: the bytes are equal on all ranks (MLA), so that shared stores keep them once.
    """

    kind: str
    layers: int
    bytes: int
    replicated: bool = False


@dataclass(frozen=True)
class Sizes:
    """vLLM's sizes for a model, per rank.

    Attributes:
        block_size: tokens of an attention block: N, "Setting attention block size to N tokens",
            or ``dcp`` times N.
        token_bytes: one layer's keys and values of one token.
        state_bytes: one layer's state, without padding.
        groups: in vLLM's order.
        tp: ranks.
        dcp: ranks that share a block's tokens (decode context parallelism).
    """

    block_size: int
    token_bytes: int
    state_bytes: int
    groups: tuple[Group, ...]
    tp: int
    dcp: int = 1

    @property
    def state_tokens(self) -> int:
        """N: tokens of a state's block, and of an attention block on one rank."""
        return self.block_size // self.dcp

    def per_rank(self, kind: str) -> int:
        """Return the bytes of one block's attention, or one boundary's states, on one rank."""
        return sum(group.bytes for group in self.groups if group.kind == kind)

    def in_all(self, kind: str) -> int:
        """Return the same over all ranks."""
        return self.per_rank(kind) * self.tp


def compute(
    shape: ModelShape,
    platform: Platform,
    *,
    tp: int = 1,
    kv_dtype: str = "auto",
    ssm_dtype: str = "auto",
    block_size: int = 0,
    dcp: int = 1,
    drafts: int = 0,
) -> Sizes:
    """Compute sizes as vLLM does at start-up.

    Args:
        block_size: the user's ``--block-size``, 0 for the platform's default.
        dcp: ``--decode-context-parallel-size``.
        drafts: ``num_speculative_tokens``.

    Raises:
        ConfigError: a dtype that cannot be sized, or a ``tp`` or ``dcp`` that does not divide.
    """
    kv_dtype = shape.kv_dtype if kv_dtype == "auto" else kv_dtype
    if ssm_dtype == "auto":
        ssm_dtype = platform.ssm_dtype or shape.ssm_dtype
    heads, latent = shape.attention.heads, shape.attention.latent
    if tp < 1 or max(heads, tp) % min(heads, tp) and not latent:
        raise ConfigError(
            f"--tp {tp} does not fit {heads} key/value heads; choose a divisor or a multiple."
        )
    _check_shared(dcp, tp, tp if latent else tp // heads)
    if (queries := shape.attention.queries) % dcp and not latent:  # vLLM: the same function
        raise ConfigError(
            f"--decode-context-parallel-size {dcp} does not divide the {queries} query heads per "
            "key/value head; choose one that does."
        )
    # First: "auto" of the other two is often this one.
    conv_bytes = _bytes_of("--dtype", shape.dtype, STATE_DTYPES)
    conv = shape.recurrent.conv_elements(tp, drafts) * conv_bytes
    token = shape.attention.elements(tp) * _bytes_of("--kv-cache-dtype", kv_dtype, DTYPE_BYTES)
    ssm = shape.recurrent.state_elements(tp) * _bytes_of("--ssm-dtype", ssm_dtype, STATE_DTYPES)
    state = conv + ssm
    multiple = GDN_PREFILLS[platform.gdn_prefill] if shape.has_delta_nets else 1
    n = unified_block_size(token, state, platform, block_size, latent, multiple)
    size = {ATTENTION: n * token, STATE: state}
    groups = tuple(
        Group(kind, layers, layers * size[kind], latent and kind == ATTENTION and dcp == 1)
        for kind, layers in grouped(shape.kinds)
    )
    return Sizes(n * dcp, token, state, groups, tp, dcp)


def _check_shared(dcp: int, tp: int, alike: int) -> None:
    """Raise ConfigError where vLLM lets no ``dcp`` ranks share a block.

    vLLM: ``ModelConfig.verify_with_parallel_config``, ``ParallelConfig``.

    Args:
        alike: ranks that compute the same keys and values.
    """
    if dcp > 1 and (dcp > alike or tp % dcp):
        raise ConfigError(
            f"--decode-context-parallel-size {dcp} does not fit --tp {tp}: {alike} ranks have the "
            "same key/value heads; choose a divisor of --tp that is no larger."
        )


def _bytes_of(option: str, dtype: str, known: Collection[str]) -> int:
    if dtype not in known:
        raise ConfigError(
            f"{option} {dtype} cannot be sized; the types are auto, {', '.join(known)}."
        )
    return DTYPE_BYTES[dtype]


def unified_block_size(
    token_bytes: int,
    state_bytes: int,
    platform: Platform,
    block_size: int,
    latent: bool,
    multiple: int = 1,
) -> int:
    """Return N: the smallest block whose attention page is not smaller than a state.

    vLLM: ``Platform._align_hybrid_block_size``.

    Args:
        token_bytes: one layer's keys and values of a token on one rank.
        state_bytes: one layer's state on one rank.
        multiple: tokens that N must be a multiple of, if states are written inside a prefill.
    """
    block_size = block_size or platform.block_size
    alignment = max(platform.kernel_block, block_size, LATENT_ALIGNMENT if latent else 0)
    alignment = math.lcm(alignment, multiple)
    needed = -(-state_bytes // (alignment * token_bytes)) * alignment
    needed = -(-needed // platform.kernel_block) * platform.kernel_block
    return max(block_size, needed)


def grouped(kinds: tuple[str, ...]) -> list[tuple[str, int]]:
    """List (kind, layers) of each group.

    vLLM: ``_get_kv_cache_groups_uniform_page_size``. Groups are as long as the kind with fewer
    layers, or as the other one if that is less than half longer.
    """
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    fewest, most = min(counts.values()), max(counts.values())
    length = most if most < fewest * 1.5 else fewest
    groups = []
    for kind, count in counts.items():
        number = -(-count // length)
        groups += [(kind, len(range(index, count, number))) for index in range(number)]
    return groups
