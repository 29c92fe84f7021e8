# SPDX-License-Identifier: Apache-2.0
"""Computes what many engines ask of one store that they share."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_hybrid.core.expected_states import boundaries
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.tools.sizing import storage
from lmcache_hybrid.tools.sizing.blocks import Sizes
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE
from lmcache_hybrid.tools.sizing.storage import Workload

# Of one rank to one Redis server, at most: a thread of ``storage.remote.redis`` each, which cannot
# be imported without LMCache.
REDIS_CONNECTIONS = 8
# Redis' own limit of clients, ``maxclients``.
MAX_CLIENTS = 10_000
# Of a server's network: queues grow without bound towards all of it.
SHARE = 0.6


@dataclass(frozen=True)
class Asked:
    """What requests ask of a store, all ranks together.

    Attributes:
        commands: of Redis; a lookup asks for each record that a hit would need.
        read, written: bytes.
    """

    commands: float
    read: float
    written: float

    def times(self, factor: float) -> "Asked":
        return Asked(self.commands * factor, self.read * factor, self.written * factor)

    def plus(self, other: "Asked") -> "Asked":
        return Asked(
            self.commands + other.commands, self.read + other.read, self.written + other.written
        )


@dataclass(frozen=True)
class Sharing:
    """The engines of one store, all alike.

    Attributes:
        engines: how many.
        requests: a second, of each.
        hit_share: of the requests, those that hit at the prompt's last boundary; the others are
            new, and are stored.
        store_rate: bytes a second that one server of the store can send, and take.
    """

    engines: int
    requests: float
    hit_share: float
    store_rate: float


def lookup(sizes: Sizes, work: Workload) -> Asked:
    """Return what the lookup of one prompt asks, found or not: one round trip a rank."""
    records, _ = _records(sizes, _blocks(sizes, work), 1 if _last(sizes, work) else 0)
    return Asked(records, 0, 0)


def hit(sizes: Sizes, work: Workload) -> Asked:
    """Return what the load of one prompt reads; nothing where no prompt of this length hits."""
    if not (last := _last(sizes, work)):
        return Asked(0, 0, 0)
    records, size = _records(sizes, -(-last // sizes.block_size), 1)
    return Asked(records, size, 0)


def save(sizes: Sizes, work: Workload) -> Asked:
    """Return what the save of one new prompt writes: EXISTS and SET of each record."""
    states = boundaries(
        work.context, sizes.block_size, work.interval(sizes.state_tokens), work.unit
    )
    count = {ATTENTION: _blocks(sizes, work), STATE: len(states)}
    records = written = 0
    for group in sizes.groups:
        copies = storage.BACKENDS["redis"].copies(group, sizes.tp) * count[group.kind]
        records += copies
        written += copies * record_bytes(group.bytes)
    return Asked(2 * records, 0, written)


def demand(sizes: Sizes, work: Workload, sharing: Sharing) -> dict[str, Any]:
    """Compute what one engine asks of the store, ten, and so on up to all of them.

    Returns:
        Those of ``sharing``, and ``rows``. Rates are per second; ``servers`` is how many are needed
        so that :data:`SHARE` of their rate is enough; ``connections`` are those of Redis, to each
        server.
    """
    new = 1 - sharing.hit_share
    request = lookup(sizes, work).plus(hit(sizes, work).times(sharing.hit_share))
    request = request.plus(save(sizes, work).times(new))
    rows = []
    for engines in steps(sharing.engines):
        asked = request.times(engines * sharing.requests)
        most = max(asked.read, asked.written)
        rows.append(
            {
                "engines": engines,
                "connections": engines * sizes.tp * REDIS_CONNECTIONS,
                "requests": engines * sharing.requests,
                **asdict(asked),
                "stored_in_an_hour": 3600 * asked.written,
                "servers": max(1, math.ceil(most / (SHARE * sharing.store_rate))),
            }
        )
    return {**asdict(sharing), "rows": rows}


def steps(engines: int) -> list[int]:
    """List 1, 10, 100 and so on below ``engines``, and ``engines``."""
    found = [1]
    while found[-1] * 10 < engines:
        found.append(found[-1] * 10)
    return [*found, engines] if engines > 1 else found


def _last(sizes: Sizes, work: Workload) -> int:
    """Return the last boundary that a prompt can hit at, in tokens; 0 if none."""
    ends = boundaries(work.context, sizes.block_size, 0, work.unit)
    return ends[-1] if ends else 0


def _blocks(sizes: Sizes, work: Workload) -> int:
    """Return the attention pages of a prompt, a partly filled one before its last boundary too."""
    return work.context // sizes.block_size + (_last(sizes, work) % sizes.block_size > 0)


def _records(sizes: Sizes, blocks: int, states: int) -> tuple[int, int]:
    """Count the records that all ranks ask for, and their bytes.

    Each rank reads the pages that are equal on all ranks, too.
    """
    count = {ATTENTION: blocks, STATE: states}
    each = [(sizes.tp * count[group.kind], record_bytes(group.bytes)) for group in sizes.groups]
    return sum(number for number, _ in each), sum(number * size for number, size in each)
