# SPDX-License-Identifier: Apache-2.0
"""Computes the size of prompts in LMCache's backends, and the cost and gain of checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.expected_states import boundaries, chunk_tokens
from lmcache_hybrid.core.groups import suggested_unit
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.tools.sizing.blocks import Group, Sizes
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE

PAGE = 4096
# LMCache's own metadata, in front of each fs:// file.
METADATA_BYTES = 28
# Measured, see docs/sizing.md: key and entry of one record, and the value's header. Keys begin
# with the model's name: 144 to 208 bytes.
REDIS_KEYS_BYTES = 160
REDIS_HEADER_BYTES = 10
# ``config.options.CHUNK_ENDS``, which cannot be imported without vLLM.
CHUNK_ENDS = "chunk"


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def jemalloc_bytes(size: int) -> int:
    """Round up as jemalloc, Redis's allocator on Linux: four sizes between powers of two."""
    step = max(16, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


@dataclass(frozen=True)
class Backend:
    """Where records are kept.

    Attributes:
        title: as it is printed.
        stored: maps the bytes of a record to the bytes it takes there.
        limit: LMCache's setting that bounds it, in GiB per rank; empty if none.
        shared: all ranks read the same records.
    """

    title: str
    stored: Callable[[int], int]
    limit: str = ""
    shared: bool = False

    def copies(self, group: Group, ranks: int) -> int:
        """Return how many records of one block of a group it keeps."""
        return 1 if self.shared and group.replicated else ranks


BACKENDS = {
    "ram": Backend("RAM (local_cpu)", _pages, "max_local_cpu_size"),
    "disk": Backend("local_disk", _pages, "max_local_disk_size"),
    "fs": Backend("fs://", lambda record: _pages(record + METADATA_BYTES), shared=True),
    "redis": Backend(
        "Redis",
        lambda record: jemalloc_bytes(record + REDIS_HEADER_BYTES) + REDIS_KEYS_BYTES,
        shared=True,
    ),
}


@dataclass(frozen=True)
class Workload:
    """The prompts to keep.

    Attributes:
        context: tokens of a prompt.
        prompts: how many.
        shared: leading tokens that all of them share.
        checkpoint: T in tokens, 0 for none, or CHUNK_ENDS.
        unit: U in tokens, 0 for hits at multiples of N only.
        step_tokens: ``max_num_batched_tokens``.
    """

    context: int
    prompts: int
    shared: int = 0
    checkpoint: int | str = 0
    unit: int = 0
    step_tokens: int = 8192

    def interval(self, state_tokens: int) -> int:
        """Return the tokens between two states of a prefill, 0 for none before its end.

        Args:
            state_tokens: N, of a state's block.
        """
        if isinstance(self.checkpoint, str):
            return chunk_tokens(self.step_tokens, state_tokens)
        return self.checkpoint

    def check(self, block_size: int, dcp: int = 1) -> None:
        """Raise ConfigError if T or U does not fit, or ``shared`` is too large.

        Args:
            block_size, dcp: see :class:`.blocks.Sizes`.
        """
        n, times = block_size // dcp, f"{dcp} N" if dcp > 1 else "N"
        if self.unit and n % self.unit:
            nearest = suggested_unit(n, self.unit)
            fix = f"use {nearest}" if nearest else "leave it out"
            raise ConfigError(f"--prefix-match-unit {self.unit} does not divide N={n}; {fix}.")
        if isinstance(self.checkpoint, int) and self.checkpoint % block_size:
            nearest = max(1, round(self.checkpoint / block_size)) * block_size
            raise ConfigError(
                f"--checkpoint-tokens {self.checkpoint} is not a multiple of {times}={block_size}; "
                f"use {nearest}."
            )
        if self.shared > self.context:
            raise ConfigError(
                f"--shared {self.shared} is more than --context {self.context}; make it less."
            )


@dataclass(frozen=True)
class Stored:
    """The content of a store after a workload.

    Attributes:
        blocks: attention blocks.
        states: boundaries with a state.
        records: over all groups and ranks.
        payload: bytes of pages and states in these records.
        taken: bytes in the backend, over all ranks.
    """

    blocks: int
    states: int
    records: int
    payload: int
    taken: int


def stored(sizes: Sizes, work: Workload, backend: Backend) -> Stored:
    """Count the records when every prompt is asked once and nothing is evicted."""
    n, shared = sizes.block_size, work.shared
    interval = work.interval(sizes.state_tokens)
    states = boundaries(work.context, n, interval, work.unit)
    # A partly filled page at the last boundary is a record of its own.
    blocks = work.context // n + sum(boundary % n > 0 for boundary in states)
    common_blocks = shared // n
    junction = common_blocks * n  # where the second prompt branches off
    common_states = {boundary for boundary in states if boundary <= shared}
    own_states = later_states = len(states) - len(common_states)
    if work.prompts > 1 and common_blocks:
        common_states.add(junction)
        if work.checkpoint == CHUNK_ENDS:  # chunks of later prompts begin there
            later = boundaries(work.context, n, interval, work.unit, start=junction)
            later_states = sum(boundary > shared for boundary in later)
    all_blocks = common_blocks + work.prompts * (blocks - common_blocks)
    all_states = len(common_states) + own_states + (work.prompts - 1) * later_states
    count = {ATTENTION: all_blocks, STATE: all_states}
    records = [
        (count[group.kind] * backend.copies(group, sizes.tp), group.bytes) for group in sizes.groups
    ]
    return Stored(
        all_blocks,
        all_states,
        sum(number for number, _ in records),
        sum(number * size for number, size in records),
        sum(number * backend.stored(record_bytes(size)) for number, size in records),
    )


def bytes_of_one(sizes: Sizes, work: Workload) -> int:
    """Return the payload of a lone prompt over all ranks, each with its own pages."""
    return stored(sizes, replace(work, prompts=1, shared=0), BACKENDS["ram"]).payload


def after_branch(context: int, block_size: int, interval: int) -> tuple[int, float]:
    """Return the tokens that the first prompt to branch off a stored one computes again.

    Returns:
        The maximum over all places to branch, and the mean.
    """
    starts = [0, *boundaries(context, block_size, interval)]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], context], strict=True)]
    lost = sum(length * (length - 1) // 2 for length in lengths)
    return max(lengths) - 1, lost / context


def prefill_steps(context: int, block_size: int, interval: int, budget: int, unit: int = 0) -> int:
    """Count the steps of a cold prefill that is alone in its engine.

    ``budget`` is the engine's ``max_num_batched_tokens``, all arguments are in tokens.
    A step ends at each boundary that is kept, and otherwise at a multiple of N.
    """
    step = chunk_tokens(budget, block_size)
    ends = [0, *boundaries(context, block_size, interval, unit)]
    steps = sum(-(-(end - start) // step) for start, end in zip(ends, ends[1:]))
    return steps + -(-(context - ends[-1]) // budget)


def break_even(sizes: Sizes, unit: int, computed: float, loaded: float) -> int | None:
    """Return the shortest hit that loads faster than it computes, in tokens.

    Args:
        unit: U, or N for hits at multiples of N only.
        computed: tokens of a prefill per second.
        loaded: bytes per second, of all ranks together.

    Returns:
        None if even the deepest of 64 blocks computes faster.
    """
    page, states = sizes.in_all(ATTENTION), sizes.in_all(STATE)
    for end in range(unit, 64 * sizes.block_size + 1, unit):
        if (-(-end // sizes.block_size) * page + states) / loaded < end / computed:
            return end
    return None
