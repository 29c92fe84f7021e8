# SPDX-License-Identifier: Apache-2.0
"""Messages from the scheduler side to the worker side, one per step."""

import math
import time
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from lmcache_hybrid.core.counts import WorkerCounts
from lmcache_hybrid.core.groups import Block, GroupPlan
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.hit_records import load_keys, record_keys, tail_keys
from lmcache_hybrid.protocol.prefix import Prefix


@dataclass(frozen=True)
class LoadSpec:
    """Restore blocks [start, boundary), ``tail`` tokens of the next one, and the state there.

    Attributes:
        attention_blocks: per attention group of the plan, vLLM's block id (or ids) for each of
            ``start .. boundary - 1``, and for ``boundary`` where there is a tail.
        state_blocks: per state group of the plan, the block id to load the state into.
        window_blocks: per window group of the plan, one block id for each of
            ``window.first(start, boundary) .. boundary - 1``.
        tail: in tokens; the load then ends inside block ``boundary``.
        deadline: ``time.monotonic`` after which computing is faster. The load is aborted as soon
            as its rate shows that it will be late, see :class:`.late_loads.Pace`.
    """

    request_id: str
    prefix: Prefix
    start: int
    boundary: int
    attention_blocks: tuple[tuple[Block, ...], ...]
    state_blocks: tuple[int, ...]
    window_blocks: tuple[tuple[int, ...], ...] = ()
    tail: int = 0
    deadline: float = math.inf

    def end(self, plan: GroupPlan) -> int:
        """Return the token that it loads up to."""
        return self.boundary * plan.block_size + self.tail

    def pages(self, plan: GroupPlan) -> list[tuple[RecordKey, Block]]:
        """List (record, block id) of what the load writes: attention, windows, states."""
        keys = load_keys(self.prefix, self.start, self.boundary, plan, self.tail)
        by_block = zip(*self.attention_blocks, strict=True)
        blocks: list[Block] = [block for ids in by_block for block in ids]
        blocks += (block for ids in self.window_blocks for block in reversed(ids))
        return list(zip(keys, (*blocks, *self.state_blocks), strict=True))

    def count(self, counts: WorkerCounts, size: int) -> None:
        """Add the load, ``size`` bytes, to ``counts``."""
        counts.loaded_attention += self.boundary - self.start + bool(self.tail)
        counts.loaded_windows += sum(map(len, self.window_blocks))
        counts.loaded_states += bool(self.state_blocks)
        counts.loaded_bytes += size


@dataclass(frozen=True)
class SaveSpec:
    """Store blocks that this step's forward completed.

    Attributes:
        attention: (block number, its block id or ids per attention group of the plan).
        states: (boundary in blocks, block id per state group of the plan).
        windows: (group, block number, block id).
        boundaries: the request's boundaries to evict last, in blocks; empty when neither they
            nor the pages behind them changed.
        tails: (boundary in tokens, inside a block; block id per attention group of the plan;
            block id per state group). Tokens behind the boundary are not part of the record.
        inner: the request's boundaries inside a block to keep, likewise.
    """

    request_id: str
    prefix: Prefix
    attention: tuple[tuple[int, tuple[Block, ...]], ...]
    states: tuple[tuple[int, tuple[int, ...]], ...]
    windows: tuple[tuple[int, int, int], ...] = ()
    boundaries: tuple[int, ...] = ()
    tails: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = ()
    inner: tuple[int, ...] = ()

    def pages(self, plan: GroupPlan) -> list[tuple[RecordKey, Block]]:
        """List (record, block id) of all blocks that the save reads.

        States come last: a state is found only when its attention pages are stored or in flight.
        """
        pages: list[tuple[RecordKey, Block]] = []
        for kind, groups, blocks in (
            (ATTENTION, plan.attention, self.attention),
            *((ATTENTION, (group,), ((block, (id_,)),)) for group, block, id_ in self.windows),
            (STATE, plan.states, ((end - 1, ids) for end, ids in self.states)),
        ):
            for block, ids in blocks:
                keys = record_keys(self.prefix, block, plan.block_size, kind, groups)
                pages += zip(keys, ids, strict=True)
        for tokens, attention, states in self.tails:
            keys = tail_keys(self.prefix, tokens, plan)
            pages += zip(keys, (*attention, *states), strict=True)
        return pages

    def count(self, counts: WorkerCounts, size: int) -> None:
        """Add the save, ``size`` bytes, to ``counts``."""
        counts.saved_attention += len(self.attention) + len(self.tails)
        counts.saved_windows += len(self.windows)
        counts.saved_states += len(self.states) + len(self.tails)
        counts.saved_bytes += size


@dataclass(frozen=True)
class ConnectorMetadata(KVConnectorMetadata):
    """The work of one step for the worker side.

    Attributes:
        released: (request, number of its lookup) of claims to release.
        idle: no forward runs in this step.
        waits: a rank may wait for a load: no forward runs on any rank that it would delay.
        epoch: number of store resets when the step was scheduled. Saves of an earlier epoch are
            dropped: the weights may have changed since.
        ended: requests whose blocks vLLM keeps only for this step's saves.
        unloadable: requests with blocks for a load that cannot be sent: every rank reports the
            load as failed at once and releases its claim.
        step: number of the step, counted from 1; left out of most, see :class:`.drop.DropRequest`.
        sent: ``time.monotonic`` of the scheduler, where there are loads.
    """

    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveSpec, ...] = ()
    released: tuple[tuple[str, int], ...] = ()
    idle: bool = False
    epoch: int = 0
    ended: tuple[str, ...] = ()
    waits: bool = False
    unloadable: tuple[str, ...] = ()
    step: int = 0
    sent: float = 0.0

    def on_this_clock(self) -> "ConnectorMetadata":
        """Return it with deadlines of this host's clock, on a rank that has just received it.

        A rank on another host than the scheduler has a clock that tells another time. The way of
        the message is not counted, so a deadline may come that much later.
        """
        later = time.monotonic() - self.sent
        loads = (replace(load, deadline=load.deadline + later) for load in self.loads)
        return replace(self, loads=tuple(loads)) if self.loads else self


NOTHING = ConnectorMetadata()
