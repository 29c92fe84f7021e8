# SPDX-License-Identifier: Apache-2.0
"""Sorts KV cache groups into attention, windows, states and scratch; refuses all others."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

# vLLM's block id, or the ids of all blocks of a record that holds several.
Block = int | tuple[int, ...]
# Set by this package where a MultiConnector has another connector beside ours. No option: its name
# is not like those of options, so that a user who writes one like it is told.
BESIDE_KEY = "_beside_others_of_lmcache_hybrid"


@dataclass(frozen=True)
class Window:
    """A group of sliding-window attention.

    Attributes:
        group: its index.
        blocks: how many of the last blocks before B a hit at B needs, ceil((window - 1) / N).
    """

    group: int
    blocks: int

    def first(self, start: int, boundary: int) -> int:
        """First block that a load of blocks [start, boundary) restores."""
        return max(start, boundary - self.blocks)


@dataclass(frozen=True)
class GroupPlan:
    """The groups of one model, by their index in ``kv_cache_config.kv_cache_groups``.

    Attributes:
        block_size: N, tokens between two boundaries: the unified block size of all groups, or
            their least common multiple where they differ. With decode context parallelism the
            tokens of an attention block on all of its ranks.
        attention: groups whose pages of [0, B) make a hit at B, in order.
        states: groups whose state at B makes a hit at B, in order.
        windows: groups whose last pages before B make a hit at B, in order.
        replicated: attention groups whose pages are equal on all tensor-parallel ranks.
        unit: U, tokens between two boundaries inside a block; divides N. 0 for no hits there.
            With decode context parallelism at most those of a state's block.
        split: (group, blocks in N tokens) of groups with records that have more than one.
        whole_items: whether tokens of an image, audio or video attend to each other in both
            directions, which bars boundaries inside it.
        dcp: ranks that share the tokens of an attention block (decode context parallelism).
    """

    block_size: int
    attention: tuple[int, ...]
    states: tuple[int, ...]
    windows: tuple[Window, ...] = ()
    replicated: tuple[int, ...] = ()
    unit: int = 0
    split: tuple[tuple[int, int], ...] = ()
    whole_items: bool = False
    dcp: int = 1

    def with_unit(self, unit: int) -> "GroupPlan":
        """Add hits every ``unit`` tokens, where vLLM supports them: with states, without windows.

        Not where attention groups have blocks of several sizes: a boundary must be whole blocks of
        each. Where only those of states are smaller, vLLM does with decode context parallelism.
        """
        uneven = self.split and self.dcp == 1
        inside = self.states and not (self.windows or uneven) and unit < self.block_size
        return replace(self, unit=unit if inside else 0)

    def blocks_in(self, group: int) -> int:
        """Return the number of vLLM's blocks of a group in N tokens."""
        return dict(self.split).get(group, 1)

    @property
    def state_tokens(self) -> int:
        """Tokens of a state's block; N without states."""
        return min(
            (self.block_size // self.blocks_in(g) for g in self.states), default=self.block_size
        )

    @property
    def chunk_unit(self) -> int:
        """Tokens at whose multiples the end of a prefill's chunk leaves a state.

        In a block that ranks share, blocks of states end, too.
        """
        return self.state_tokens if self.dcp > 1 and self.unit else self.block_size

    def blocks_per_record(self, group: int) -> int:
        """Return the blocks in a record: N tokens of an attention group, one for a state."""
        return self.blocks_in(group) if group in self.attention else 1

    def pages(self, ids: Sequence[int], group: int, start: int, end: int) -> tuple[Block, ...]:
        """Return the blocks with tokens [start * N, end * N) of a request, one entry per N.

        Args:
            ids: all of the request's in ``group``.
        """
        count = self.blocks_in(group)
        if count == 1:
            return tuple(ids[start:end])
        return tuple(tuple(ids[at * count : (at + 1) * count]) for at in range(start, end))

    def state_block(self, ids: Sequence[int], group: int, tokens: int) -> int:
        """Return the block for the state at ``tokens``, where it need not be full; 0 for none."""
        at = -(-tokens * self.blocks_in(group) // self.block_size) - 1
        return ids[at] if at < len(ids) else 0

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of all groups that have records; scratch groups have none."""
        return (*self.attention, *(window.group for window in self.windows), *self.states)


def suggested_unit(block_size: int, wanted: int = 64) -> int:
    """Return the best ``--prefix-match-unit``: the divisor of N nearest to ``wanted`` tokens.

    It is below N and a multiple of 16, as every chunked kernel needs; 0 if there is none.
    """
    fitting = [unit for unit in range(16, block_size, 16) if block_size % unit == 0]
    return min(fitting, key=lambda unit: max(unit / wanted, wanted / unit), default=0)


def is_served(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether this package serves the groups: states, or windows beside full attention.

    In any other model a hit needs pages of [0, B) only, which LMCache's own adapter serves.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group)]
    if any(isinstance(spec, MambaSpec) for spec in specs):
        return True
    kinds = (FullAttentionSpec, SlidingWindowSpec)
    return all(any(isinstance(spec, kind) for spec in specs) for kind in kinds)


def plan_groups(kv_cache_config: "KVCacheConfig", dcp: int = 1) -> GroupPlan:
    """Make the plan of a model from vLLM's groups.

    Args:
        kv_cache_config: of the model; needs an attention group, and one with states or
            windows.
        dcp: ``decode_context_parallel_size``.

    Raises:
        ConfigError: a group of an unsupported kind, unsupported block sizes (see
            ``_block_size``), or a state group outside align mode.
    """
    attention: list[int] = []
    windows: list[Window] = []
    states: list[int] = []
    replicated: list[int] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = layer_specs(group)
        kinds = {_kind(spec) for spec in specs}
        if dcp > 1 and not (kinds == {"state"} or _is_spread(kinds, specs)):
            raise ConfigError(
                f"decode_context_parallel_size={dcp} with KV cache group {index}, which is "
                f"{_names(group)}, has not been tested: only full attention that is spread over "
                "the ranks and states are; set it to 1."
            )
        if kinds == {"scratch"}:
            continue
        if kinds == {"state"}:
            _refuse_other_modes(index, specs)
            states.append(index)
        elif kinds == {"attention"}:
            attention.append(index)
            if dcp == 1 and all(map(_is_replicated, specs)):
                replicated.append(index)
        elif kinds == {"window"}:
            windows.append(Window(index, max(_window_blocks(spec) for spec in specs)))
        else:
            first, rest = group.layer_names[:1], group.layer_names[1:]
            raise ConfigError(
                f"KV cache group {index} is {_names(group)} (layers "
                f"{' and '.join([*first, f'{len(rest)} more'])}), which LMCache "
                "cannot restore by whole blocks; start this model without LMCacheConnectorV1."
            )
    if not attention or not (states or windows):
        raise ConfigError(
            f"KV cache groups {_describe(kv_cache_config)} lack attention or state groups; start "
            "this model without LMCacheConnectorV1."
        )
    sizes = _block_sizes(kv_cache_config, dcp)
    if dcp > 1 and len({sizes[index] for index in attention}) > 1:
        raise ConfigError(
            f"decode_context_parallel_size={dcp} with attention blocks of several sizes has not "
            "been tested; set it to 1."
        )
    n = _block_size(kv_cache_config, sizes, states, bool(windows))
    return GroupPlan(
        n,
        tuple(attention),
        tuple(states),
        tuple(windows),
        tuple(replicated),
        split=_split(kv_cache_config, sizes, n),
        dcp=dcp,
    )


def layer_specs(group: "KVCacheGroupSpec") -> "Collection[KVCacheSpec]":
    """List the specs in a group: one per layer where they differ, else one for all layers.

    Layers of one kind with pages of several sizes share a group where vLLM packs a block of all
    layers together, as with a drafter beside the model.
    """
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return iter_layer_specs(group.kv_cache_spec)


def page_bytes(group: "KVCacheGroupSpec", layers: Sequence[str] | None = None) -> int:
    """Return the bytes stored for one block of ``layers`` (all by default), without padding.

    0 on a pipeline stage that has no layer of the group.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    several = isinstance(spec, UniformTypeKVCacheSpecs)
    specs = spec.kv_cache_specs if several else dict.fromkeys(group.layer_names, spec)
    names = group.layer_names if layers is None else layers
    return sum(specs[name].real_page_size_bytes for name in names)


def _kind(spec: "KVCacheSpec") -> str | None:
    """Return what a hit needs of a layer; None for an unsupported spec."""
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, MambaSpec):
        return "state"
    # One block per request for tokens not compressed yet: holds nothing at a boundary, and vLLM's
    # own hits do not restore it.
    if type(spec) is CircularBufferSpec and not spec.prefix_cacheable:
        return "scratch"
    # Exact types: a subclass may drop or share blocks in ways not served here.
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return "attention"
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return "window"
    return None


def _is_replicated(spec: "KVCacheSpec") -> bool:
    """Whether vLLM says that all tensor-parallel ranks hold the same bytes of a layer.

    It does for latent attention (MLA), whose one latent serves all heads. ``max_tp_shards`` None
    means unknown.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    latent = type(spec) is MLAAttentionSpec and spec.num_kv_heads == 1
    return latent and spec.max_tp_shards == 1


def _is_spread(kinds: Collection[str | None], specs: "Iterable[KVCacheSpec]") -> bool:
    """Whether it is attention of which each rank holds a part of each block's tokens."""
    return kinds == {"attention"} and all(spec.dcp_sharded for spec in specs)


def _window_blocks(spec: "KVCacheSpec") -> int:
    return -(-(spec.sliding_window - 1) // spec.block_size)


def _refuse_other_modes(index: int, states: "Iterable[KVCacheSpec]") -> None:
    for mode in {spec.mamba_cache_mode for spec in states}:
        if mode != "align":
            raise ConfigError(
                f"mamba_cache_mode={mode!r} of KV cache group {index} keeps "
                "no states at block boundaries; remove --no-enable-prefix-caching and "
                "--mamba-cache-mode, so that vLLM chooses 'align'."
            )


def _block_sizes(kv_cache_config: "KVCacheConfig", dcp: int) -> list[int]:
    """Return the tokens of a block, by group: on all ranks that share them."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [spec.block_size * (dcp if spec.dcp_sharded else 1) for spec in specs]


def _block_size(
    kv_cache_config: "KVCacheConfig", every: Sequence[int], states: Collection[int], windows: bool
) -> int:
    """Return N: vLLM hits at common multiples of all block sizes, those of scratch included.

    Sizes differ where attention layers have pages of several sizes: vLLM makes the blocks of
    those with smaller pages larger, and leaves states as they are. They also do where ranks share
    the blocks of attention.

    Args:
        every: tokens of a block, by group.

    Raises:
        ConfigError: scratch moves the multiples, or sizes differ in another way or beside
            windows: vLLM keeps the blocks that a window reaches, maybe a part of N tokens.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = {size for size, spec in zip(every, specs, strict=True) if spec.prefix_cacheable}
    common = math.lcm(*sizes)
    served = common == math.lcm(*every)
    if len(sizes) > 1:
        served &= not windows and {every[index] for index in states} == {min(sizes)}
    if not served:
        raise ConfigError(
            f"block sizes {sorted(set(every))} of KV cache groups "
            f"{_describe(kv_cache_config)} differ; remove --block-size and --mamba-block-size so "
            "that vLLM unifies them."
        )
    return common


def _split(
    kv_cache_config: "KVCacheConfig", sizes: Sequence[int], block_size: int
) -> tuple[tuple[int, int], ...]:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    counts = [
        block_size // size * spec.prefix_cacheable for size, spec in zip(sizes, specs, strict=True)
    ]
    return tuple((index, count) for index, count in enumerate(counts) if count > 1)


def _describe(kv_cache_config: "KVCacheConfig") -> str:
    names = map(_names, kv_cache_config.kv_cache_groups)
    return "[" + ", ".join(f"{i}: {name}" for i, name in enumerate(names)) + "]"


def _names(group: "KVCacheGroupSpec") -> str:
    return " and ".join(sorted({type(spec).__name__ for spec in layer_specs(group)}))
