# SPDX-License-Identifier: Apache-2.0
"""Lists where LMCache keeps records, and how many of the longest prompts fit there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.config.own_options import MAX_SIZE_KEY
from lmcache_hybrid.config.stores import places
from lmcache_hybrid.core.expected_states import boundaries, chunk_tokens
from lmcache_hybrid.core.sizes import GIB

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


@dataclass(frozen=True)
class Tier:
    """One place.

    Attributes:
        name: as it is shown.
        setting: the setting that bounds it, empty if none.
        limit: bytes of each rank, or of all together if ``shared``; 0 if unknown.
        last: whether no larger tier is below it.
    """

    name: str
    setting: str = ""
    limit: int = 0
    shared: bool = False
    last: bool = True

    def holds(self, taken: int) -> str:
        """Return how many prompts of ``taken`` bytes fit, as text."""
        held = self.limit / taken
        return f"{held:,.{held < 10:d}f}" if held >= 0.1 else f"{held:.1g}"


def tiers(config: "LMCacheEngineConfig", options: Options) -> Iterator[Tier]:
    """Yield each place that the configuration names, in LMCache's lookup order."""
    remote = places(config)
    if config.local_cpu:
        limit = int(config.max_local_cpu_size * GIB)
        last = not (config.local_disk or remote)
        yield Tier("RAM", "max_local_cpu_size", limit, last=last)
    if config.local_disk:
        limit = int(config.max_local_disk_size * GIB)
        yield Tier("local_disk", "max_local_disk_size", limit, last=not remote)
    bound = options.folder_limits.max_bytes or 0
    for place in remote:
        if bound and place.kind.folders(place, config):
            yield Tier(place.title, MAX_SIZE_KEY, bound, shared=True)
        else:
            yield Tier(place.title, shared=True)


def prompt_bytes(
    options: Options,
    longest: int,
    step_tokens: int,
    block_size: int,
    unit: int,
    attention_bytes: int,
    state_bytes: int,
    chunk_unit: int = 0,
) -> int:
    """Return the bytes that a prompt of ``longest`` tokens leaves on a rank, states included.

    Args:
        step_tokens: ``max_num_batched_tokens``.
        unit: U in tokens, 0 for hits at multiples of N only.
        attention_bytes: of all attention pages of one block.
        state_bytes: of all states at one boundary.
        chunk_unit: tokens at whose multiples chunks end; 0 for N.
    """
    chunk = chunk_tokens(step_tokens, chunk_unit or block_size)
    interval = chunk if options.chunk_ends else options.checkpoint_tokens
    states = boundaries(longest, block_size, interval, unit)
    blocks = longest // block_size + sum(end % block_size > 0 for end in states)
    return max(1, blocks * attention_bytes + len(states) * state_bytes)


def described(places: Iterable[Tier], taken: int, longest: int, ranks: int) -> str:
    """Describe the tiers in words.

    Args:
        taken: bytes of the longest prompt on a rank; 0 if unknown.
        longest: ``max_model_len`` in tokens.
        ranks: how many share a tier.
    """
    named = []
    for tier in places:
        held = tier.holds(taken * ranks if tier.shared else taken) if tier.limit and taken else ""
        room = f" (about {held} prompts of max_model_len={longest:,})" if held else ""
        named.append(f"{tier.name}{room}")
    return " and ".join(named) or "no place"
