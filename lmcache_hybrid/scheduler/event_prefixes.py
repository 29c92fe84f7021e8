# SPDX-License-Identifier: Apache-2.0
"""Finds the boundaries that are reusable on all ranks, for KV cache events.

Blocks form a tree by the hash of the block before. A boundary is *reusable* when every rank
holds the attention pages of all blocks up to it, the last pages of window groups, and all states.
States are announced at reusable boundaries only, pages only up to the deepest one.

The work of a step grows with the blocks that changed and those whose announcement changes, not
with the blocks in front of them.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.record_reports import RankReport, RecordName, Tier

# Max learned blocks to remember that no rank holds; more until the next settle.
KEPT_UNHELD = 1 << 14

# Block hash and digest of the tags.
BlockKey = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class EventBlock:
    """A block as events describe it, the same in every group.

    Attributes:
        block_hash, parent_hash: vLLM's.
        tokens: of this block only; fewer than N where it ends inside a block.
        extra_keys: what its hash covers beside tokens, as vLLM hashes it.
        ahead: the tokens behind it that its hash covers; None if it covers none.
    """

    block_hash: bytes
    parent_hash: bytes | None
    tokens: array
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    ahead: array | None = None


@dataclass(eq=False, slots=True)
class BlockNode:
    """One block, or the tokens of one up to a boundary inside it.

    Attributes:
        block: its description; None until :meth:`AnnouncedPrefixes.learn`.
        parent: the block before; None for the first one, and until it is learned.
        depth: blocks up to and with this one.
        tiers: by group, the nearest tier of each rank that holds its record.
        rooted: whether all ranks hold the attention pages up to its end.
        ready: whether its end is a reusable boundary.
        runs: by window group, how many blocks in a row up to this one have pages on all ranks,
            counted up to what the window needs.
        below: reusable boundaries at or past its end, each child's branch counted as one.
        announced: by group, the tier that consumers were told.
    """

    key: BlockKey
    block: EventBlock | None = None
    parent: "BlockNode | None" = None
    children: set["BlockNode"] = field(default_factory=set)
    depth: int = 0
    tiers: dict[int, dict[int, Tier]] = field(default_factory=dict)
    rooted: bool = False
    ready: bool = False
    runs: dict[int, int] = field(default_factory=dict)
    below: int = 0
    announced: dict[int, Tier] = field(default_factory=dict)


class Change(NamedTuple):
    """One record that consumers must be told of."""

    block: EventBlock
    group: int
    tier: Tier


class AnnouncedPrefixes:
    """Combines the ranks' reports. Used by the scheduler's thread only."""

    def __init__(self, plan: GroupPlan, ranks: int) -> None:
        self._plan, self._ranks = plan, ranks
        windows = tuple(window.group for window in plan.windows)
        self._groups, self._pages = plan.groups, (*plan.attention, *windows)
        self._nodes: dict[BlockKey, BlockNode] = {}
        self._unheld: OrderedDict[BlockNode, None] = OrderedDict()
        self._changed: dict[BlockNode, None] = {}
        self._unsaid: dict[BlockNode, None] = {}
        self._refusing: set[int] = set()
        self._reach = max((window.blocks for window in plan.windows), default=0)

    def knows(self, key: BlockKey) -> bool:
        """Whether the block, and all before it, have been learned."""
        node = self._nodes.get(key)
        return node is not None and node.block is not None

    def learn(self, key: BlockKey, parent: BlockKey | None, block: EventBlock) -> None:
        """Learn a block's parent and description.

        Args:
            parent: learned before; None for the first block of a prompt.
        """
        node = self._node(key)
        if node.block is not None:
            return
        node.block, node.depth = block, 1
        if parent is not None:
            node.parent = self._nodes[parent]
            node.parent.children.add(node)
            node.depth = node.parent.depth + 1
        self._changed[node] = None
        if not node.tiers:
            self._unheld[node] = None

    def apply(self, report: RankReport) -> None:
        """Apply one rank's report."""
        for name, tier in report.changes:
            self._change(report.rank, name, tier)
        if report.serving == (report.rank in self._refusing):  # that has changed
            self._refusing ^= {report.rank}
            self._unsaid.update(dict.fromkeys(self._nodes.values()))

    def _change(self, rank: int, name: RecordName, tier: Tier | None) -> None:
        node = self._node((name.block_hash, name.tags))
        tiers = node.tiers.setdefault(name.group, {})
        if tier is not None:
            tiers[rank] = tier
            self._unheld.pop(node, None)
        else:
            tiers.pop(rank, None)
            if not tiers:
                del node.tiers[name.group]
        self._changed[node] = None

    def forget(self) -> None:
        """Forget what ranks hold, after a reset."""
        for node in self._nodes.values():
            node.tiers.clear()
            self._changed[node] = None

    def unsay(self) -> None:
        """Announce everything again: consumers have forgotten all."""
        for node in self._nodes.values():
            if node.announced:
                node.announced.clear()
                self._unsaid[node] = None

    @property
    def settled(self) -> bool:
        """Whether there is nothing to announce."""
        return not (self._changed or self._unsaid)

    def settle(self) -> tuple[list[Change], list[Change]]:
        """Return the changes to announce since the last call.

        Returns:
            Removed records, deepest first, and stored ones, shallowest first.
        """
        changed, self._changed = self._changed, {}
        self._reconsider(changed)
        unsaid, self._unsaid = sorted(self._unsaid, key=lambda node: node.depth), {}
        removed: list[Change] = []
        stored: list[Change] = []
        for node in unsaid:
            block, before, now = node.block, node.announced, self._wanted(node)
            if block is not None:  # else its prompt is unknown
                removed += [Change(block, g, t) for g, t in before.items() if now.get(g) != t]
                stored += [Change(block, g, t) for g, t in now.items() if before.get(g) != t]
            node.announced = now
        removed.reverse()
        for node in changed:
            self._prune(node)
        # Not while blocks are learned: the next one's parent may be the oldest.
        while len(self._unheld) > KEPT_UNHELD:
            self._prune(self._unheld.popitem(last=False)[0])
        return removed, stored

    # State of a block

    def _tier(self, node: BlockNode, group: int) -> Tier | None:
        """Return the slowest of the ranks' nearest tiers; None where a rank lacks the record."""
        tiers = node.tiers.get(group, {})
        return max(tiers.values()) if len(tiers) == self._ranks else None

    def _holds(self, node: BlockNode, groups: tuple[int, ...]) -> bool:
        return all(len(node.tiers.get(group, ())) == self._ranks for group in groups)

    def _run(self, node: BlockNode, group: int, most: int) -> int:
        """Compute :attr:`BlockNode.runs` from the parent's."""
        if not self._holds(node, (group,)):
            return 0
        return min(most, 1 + (node.parent.runs.get(group, 0) if node.parent is not None else 0))

    def _is_rooted(self, node: BlockNode) -> bool:
        before = node.depth == 1 or (node.parent is not None and node.parent.rooted)
        return before and self._holds(node, self._plan.attention)

    def _is_ready(self, node: BlockNode) -> bool:
        return (
            node.rooted
            and self._holds(node, self._plan.states)
            and all(
                node.runs[window.group] == min(window.blocks, node.depth)
                for window in self._plan.windows
            )
        )

    def _reconsider(self, changed: Iterable[BlockNode]) -> None:
        """Update rooted and ready of ``changed`` and the blocks behind, each block once."""
        # By depth, so that a block follows its parent; with how many blocks its window pages reach.
        waiting: dict[int, dict[BlockNode, int]] = {}
        for node in changed:
            self._unsaid[node] = None
            waiting.setdefault(node.depth, {})[node] = self._reach
        depths = list(waiting)
        heapq.heapify(depths)
        while depths:
            depth = heapq.heappop(depths)
            for node, reach in waiting.pop(depth).items():
                moved = self._update(node)
                if not (moved or reach > 1):
                    continue
                if node.children and depth + 1 not in waiting:
                    waiting[depth + 1] = {}
                    heapq.heappush(depths, depth + 1)
                for child in node.children:
                    level = waiting[depth + 1]
                    level[child] = max(level.get(child, 0), reach - 1)

    def _update(self, node: BlockNode) -> bool:
        """Update a block's runs, rooted and ready; returns whether rooted changed."""
        for window in self._plan.windows:
            node.runs[window.group] = self._run(node, window.group, window.blocks)
        rooted = self._is_rooted(node)
        moved, node.rooted = rooted != node.rooted, rooted
        ready = self._is_ready(node)
        if ready != node.ready:
            node.ready = ready
            self._count(node, 1 if ready else -1)
        return moved

    def _count(self, node: BlockNode, change: int) -> None:
        """Add ``change`` (1 or -1) to the boundaries at the end of ``node``."""
        current: BlockNode | None = node
        self._unsaid[node] = None
        while current is not None:
            before, current.below = current.below, current.below + change
            if before and current.below:
                return  # nothing changes for the blocks before it
            self._unsaid[current] = None
            current = current.parent

    # Announcements

    def _wanted(self, node: BlockNode) -> dict[int, Tier]:
        """Return what consumers should know of a block: tiers by group."""
        if self._refusing or not node.below:
            return {}
        groups = self._groups if node.ready else self._pages
        tiers = {group: self._tier(node, group) for group in groups}
        return {group: tier for group, tier in tiers.items() if tier is not None}

    # Nodes

    def _node(self, key: BlockKey) -> BlockNode:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = BlockNode(key)
        return node

    def _prune(self, node: BlockNode) -> None:
        """Forget a block without records and children, and such blocks before it."""
        current: BlockNode | None = node
        while current is not None:
            if current.tiers or current.children or current in self._unheld:
                return
            if self._nodes.get(current.key) is not current:
                return
            del self._nodes[current.key]
            parent = current.parent
            if parent is not None:
                parent.children.discard(current)
            current = parent

    def check_integrity(self) -> None:
        """Assert what holds after :meth:`settle`. Walks all blocks: for tests."""
        for key, node in self._nodes.items():
            assert node.key == key
            assert node.below == node.ready + sum(child.below > 0 for child in node.children)
            assert node.rooted == self._is_rooted(node) and node.ready == self._is_ready(node)
            for window in self._plan.windows:
                run = self._run(node, window.group, window.blocks)
                assert node.runs[window.group] == run
            assert not node.ready or node.block is not None
            assert node.announced == self._wanted(node)
            assert all(child.parent is node for child in node.children)
            assert all(self._nodes[child.key] is child for child in node.children)
