# SPDX-License-Identifier: Apache-2.0
"""Page sizes of real models, without the models."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.metadata import LoadSpec, SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.worker.pages import GroupPages


@dataclass(frozen=True)
class Shape:
    """Pages of one model on one rank, in vLLM's default dtypes.

    Attributes:
        block_size: N, tokens per block, as vLLM pads it for this model.
        layers: layers of each group; vLLM makes all groups equally long.
        attention_bytes: one layer's page of one block of keys and values.
        states: state groups.
        state_bytes: one layer's conv and SSM state.
        source: where the figures come from.
    """

    name: str
    block_size: int
    layers: int
    attention_bytes: int
    states: int
    state_bytes: int
    source: str

    @property
    def plan(self) -> GroupPlan:
        return GroupPlan(
            self.block_size,
            (self.states,),
            tuple(range(self.states)),
        )

    def bytes_at(self, blocks: int) -> int:
        """What a hit at ``blocks`` restores: all attention pages and one state per group."""
        return self.layers * (blocks * self.attention_bytes + self.states * self.state_bytes)

    def pages(self, num_blocks: int, device: str = "cpu") -> dict[int, GroupPages]:
        """Random pages; all groups overlay the same memory, as in vLLM."""
        size = max(self.attention_bytes, self.state_bytes)
        memory = [
            torch.randint(0, 256, (num_blocks, size), dtype=torch.uint8, device=device)
            for _ in range(self.layers)
        ]
        made = {}
        for group in range(self.states + 1):
            wanted = self.state_bytes if group < self.states else self.attention_bytes
            names = [f"g{group}.{layer}" for layer in range(self.layers)]
            caches = {name: each[:, :wanted] for name, each in zip(names, memory, strict=True)}
            made[group] = GroupPages(names, caches)
        return made

    def load(self, name: str, prefix: Prefix, first: int) -> LoadSpec:
        """All of ``prefix`` into the block ids from ``first`` on."""
        blocks = len(prefix.hashes)
        ids = range(first, first + blocks + self.states)
        return LoadSpec(name, prefix, 0, blocks, (tuple(ids[:blocks]),), tuple(ids[blocks:]))

    def save(self, name: str, prefix: Prefix, first: int) -> SaveSpec:
        """All of ``prefix`` from the block ids from ``first`` on, and its last state."""
        load = self.load(name, prefix, first)
        attention = tuple((block, (id_,)) for block, id_ in enumerate(load.attention_blocks[0]))
        return SaveSpec(name, prefix, attention, ((load.boundary, load.state_blocks),))


def block_ids(load: LoadSpec) -> Iterable[tuple[int, int]]:
    """(group, block id) of everything a load writes; groups as :meth:`Shape.plan` numbers them."""
    yield from ((len(load.state_blocks), id_) for id_ in load.attention_blocks[0])
    yield from enumerate(load.state_blocks)


QWEN36_27B = Shape(
    "Qwen3.6-27B",
    block_size=784,
    layers=16,
    attention_bytes=784 * 2 * 4 * 256 * 2,
    states=3,
    state_bytes=153_944_064 // 48,
    source="48 GDN layers with 153,944,064 bytes of state, 16 attention layers of 4 heads of 256",
)
# A sixteenth of it, for many rounds in little memory.
SMALL = Shape(
    "a sixteenth of Qwen3.6-27B",
    block_size=784,
    layers=4,
    attention_bytes=QWEN36_27B.attention_bytes // 4,
    states=3,
    state_bytes=QWEN36_27B.state_bytes // 4,
    source="a quarter of the layers, of a quarter of the size",
)
SHAPES = {"qwen3.6-27b": QWEN36_27B, "small": SMALL}
