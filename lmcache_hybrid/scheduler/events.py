# SPDX-License-Identifier: Apache-2.0
"""Publishes what the store holds as vLLM's KV cache events, see docs/events.md."""

import time
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import tags_digest, wide_hash
from lmcache_hybrid.protocol.blocks import Block, KnownBlocks
from lmcache_hybrid.protocol.changes import DISK, RAM, REMOTE, RankReports, Tier
from lmcache_hybrid.protocol.metadata import SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.boundaries import BlockKey, Boundaries, Change

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

# An idle engine makes steps for so long while writes are in flight, so that their end is
# published; and after its start, until every rank has reported what it found on disk.
FLUSH_SECONDS = 10.0

# Medium, locality and ownership in events.
WHERE: dict[Tier, tuple[str, str, str | None]] = {
    RAM: (MEDIUM_CPU, "LOCAL", None),
    DISK: (MEDIUM_STORAGE, "LOCAL", "LocalDiskBackend"),
    REMOTE: (MEDIUM_STORAGE, "REMOTE", "RemoteBackend"),
}

NO_TAGS = tags_digest(())


class KVEvents:
    """Turns reports of the ranks into events. Used by the scheduler's thread only."""

    def __init__(
        self,
        plan: GroupPlan,
        groups: "Sequence[KVCacheGroupSpec]",
        ranks: int,
        known: KnownBlocks | None = None,
    ) -> None:
        """Announce nothing yet, but that whatever was known of this engine is void.

        Args:
            groups: vLLM's KV cache groups.
            ranks: which must all hold a boundary.
            known: keeps over restarts what blocks are, and is closed here; None where nothing of
                them stays on this machine.
        """
        self._size = plan.block_size
        specs = [group.kv_cache_spec for group in groups]
        self._kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        self._windows = [get_kv_cache_spec_sliding_window(spec) for spec in specs]
        self._boundaries = Boundaries(plan, ranks)
        self._epoch = 0
        self._first: list[KVCacheEvent] = [AllBlocksCleared()]
        self._writing = set(range(ranks))
        self._known = known
        # Ranks that have not said yet what they found at the start.
        self._unreported = set(range(ranks))
        self._until = time.monotonic() + FLUSH_SECONDS

    # What becomes known of blocks

    def learn_save(self, request: "Request", save: SaveSpec) -> None:
        """The blocks of ``save`` are about to be stored."""
        ends = [block + 1 for block, _ in save.attention]
        ends += [end for end, _ in save.states]
        ends += [block + 1 for _, block, _ in save.windows]
        inner = [tokens for tokens, _, _ in save.tails]
        ends += [tokens // self._size for tokens in inner]
        self.learn(request, save.prefix, max(ends, default=0), inner)

    def learn(
        self, request: "Request", prefix: Prefix, blocks: int, inner: Iterable[int] = ()
    ) -> None:
        """Take note of what a request's first blocks are.

        Args:
            inner: boundaries inside a block, in tokens.
        """
        own = () if prefix.adapter is None else (prefix.adapter.tag,)
        if prefix.tags != own:
            return  # for requests with the same tags only, of which events say nothing
        tags = tags_digest(prefix.tags)

        def key(at: int) -> BlockKey:
            return wide_hash(prefix.hashes[at]), tags

        # From the end: a step tells of few of a long prompt's blocks.
        first = blocks = min(blocks, len(prefix.hashes))
        while first and not self._boundaries.knows(key(first - 1)):
            first -= 1
        new: list[Block] = []
        for at in range(first, blocks):
            new.append(self._block(request, prefix, at, (at + 1) * self._size, prefix.hashes[at]))
            self._boundaries.learn(key(at), key(at - 1) if at else None, new[-1])
        for end in inner:
            at, inside = end // self._size, (wide_hash(prefix.inner[end]), tags)
            if not self._boundaries.knows(inside):
                new.append(self._block(request, prefix, at, end, prefix.inner[end]))
                self._boundaries.learn(inside, key(at - 1) if at else None, new[-1])
        if new and self._known is not None:
            self._known.add(new)

    def _block(
        self, request: "Request", prefix: Prefix, at: int, end: int, block_hash: bytes
    ) -> Block:
        """Describe the tokens of block ``at`` up to token ``end``."""
        start, lora = at * self._size, request.lora_request
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return Block(
            block_hash,
            prefix.hashes[at - 1] if at else None,
            array("q", request.all_token_ids[start:end]),
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            extra,
        )

    def _recall(self) -> None:
        """Learn what some of the blocks are that were found at the start."""
        blocks = self._known.recalled() if self._known is not None else ()
        for block in blocks:
            key, before = (wide_hash(block.block_hash), NO_TAGS), block.parent_hash
            parent = None if before is None else (wide_hash(before), NO_TAGS)
            # One that is not held would push another out of those to remember.
            if self._boundaries.holds(key) and (not parent or self._boundaries.knows(parent)):
                self._boundaries.learn(key, parent, block)

    def _keep(self) -> None:
        if self._known is not None and self._known.is_due(self._boundaries.num_blocks):
            self._known.rewrite(self._boundaries.known())

    # What becomes known of the store

    def receive(self, reports: Any) -> None:
        """Take what ranks report in a step."""
        if not isinstance(reports, RankReports):
            return
        for report in reports.reports:
            if report.epoch != self._epoch:
                continue  # of records that were forgotten since
            self._boundaries.take(report)
            self._until = time.monotonic() + FLUSH_SECONDS
            (self._writing.add if report.writing else self._writing.discard)(report.rank)
            if report.serving:  # one that is off has not looked what lies on disk
                self._reported(report.rank)

    def _reported(self, rank: int) -> None:
        """Ask what the blocks are that were found at the start, once all ranks have said it."""
        if rank in self._unreported:
            self._unreported.remove(rank)
            if not self._unreported and self._known is not None:
                self._known.recall(self._boundaries.held(NO_TAGS))

    def reset(self, epoch: int) -> None:
        """The ranks forget all records.

        Args:
            epoch: of the reports that count from now on.
        """
        self._epoch = epoch
        self._boundaries.forget()
        if self._known is not None:
            self._known.erase()

    def cleared(self) -> None:
        """Announce everything again: vLLM tells consumers to forget all of this engine."""
        self._boundaries.unsay()

    # What is published

    @property
    def pending(self) -> bool:
        """Whether a step must be made although no request runs."""
        if self._first or not self._boundaries.settled:
            return True
        if self._known is not None and self._known.recalling:
            return True
        return bool(self._writing) and time.monotonic() < self._until

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call: what is gone, then what is there."""
        self._recall()
        if not self._first and self._boundaries.settled:
            return []
        events, self._first = self._first, []
        removed, stored = self._boundaries.settle()
        self._keep()
        by_place: dict[tuple[int, Tier], list[Any]] = {}
        for node, group, tier in removed:
            block_hash = maybe_convert_block_hash(BlockHash(node.block.block_hash))
            by_place.setdefault((group, tier), []).append(block_hash)
        for (group, tier), hashes in by_place.items():
            medium, locality, ownership = WHERE[tier]
            events.append(
                BlockRemoved(
                    block_hashes=hashes,
                    medium=medium,
                    group_idx=group,
                    locality=locality,
                    ownership=ownership,
                )
            )
        return events + [self._stored(change) for change in stored]

    def close(self) -> None:
        """Let what is known be written."""
        if self._known is not None:
            self._known.close()

    def _stored(self, change: Change) -> BlockStored:
        block, group = change.node.block, change.group
        parent = block.parent_hash
        medium, locality, ownership = WHERE[change.tier]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(block.block_hash))],
            parent_block_hash=parent and maybe_convert_block_hash(BlockHash(parent)),
            token_ids=block.tokens.tolist(),
            block_size=len(block.tokens),
            lora_id=block.lora_id,
            medium=medium,
            lora_name=block.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys]),
            group_idx=group,
            kv_cache_spec_kind=self._kinds[group],
            kv_cache_spec_sliding_window=self._windows[group],
            locality=locality,
            ownership=ownership,
        )
