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
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from lmcache_hybrid.core import backends
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import tags_digest, wide_hash
from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.protocol.metadata import SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.protocol.record_reports import DISK, RAM, REMOTE, RankReports, Tier
from lmcache_hybrid.scheduler.event_prefixes import (
    AnnouncedPrefixes,
    BlockKey,
    Change,
    EventBlock,
)
from lmcache_hybrid.scheduler.prompt import inner_hashes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

# Seconds that an idle engine keeps stepping while writes are in flight, to publish their end.
FLUSH_SECONDS = 10.0

# Medium, locality and ownership in events.
WHERE: dict[Tier, tuple[str, str, str | None]] = {
    RAM: (MEDIUM_CPU, "LOCAL", None),
    DISK: (MEDIUM_STORAGE, "LOCAL", backends.DISK),
    REMOTE: (MEDIUM_STORAGE, "REMOTE", backends.REMOTE),
}


class KVEvents:
    """Turns the ranks' reports into events. Used by the scheduler's thread only.

    Reports name records by hash, and only a request tells the order of blocks: records that a rank
    found at start-up are announced once a request has looked them up.
    """

    def __init__(
        self,
        plan: GroupPlan,
        groups: "Sequence[KVCacheGroupSpec]",
        ranks: int,
        look_ahead: int = 0,
    ) -> None:
        """Begin with one AllBlocksCleared: what consumers knew of this engine is void.

        Args:
            groups: vLLM's KV cache groups.
            ranks: how many must hold a boundary.
            look_ahead: tokens behind a block that its hash covers, see :class:`Drafter`.
        """
        self._plan, self._size, self._look_ahead = plan, plan.block_size, look_ahead
        specs = [group.kv_cache_spec for group in groups]
        self._kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        self._windows = [get_kv_cache_spec_sliding_window(spec) for spec in specs]
        self._prefixes = AnnouncedPrefixes(plan, ranks)
        self._epoch = 0
        self._first: list[KVCacheEvent] = [AllBlocksCleared()]
        # Ranks whose writes are in flight, and ``time.monotonic`` until which that counts.
        self._writing: set[int] = set()
        self._until = 0.0

    # Blocks

    def learn_save(self, request: "Request", save: SaveSpec) -> None:
        """Learn the blocks that ``save`` is about to store."""
        ends = [block + 1 for block, _ in save.attention]
        ends += [end for end, _ in save.states]
        ends += [block + 1 for _, block, _ in save.windows]
        inner = [tokens for tokens, _, _ in save.tails]
        ends += [tokens // self._size for tokens in inner]
        self.learn(request, save.prefix, max(ends, default=0), inner)

    def learn_answer(self, request: "Request", prefix: Prefix, result: LookupResult) -> None:
        """Learn the blocks that a lookup found."""
        if not (result.attention or result.tail):
            return
        inner = [result.tokens(self._size)] if result.tail else []
        prefix = prefix.with_inner(inner_hashes(request, inner, self._plan))
        self.learn(request, prefix, result.attention, inner)

    def learn(
        self, request: "Request", prefix: Prefix, blocks: int, inner: Iterable[int] = ()
    ) -> None:
        """Learn a request's first ``blocks`` blocks.

        Args:
            inner: boundaries inside a block, in tokens.
        """
        own = () if prefix.adapter is None else (prefix.adapter.tag,)
        if prefix.tags != own:
            return  # events do not carry tags, and other requests must not expect a hit
        tags = tags_digest(prefix.tags)

        def key(at: int) -> BlockKey:
            return wide_hash(prefix.hashes[at]), tags

        # From the end: a step tells of few of a long prompt's blocks.
        first = blocks = min(blocks, len(prefix.hashes))
        while first and not self._prefixes.knows(key(first - 1)):
            first -= 1
        for at in range(first, blocks):
            block = self._block(request, prefix, at, (at + 1) * self._size, prefix.hashes[at])
            self._prefixes.learn(key(at), key(at - 1) if at else None, block)
        for end in inner:
            at, inside = end // self._size, (wide_hash(prefix.inner[end]), tags)
            if not self._prefixes.knows(inside):
                block = self._block(request, prefix, at, end, prefix.inner[end])
                self._prefixes.learn(inside, key(at - 1) if at else None, block)

    def _block(
        self, request: "Request", prefix: Prefix, at: int, end: int, block_hash: bytes
    ) -> EventBlock:
        """Describe the tokens of block ``at`` up to token ``end``."""
        start, lora, ahead = at * self._size, request.lora_request, None
        if self._look_ahead:
            last = end + self._look_ahead
            ahead = array("q", request.all_token_ids[end:last])
            utils: Any = kv_cache_utils  # vLLM 0.32 has no such function
            extra, _ = utils.generate_lookahead_block_hash_extra_keys(request, start, end, last, 0)
        else:
            extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return EventBlock(
            block_hash,
            prefix.hashes[at - 1] if at else None,
            array("q", request.all_token_ids[start:end]),
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            extra,
            ahead,
        )

    # Reports

    def receive(self, reports: Any) -> None:
        """Apply the ranks' reports of a step."""
        if not isinstance(reports, RankReports):
            return
        for report in reports.reports:
            if report.epoch != self._epoch:
                continue  # its records were dropped by a reset
            self._prefixes.apply(report)
            self._until = time.monotonic() + FLUSH_SECONDS
            (self._writing.add if report.writing else self._writing.discard)(report.rank)

    def reset(self, epoch: int) -> None:
        """Forget all records; only reports of ``epoch`` count from now on."""
        self._epoch = epoch
        self._prefixes.forget()

    def cleared(self) -> None:
        """Announce everything again, after vLLM told consumers to forget this engine."""
        self._prefixes.unsay()

    # Events

    @property
    def pending(self) -> bool:
        """Whether vLLM must step although no request runs."""
        if self._first or not self._prefixes.settled:
            return True
        return bool(self._writing) and time.monotonic() < self._until

    def drain(self) -> list[KVCacheEvent]:
        """Return the events since the last call: removals, then stores."""
        if not self._first and self._prefixes.settled:
            return []
        events, self._first = self._first, []
        removed, stored = self._prefixes.settle()
        by_place: dict[tuple[int, Tier], list[Any]] = {}
        for block, group, tier in removed:
            block_hash = maybe_convert_block_hash(BlockHash(block.block_hash))
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

    def _stored(self, change: Change) -> BlockStored:
        block, group, tier = change
        parent = block.parent_hash
        medium, locality, ownership = WHERE[tier]
        ahead: Any = {} if block.ahead is None else {"lookahead_token_ids": [block.ahead.tolist()]}
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
            **ahead,
        )
