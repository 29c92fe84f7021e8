# SPDX-License-Identifier: Apache-2.0
"""Decides what of a step is stored, and where the next steps end so that a state can be."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.metadata import SaveSpec
from lmcache_hybrid.scheduler.prompt import extended
from lmcache_hybrid.scheduler.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState

NULL_BLOCK = 0
# A state that vLLM hands off: (KV cache group, block id, boundary in tokens).
Offer = tuple[int, int, int]


class SavePlanner:
    """Plans saves, one request at a time. Mutates trackers; used by the scheduler's thread only.

    Attributes:
        ledger: where offers that nobody stores are counted.
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
        """Start over: the request computes from token ``computed + gain`` on.

        Args:
            computed: tokens in vLLM's own cache.
            gain: tokens that are loaded.
        """
        size, checkpoints = self._plan.block_size, tracker.checkpoints
        if tracker.save:
            # vLLM has just set its own; Checkpoints says what this attribute does.
            junction = tracker.request.shared_prefix_boundary
            checkpoints.junction = max(checkpoints.junction, junction)
            self._aim(tracker, computed + gain)
        started = {computed // size, (computed + gain) // size}
        tracker.kept = {b for b in started if 0 < b <= len(tracker.prefix.hashes)}

    def extend(self, tracker: RequestTracker, blocks: int) -> None:
        """Take generated tokens into the prefix, ``blocks`` blocks in all."""
        if tracker.save and blocks > len(tracker.prefix.hashes):
            tracker.prefix = extended(
                tracker.prefix, tracker.request, blocks, self._hashes_per_block
            )

    def plan(
        self,
        tracker: RequestTracker,
        computed: int,
        offers: Sequence[Offer],
        block_state: "KVConnectorBlockState",
    ) -> SaveSpec | None:
        """Plan the saves of one step.

        Args:
            computed: the request's tokens whose forward has run when this step ends.
            offers: states that vLLM hands off in this step; they are gone after it.

        Returns:
            None where nothing is new.
        """
        rid = tracker.request.request_id
        if offers:
            self._reach(tracker, max(tokens for _, _, tokens in offers))
        sealed = self._seal(tracker, computed) if tracker.seal else []
        attention = self._attention(tracker, computed, block_state)
        states = self._states(tracker, computed, offers)
        sealed += [boundary for boundary, _ in states]
        windows = self._windows(tracker, sealed, block_state)
        if not (attention or states or windows):
            return None
        kept = self._keep(tracker, sealed)
        return SaveSpec(rid, tracker.prefix, attention, states, windows, kept)

    # Where steps end

    def _aim(self, tracker: RequestTracker, computed: int) -> None:
        """Let vLLM end a step at the next boundary wanted past ``computed`` tokens."""
        tracker.request.shared_prefix_boundary = tracker.checkpoints.after(computed)
        if not self._plan.states:
            tracker.seal = tracker.request.shared_prefix_boundary

    def _reach(self, tracker: RequestTracker, boundary: int) -> None:
        """``boundary`` (tokens) can be stored now: aim at the next one."""
        self._aim(tracker, boundary)
        if self._options.save_decode:
            self.extend(tracker, boundary // self._plan.block_size)

    def _seal(self, tracker: RequestTracker, computed: int) -> list[int]:
        """Boundaries in blocks that the step reached, where no state tells."""
        size, sealed = self._plan.block_size, []
        # Tokens still in flight and drafts have no hash.
        known = len(tracker.request.block_hashes) // self._hashes_per_block * size
        while 0 < tracker.seal <= min(computed, known):
            sealed.append(tracker.seal // size)
            self._reach(tracker, tracker.seal)
        # A resumed request may be past its prompt, where nothing is stored unless asked for.
        return [boundary for boundary in sealed if boundary <= len(tracker.prefix.hashes)]

    # What is stored

    def _attention(
        self, tracker: RequestTracker, computed: int, block_state: "KVConnectorBlockState"
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Blocks that are full after this step and not in the store yet."""
        if tracker.background is not None:
            return ()  # not known yet; the pages stay what they are while the request runs
        first = tracker.stored.attention
        last = min(computed // self._plan.block_size, len(tracker.prefix.hashes))
        if last <= first:
            return ()
        block_ids = block_state.get_block_ids(tracker.request.request_id)
        assert block_ids is not None
        tracker.stored.attention = last
        return tuple(
            (block, tuple(block_ids[group][block] for group in self._plan.attention))
            for block in range(first, last)
        )

    def _states(
        self, tracker: RequestTracker, computed: int, offers: Iterable[Offer]
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Boundaries that vLLM hands off for every state group."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            boundary, rest = divmod(tokens, self._plan.block_size)
            stored = boundary in tracker.stored.states and not rest
            if stored or boundary > len(tracker.prefix.hashes):
                continue  # stored already, or of generated tokens, which nobody asked for
            if rest or block == NULL_BLOCK or tokens > computed or boundary == 0:
                self.drop_offers("unusable", 1)
                continue
            by_boundary.setdefault(boundary, {})[group] = block
        states = []
        for boundary, blocks in sorted(by_boundary.items()):
            if blocks.keys() >= set(self._plan.states):
                tracker.stored.states.add(boundary)
                states.append((boundary, tuple(blocks[group] for group in self._plan.states)))
            else:
                self.drop_offers("incomplete", len(blocks))
        return tuple(states)

    def _windows(
        self,
        tracker: RequestTracker,
        boundaries: Iterable[int],
        block_state: "KVConnectorBlockState",
    ) -> tuple[tuple[int, int, int], ...]:
        """(group, block, block id) of the last pages before each boundary."""
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
        # vLLM may have given up a page that drafts have passed: then there is no hit here.
        return tuple(page for page in pages if page[2] != NULL_BLOCK)

    def _keep(self, tracker: RequestTracker, sealed: Iterable[int]) -> tuple[int, ...]:
        """Boundaries to evict last, when there is a new one."""
        size, checkpoints = self._plan.block_size, tracker.checkpoints
        new = [boundary for boundary in sealed if checkpoints.lasting(boundary * size)]
        if not new:
            return ()
        tracker.kept.update(new)
        # Of boundaries in generated tokens the next turn needs the deepest only.
        generated = sorted(b for b in tracker.kept if b * size > checkpoints.end)
        tracker.kept.difference_update(generated[:-1])
        return tuple(sorted(tracker.kept))

    def drop_offers(self, reason: str, offers: int) -> None:
        """Count states that vLLM handed off and nobody stores."""
        if offers:
            with self.ledger as counts:
                counts.dropped_offers[reason] += offers
