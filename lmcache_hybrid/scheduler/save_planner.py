# SPDX-License-Identifier: Apache-2.0
"""Plans the saves of each step, and makes vLLM end steps where a state should be saved."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import Block, GroupPlan
from lmcache_hybrid.protocol.metadata import SaveSpec
from lmcache_hybrid.scheduler.prompt import inner_hashes
from lmcache_hybrid.scheduler.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.request import Request

NULL_BLOCK = 0
# A state that vLLM offers to store: (KV cache group, block id, boundary in tokens).
Offer = tuple[int, int, int]


class SavePlanner:
    """Plans saves, one request at a time. Mutates trackers; used by the scheduler's thread only.

    Attributes:
        ledger: counts offers that are not stored.
    """

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        hashes_per_block: int,
        ledger: Ledger[SchedulerCounts],
    ) -> None:
        self._plan, self._options = plan, options
        self._hashes_per_block = hashes_per_block
        self.ledger = ledger

    def admit(self, tracker: RequestTracker, computed: int, gain: int) -> None:
        """Start over for a request that computes from token ``computed + gain`` on.

        Args:
            computed: tokens in vLLM's own cache.
            gain: tokens that are loaded.
        """
        size, step_ends = self._plan.block_size, tracker.step_ends
        if tracker.save:
            # vLLM has just set its own; StepEnds says what this attribute does.
            junction = tracker.request.shared_prefix_boundary
            step_ends.junction = max(step_ends.junction, junction)
            self._aim(tracker, computed + gain)
        started = {computed // size * size, computed + gain}
        # Inside a block it counts until a deeper boundary is stored, see _keep.
        whole = len(tracker.prefix.hashes) * size
        tracker.likeliest = {b for b in started if 0 < b <= whole and b % size == 0}
        tracker.chunks = tracker.save and step_ends.wants_end(computed + gain)

    def plan(
        self,
        tracker: RequestTracker,
        computed: int,
        offers: Sequence[Offer],
        block_state: "KVConnectorBlockState",
    ) -> SaveSpec | None:
        """Plan the saves of one step.

        Args:
            computed: the request's tokens that are computed when this step ends.
            offers: states that vLLM hands off in this step; they do not outlive it.

        Returns:
            None if there is nothing new.
        """
        rid = tracker.request.request_id
        if offers:
            self._reach(tracker, max(tokens for _, _, tokens in offers))
        reached = self._reached(tracker, computed) if tracker.next_unoffered else []
        if tracker.chunks:
            ended, offers = self._end_chunk(tracker, computed, offers, block_state)
            reached += ended
        attention = self._attention(tracker, computed, block_state)
        offered, size = self._states(tracker, computed, offers), self._plan.block_size
        states = tuple((end // size, blocks) for end, blocks in offered if end % size == 0)
        tails = self._tails(rid, [offer for offer in offered if offer[0] % size], block_state)
        reached += [boundary for boundary, _ in states]
        windows = self._windows(tracker, reached, block_state)
        if not (attention or states or windows or tails):
            return None
        ends = [b * size for b in reached] + [end for end, _, _ in tails]
        kept = self._keep(tracker, ends, attention)
        whole, inner = [b // size for b in kept if b % size == 0], [b for b in kept if b % size]
        named = {*inner, *(end for end, _, _ in tails)}
        prefix = tracker.prefix.with_inner(inner_hashes(tracker.request, named, self._plan))
        return SaveSpec(rid, prefix, attention, states, windows, tuple(whole), tails, tuple(inner))

    # Where steps end

    def meet(self, tracker: RequestTracker, boundary: int) -> None:
        """Let a running request end a step at ``boundary`` (tokens), where another waits for it.

        The boundary lies past the current step.
        """
        tracker.step_ends.meetings.add(boundary)
        self._aim(tracker, tracker.request.num_computed_tokens)

    def _aim(self, tracker: RequestTracker, computed: int) -> None:
        """Let vLLM end a step at the next boundary wanted past ``computed`` tokens."""
        boundary = tracker.request.shared_prefix_boundary = tracker.step_ends.after(computed)
        # Drafts decide how far generated tokens reach: there wait for vLLM to hand off the state.
        said = bool(self._plan.states) and boundary >= tracker.step_ends.known
        tracker.next_unoffered = 0 if said else boundary

    def lose(self, tracker: RequestTracker, offers: Iterable[Offer]) -> None:
        """Aim past states that were handed off and cannot be stored.

        vLLM hands off no state of generated tokens past the boundary that it was asked for.
        """
        request, boundary = tracker.request, max((tokens for _, _, tokens in offers), default=0)
        known = len(request.block_hashes) // self._hashes_per_block * self._plan.block_size
        if not tracker.next_unoffered and known >= boundary >= request.shared_prefix_boundary > 0:
            self._reach(tracker, boundary)

    def _reach(self, tracker: RequestTracker, boundary: int) -> None:
        """Aim past ``boundary`` (tokens), which can be stored now."""
        self._aim(tracker, boundary)
        if self._options.save_decode:
            tracker.extend(boundary // self._plan.block_size, self._hashes_per_block)

    def _reached(self, tracker: RequestTracker, computed: int) -> list[int]:
        """Return the boundaries in blocks that the step reached, before vLLM reports them.

        vLLM may hand off their states only in the request's next step, which must already end at
        the next boundary.
        """
        size, reached = self._plan.block_size, []
        # Tokens still in flight and drafts have no hash.
        known = len(tracker.request.block_hashes) // self._hashes_per_block * size
        while 0 < tracker.next_unoffered <= min(computed, known):
            reached.append(tracker.next_unoffered // size)
            self._reach(tracker, tracker.next_unoffered)
        if self._plan.states:
            return []  # stored with the state
        # A resumed request may be past its prompt; there only save_decode stores.
        return [boundary for boundary in reached if boundary <= len(tracker.prefix.hashes)]

    def _end_chunk(
        self,
        tracker: RequestTracker,
        computed: int,
        offers: Sequence[Offer],
        block_state: "KVConnectorBlockState",
    ) -> tuple[list[int], Sequence[Offer]]:
        """Also store the end of a prefill step that happens to be a boundary.

        vLLM hands off only states that its own cache keeps. But every step writes one at its end:
        at a boundary, the block before it in the table holds that state until the next step
        (``Scheduler._mamba_block_aligned_split``, "Invariant").

        Returns:
            The boundary in blocks for models without states, and ``offers`` with its states.
        """
        tracker.chunks, plan = tracker.step_ends.wants_end(computed), self._plan
        boundary, rest = divmod(computed, plan.block_size)
        if not tracker.chunks or computed - rest in tracker.step_ends.barred:
            return [], offers
        if not plan.states:
            # A resumed request may be past its prompt, as in _reached.
            return [boundary] if 0 < boundary <= len(tracker.prefix.hashes) else [], offers
        if computed % plan.chunk_unit or any(tokens == computed for _, _, tokens in offers):
            return [], offers
        block_ids = block_state.get_block_ids(tracker.request.request_id)
        assert block_ids is not None
        blocks = ((g, plan.state_block(block_ids[g], g, computed)) for g in plan.states)
        return [], [*offers, *((group, block, computed) for group, block in blocks)]

    # What is stored

    def _attention(
        self, tracker: RequestTracker, computed: int, block_state: "KVConnectorBlockState"
    ) -> tuple[tuple[int, tuple[Block, ...]], ...]:
        """Return the blocks that are full after this step and not stored yet."""
        if tracker.background is not None:
            return ()  # lookup pending; full pages do not change while the request runs
        first = tracker.stored.attention
        last = min(computed // self._plan.block_size, len(tracker.prefix.hashes))
        if last <= first:
            return ()
        block_ids = block_state.get_block_ids(tracker.request.request_id)
        assert block_ids is not None
        tracker.stored.attention = last
        plan = self._plan
        pages = (plan.pages(block_ids[group], group, first, last) for group in plan.attention)
        return tuple(enumerate(zip(*pages, strict=True), first))

    def _states(
        self, tracker: RequestTracker, computed: int, offers: Iterable[Offer]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Return (boundary in tokens, blocks) where vLLM hands off all state groups."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            boundary, rest = divmod(tokens, self._plan.block_size)
            inside = rest > 0 and self._plan.unit > 0
            if tokens in tracker.stored.states or boundary > len(tracker.prefix.hashes):
                continue  # stored already, or of generated tokens without save_decode
            if inside and tokens > tracker.inner:
                continue
            if tokens in tracker.step_ends.barred:
                self.drop_offers("inside_media", 1)
                continue
            misfit = tokens % self._plan.unit if inside else rest
            if misfit or block == NULL_BLOCK or tokens > computed or tokens == 0:
                self.drop_offers("unusable", 1)
                continue
            by_boundary.setdefault(tokens, {})[group] = block
        states = []
        for boundary, blocks in sorted(by_boundary.items()):
            if blocks.keys() >= set(self._plan.states):
                tracker.stored.states.add(boundary)
                states.append((boundary, tuple(blocks[group] for group in self._plan.states)))
            else:
                self.drop_offers("incomplete", len(blocks))
        return states

    def _tails(
        self,
        request_id: str,
        offered: Sequence[tuple[int, tuple[int, ...]]],
        block_state: "KVConnectorBlockState",
    ) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
        """Return (boundary, attention blocks, state blocks) of boundaries inside a block.

        The request's own page holds all tokens up to the boundary for as long as it runs; this and
        later steps write behind it.
        """
        if not offered:
            return ()
        block_ids = block_state.get_block_ids(request_id)
        assert block_ids is not None
        size = self._plan.block_size
        return tuple(
            (end, tuple(block_ids[group][end // size] for group in self._plan.attention), states)
            for end, states in offered
        )

    def _windows(
        self,
        tracker: RequestTracker,
        boundaries: Iterable[int],
        block_state: "KVConnectorBlockState",
    ) -> tuple[tuple[int, int, int], ...]:
        """Return (group, block, block id) of the last pages before each boundary."""
        wanted = dict.fromkeys(
            (window.group, block)
            for boundary in boundaries
            for window in self._plan.windows
            for block in range(window.first(0, boundary), boundary)
            if (window.group, block) not in tracker.stored.windows
        )
        if not wanted:
            return ()
        block_ids = block_state.get_block_ids(tracker.request.request_id)
        assert block_ids is not None
        tracker.stored.windows.update(wanted)
        pages = ((group, block, block_ids[group][block]) for group, block in wanted)
        # vLLM may have freed a page that drafts have passed: then this boundary has no hit.
        return tuple(page for page in pages if page[2] != NULL_BLOCK)

    def _keep(
        self,
        tracker: RequestTracker,
        reached: Iterable[int],
        attention: Sequence[tuple[int, tuple[Block, ...]]],
    ) -> tuple[int, ...]:
        """Return the boundaries in tokens to evict last; () if this save changes nothing."""
        size, step_ends = self._plan.block_size, tracker.step_ends
        new = [boundary for boundary in reached if step_ends.lasting(boundary)]
        # Pages that a prompt's last step stores behind its last state would outlive that state.
        first = attention[0][0] * size if attention else step_ends.known
        behind = step_ends.end in tracker.likeliest and step_ends.end <= first < step_ends.known
        if not new and not behind:
            return ()
        tracker.likeliest.update(new)
        # In generated tokens the next turn needs only the deepest boundary.
        whole = {b for b in tracker.likeliest if b % size == 0}
        tracker.likeliest.difference_update(sorted(b for b in whole if b > step_ends.last)[:-1])
        # One inside a block is needed until there is a deeper one, or where prompts part.
        inner = tracker.likeliest - whole - {step_ends.junction}
        tracker.likeliest.difference_update(inner - {max(tracker.likeliest)})
        return tuple(sorted(tracker.likeliest))

    def drop_offers(self, reason: str, offers: int) -> None:
        """Count handed-off states that are not stored."""
        if offers:
            with self.ledger as counts:
                counts.dropped_offers[reason] += offers


class CachedBlocks:
    """Checks that a block that vLLM hands off still holds the state of its boundary.

    vLLM queues a hand-off when it hashes the block. With asynchronous scheduling, or with drafts
    since 0.33, that is at the end of a step; the next pass may free the block and give it to
    another request before we get the hand-off. A reused block loses its hash.

    Used by the scheduler's thread only.
    """

    def __init__(self, pool: "BlockPool | None", hash_block_size: int) -> None:
        """
        Args:
            pool: vLLM's; None holds no state at all.
            hash_block_size: tokens per entry of ``request.block_hashes``.
        """
        self._pool, self._hash_block_size = pool, hash_block_size

    def hold(self, request: "Request", offer: Offer) -> bool:
        """Whether the offered block still has the request's hash at that boundary."""
        group, block_id, tokens = offer
        end = tokens // self._hash_block_size
        if self._pool is None or not 0 < end <= len(request.block_hashes):
            return False
        block = self._pool.blocks[block_id]
        known_as = make_block_hash_with_group_id(request.block_hashes[end - 1], group)
        return block.block_hash == known_as and block.block_hash_num_tokens == tokens


class FinalSaves:
    """Saves of ended requests, for the next step. Used by the scheduler's thread only.

    vLLM keeps the blocks of these requests until every rank has reported them.
    """

    def __init__(self) -> None:
        self._saves: list[SaveSpec] = []
        self._ended: list[str] = []

    def add(self, save: SaveSpec) -> None:
        """Queue an ended request's save."""
        self._saves.append(save)
        self._ended.append(save.request_id)

    def forget(self) -> None:
        """Drop all saves; the requests are still reported."""
        self._saves.clear()

    def remove(self, request_id: str) -> None:
        """Drop a request's save, and do not report it."""
        self._saves = [save for save in self._saves if save.request_id != request_id]
        self._ended = [each for each in self._ended if each != request_id]

    def drain(self) -> tuple[Sequence[SaveSpec], tuple[str, ...]]:
        """Return and forget the saves, and the requests to report when they are done."""
        taken = self._saves, tuple(self._ended)
        self._saves, self._ended = [], []
        return taken
