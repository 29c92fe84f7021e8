# SPDX-License-Identifier: Apache-2.0
"""What each ``--prefix-match-unit`` brings and costs, for ``plan``."""

from dataclasses import dataclass, replace

from lmcache_hybrid.core.groups import suggested_unit
from lmcache_hybrid.tools.sizing import storage
from lmcache_hybrid.tools.sizing.blocks import Sizes
from lmcache_hybrid.tools.sizing.storage import BACKENDS, Workload

HEAD = (
    "U",
    "Hits from",
    "Computed again",
    "GiB per prompt",
    "Steps",
    "Faster from: RAM",
    "network",
)
# Bytes a second, for the last two columns: to a GPU, and from a store on a 25 Gbit network.
RATES = {"ram": 20 * 2**30, "network": 2.5 * 2**30}


@dataclass(frozen=True)
class Unit:
    """One U; with N itself hits end at multiples of N only.

    Attributes:
        tokens: U.
        shortest: the shortest prompt that hits, in tokens.
        computed_again: tokens of a repeated prompt that are, at most.
        bytes_per_prompt: of a prompt of the workload's context, over all ranks.
        prefill_steps: of that prompt, cold and alone.
        faster_from: by RATES, the shortest hit that loads faster than it computes, in tokens.
    """

    tokens: int
    shortest: int
    computed_again: int
    bytes_per_prompt: int
    prefill_steps: int
    faster_from: dict[str, int | None]

    def row(self, block_size: int) -> list[str]:
        """As :data:`HEAD` has it."""
        return [
            f"{self.tokens} (N)" if self.tokens == block_size else str(self.tokens),
            f"{self.shortest:,}",
            f"{self.computed_again:,}",
            f"{self.bytes_per_prompt / 2**30:.3f}",
            str(self.prefill_steps),
            *("never" if found is None else f"{found:,}" for found in self.faster_from.values()),
        ]


def units(sizes: Sizes, work: Workload, prefill_rate: float) -> list[Unit]:
    """N, and the units worth a look, the user's included; the largest first."""
    n = sizes.block_size
    chosen = {n, suggested_unit(n), suggested_unit(n, n // 8), suggested_unit(n, 16), work.unit}
    return [_unit(sizes, work, u, prefill_rate) for u in sorted(chosen - {0})[::-1]]


def _unit(sizes: Sizes, work: Workload, unit: int, prefill_rate: float) -> Unit:
    n = sizes.block_size
    alone = replace(work, prompts=1, shared=0, unit=unit if unit < n else 0)
    return Unit(
        unit,
        unit + 1,
        unit,
        storage.stored(sizes, alone, BACKENDS["ram"]).payload,
        storage.prefill_steps(work.context, n, work.interval(n), work.step_tokens, alone.unit),
        {name: storage.break_even(sizes, unit, prefill_rate, rate) for name, rate in RATES.items()},
    )
