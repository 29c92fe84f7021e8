# SPDX-License-Identifier: Apache-2.0
"""Decides which records a hit at a boundary takes: pages, windows, states, a partly filled page."""

from collections.abc import Iterable, Sequence

from lmcache_hybrid.core.groups import GroupPlan, Window
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.prefix import Prefix


def record_keys(
    prefix: Prefix, block: int, block_size: int, kind: int, groups: Sequence[int]
) -> list[RecordKey]:
    """Keys of block ``block``, counted from 0, in each of ``groups``."""
    boundary = (block + 1) * block_size
    return [RecordKey(kind, group, prefix.hashes[block], boundary, prefix.tags) for group in groups]


def inner_keys(prefix: Prefix, tokens: int, kind: int, groups: Sequence[int]) -> list[RecordKey]:
    """Keys at boundary ``tokens``, which lies inside a block, in each of ``groups``."""
    return [RecordKey(kind, group, prefix.inner[tokens], tokens, prefix.tags) for group in groups]


def load_keys(
    prefix: Prefix, start: int, boundary: int, plan: GroupPlan, tail: int = 0
) -> list[RecordKey]:
    """Keys that a load of blocks [start, boundary) reads: attention, windows, states.

    Args:
        tail: tokens of block ``boundary`` that it also loads; the states are those behind them.
    """
    keys = [
        key
        for block in range(start, boundary)
        for key in record_keys(prefix, block, plan.block_size, ATTENTION, plan.attention)
    ]
    if tail:
        return keys + tail_keys(prefix, boundary * plan.block_size + tail, plan)
    for window in plan.windows:
        keys += window_keys(prefix, start, boundary, plan.block_size, window)
    return keys + record_keys(prefix, boundary - 1, plan.block_size, STATE, plan.states)


def tail_keys(prefix: Prefix, tokens: int, plan: GroupPlan) -> list[RecordKey]:
    """Keys of the partly filled pages that end at ``tokens``, inside a block, and of its states."""
    pages = inner_keys(prefix, tokens, ATTENTION, plan.attention)
    return pages + inner_keys(prefix, tokens, STATE, plan.states)


def block_keys(prefix: Prefix, block: int, plan: GroupPlan) -> list[RecordKey]:
    """Keys of all records that may end in block ``block``, at its end or inside it."""
    size = plan.block_size
    keys: list[RecordKey] = []
    if block < len(prefix.hashes):
        pages = (*plan.attention, *(window.group for window in plan.windows))
        keys += record_keys(prefix, block, size, ATTENTION, pages)
        keys += record_keys(prefix, block, size, STATE, plan.states)
    if plan.unit:
        for tokens in range(block * size + plan.unit, (block + 1) * size, plan.unit):
            if tokens in prefix.inner:
                keys += tail_keys(prefix, tokens, plan)
    return keys


def used_keys(
    prefix: Prefix, boundaries: Iterable[int], plan: GroupPlan, inner: Iterable[int] = ()
) -> list[RecordKey]:
    """Keys that hits at ``boundaries`` need, those to evict last first.

    Args:
        boundaries: in blocks.
        inner: boundaries inside a block, in tokens.

    The first pages are shared the most, so pages come in order; each state comes right behind the
    pages that it needs.
    """
    keys: list[RecordKey] = []
    start = 0
    ends = {boundary * plan.block_size for boundary in boundaries} - {0}
    for end in sorted({*ends, *inner}):
        boundary, tail = divmod(end, plan.block_size)
        new = load_keys(prefix, start, boundary, plan, tail)
        for window in plan.windows:
            # Pages before ``start`` may already be listed for the boundary before.
            new += window_keys(prefix, 0, boundary, plan.block_size, window)
        keys += new
        start = boundary
    return list(dict.fromkeys(keys))


def window_keys(
    prefix: Prefix, start: int, boundary: int, block_size: int, window: Window
) -> list[RecordKey]:
    """Pages of a window group that a load of blocks [start, boundary) reads, last one first."""
    blocks = range(boundary - 1, window.first(start, boundary) - 1, -1)
    return [
        record_keys(prefix, block, block_size, ATTENTION, (window.group,))[0] for block in blocks
    ]
