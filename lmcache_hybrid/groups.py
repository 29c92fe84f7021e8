# SPDX-License-Identifier: Apache-2.0
"""Which KV cache groups hold attention pages, which hold states, and what is refused."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_hybrid.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

ATTENTION_GROUP_KEY = "lmcache.hybrid_attention_group"


@dataclass(frozen=True)
class GroupPlan:
    """The groups of one model, by their index in ``kv_cache_config.kv_cache_groups``.

    Attributes:
        block_size: N, tokens per block of every group (the unified block size).
        attention: groups whose pages of [0, B) make a hit at B, in order.
        states: groups whose state at B makes a hit at B, in order.
        selected_attention: the attention group forwarded to ``request_finished``.
    """

    block_size: int
    attention: tuple[int, ...]
    states: tuple[int, ...]
    selected_attention: int


def plan_groups(kv_cache_config: "KVCacheConfig", selected: int | None = None) -> GroupPlan:
    """Read the plan off vLLM's groups.

    Args:
        kv_cache_config: of the model; needs at least one group of each kind.
        selected: the user's choice of attention group, None for the first one.

    Raises:
        ConfigError: a group of a kind that is not served, groups with different
            block sizes, a state group outside align mode, or an invalid ``selected``.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

    attention: list[int] = []
    states: list[int] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            if spec.mamba_cache_mode != "align":
                raise ConfigError(
                    f"mamba_cache_mode={spec.mamba_cache_mode!r} of KV cache group {index} keeps "
                    "no states at block boundaries; use --mamba-cache-mode align."
                )
            states.append(index)
        # Exact types: a subclass may drop or share blocks in ways not served here.
        elif type(spec) in (FullAttentionSpec, MLAAttentionSpec):
            attention.append(index)
        else:
            raise ConfigError(
                f"KV cache group {index} is {type(spec).__name__} (layers "
                f"{group.layer_names[0]} and {len(group.layer_names) - 1} more), which LMCache "
                "cannot restore together with recurrent states; start this model without "
                "LMCacheConnectorV1."
            )
    kinds = _describe(kv_cache_config)
    if not attention or not states:
        raise ConfigError(
            f"KV cache groups {kinds} lack attention or state groups; start this model without "
            "LMCacheConnectorV1."
        )
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(sizes) != 1:
        raise ConfigError(
            f"block sizes {sorted(sizes)} of KV cache groups {kinds} differ; remove --block-size "
            "and --mamba-block-size so that vLLM unifies them."
        )
    if selected is None:
        selected = attention[0]
    elif selected not in attention:
        raise ConfigError(
            f"{ATTENTION_GROUP_KEY}={selected} is not an attention group; the groups are {kinds}, "
            f"choose one of {attention}."
        )
    return GroupPlan(sizes.pop(), tuple(attention), tuple(states), selected)


def _describe(kv_cache_config: "KVCacheConfig") -> str:
    names = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    return "[" + ", ".join(f"{i}: {name}" for i, name in enumerate(names)) + "]"
