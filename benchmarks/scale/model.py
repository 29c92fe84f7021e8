# SPDX-License-Identifier: Apache-2.0
"""What many engines ask of one store, computed from what one engine was measured to ask."""

import math
from dataclasses import dataclass

ENGINES = (1, 10, 1000)
NIC_BYTES = {"25 Gbit/s": 25e9 / 8, "100 Gbit/s": 100e9 / 8}
NODE_MEMORY = 512 << 30
# Of what a network card or a core can do; queues grow without bound towards all of it.
SHARE = 0.6


@dataclass(frozen=True)
class Sizes:
    """One model on one engine, all ranks together.

    Attributes:
        attention: bytes of one block of all attention groups.
        state: bytes of the states at one boundary.
        groups: records of a boundary's states.
        ranks: tensor-parallel ranks. They share the bytes; each has records of its own.
    """

    attention: int
    state: int
    groups: int
    ranks: int = 1

    def bytes_of(self, blocks: int, boundaries: int = 1) -> int:
        return blocks * self.attention + boundaries * self.state

    def records_of(self, blocks: int, boundaries: int = 1) -> int:
        return self.ranks * (blocks + boundaries * self.groups)


@dataclass(frozen=True)
class Stream:
    """What the requests of one engine ask of the store, on average.

    Attributes:
        requests: a second.
        blocks: of a prompt.
        hits: share of the requests that hit at the last boundary.
        read: blocks that a hit reads; fewer than it has where vLLM's cache has the first.
        stored: blocks that a request adds, averaged over all requests.
        boundaries: states that a request adds, the same.
    """

    name: str
    requests: float
    blocks: int
    hits: float
    read: int
    stored: float
    boundaries: float


@dataclass(frozen=True)
class Demand:
    """Of all engines together, each second; memory for one hour of what is stored."""

    engines: int
    commands: float
    bytes_out: float
    bytes_in: float
    memory_per_hour: float

    def nodes(self, nic: float, cpu_out: float, cpu_in: float) -> dict[str, int]:
        """Equal servers that are needed, by what bounds them. A server runs on one core.

        Args:
            nic: bytes a second, in each direction.
            cpu_out, cpu_in: the server's CPU seconds for a byte that is read, or written.
        """
        cores = self.bytes_out * cpu_out + self.bytes_in * cpu_in
        return {
            "network": math.ceil(max(self.bytes_out, self.bytes_in) / (SHARE * nic)),
            "core": math.ceil(cores / SHARE),
            "memory": math.ceil(self.memory_per_hour / NODE_MEMORY),
        }


def demand(sizes: Sizes, stream: Stream, engines: int) -> Demand:
    """Commands and bytes of ``engines`` engines that share no request.

    A lookup asks for each block (EXISTS) and for the states behind the last one; where a hit ends
    before that, for those of all other boundaries, too.
    Each record that is read is one command more, each that is written two: EXISTS and SET.
    """
    rate = engines * stream.requests
    looked_up = sizes.ranks * (stream.blocks + sizes.groups)
    if stream.blocks > stream.read:
        looked_up += stream.hits * sizes.ranks * (stream.blocks - 1) * sizes.groups
    read = stream.hits * sizes.records_of(stream.read)
    written = sizes.records_of(stream.stored, stream.boundaries)
    stored = rate * sizes.bytes_of(stream.stored, stream.boundaries)
    return Demand(
        engines,
        rate * (looked_up + read + 2 * written),
        rate * stream.hits * sizes.bytes_of(stream.read),
        stored,
        3600 * stored,
    )


def hot_key_bytes(sizes: Sizes, stream: Stream, engines: int) -> float:
    """Bytes a second of one block that every hit reads. One node serves them all."""
    return engines * stream.requests * stream.hits * sizes.attention / sizes.ranks
