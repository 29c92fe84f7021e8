# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: which boundary a request may start from, and what it will store."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata, LoadSpec, SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.checkpoints import Checkpoints
from lmcache_hybrid.scheduler.lookups import LookupQueue, PendingLookup
from lmcache_hybrid.scheduler.prompt import extended, prefix_of, why_unsaved
from lmcache_hybrid.scheduler.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.scheduler")

NULL_BLOCK = 0
# Where no other request can run, a lookup is waited for so long, once per step, instead
# of spinning through empty steps beside it.
IDLE_WAIT_SECONDS = 0.005


class HybridScheduler:
    """Life of requests between vLLM's scheduler and the ranks' stores.

    Attributes:
        ledger: what is counted, for metrics.
        closed: nothing is looked up and stored, because a reset failed or is under way.
    """

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        hash_block_size: int,
        inquiries: LookupQueue,
    ) -> None:
        """Track requests.

        Args:
            hash_block_size: tokens per entry of ``request.block_hashes``; divides N.
            inquiries: asks the ranks.

        Raises:
            ValueError: ``hash_block_size`` does not divide N.
        """
        if plan.block_size % hash_block_size:
            raise ValueError(f"blocks of {plan.block_size} tokens have no hash of their own")
        self._plan = plan
        self._options = options
        self._hashes_per_block = plan.block_size // hash_block_size
        self._inquiries = inquiries
        self._patience = IDLE_WAIT_SECONDS
        self._tracked: dict[str, RequestTracker] = {}
        # Requests that still have blocks to store: all that a step looks at.
        self._unsaved: dict[str, RequestTracker] = {}
        self._loads: list[LoadSpec] = []
        self._dropped: list[tuple[str, int]] = []
        self._loading: set[str] = set()
        self._epoch = 0
        self.closed = False
        self.ledger = Ledger("scheduler", SchedulerCounts())

    @property
    def counts(self) -> SchedulerCounts:
        return self.ledger.counts

    # Admission

    def match(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past ``num_computed_tokens`` can be loaded.

        Called again for as long as the request waits; asks the ranks once. Returns
        (tokens, True) for an asynchronous load, (0, False) for none, and
        (None, False) as long as the ranks have not answered.
        """
        if request.request_id.startswith("mock_req") or self.closed:
            return 0, False
        tracked = self._track(request)
        gain = self._gain(tracked, num_computed_tokens)
        if gain is None:
            return None, False
        if gain == 0:
            self._give_up(tracked)
        if tracked.save:
            # vLLM has just set its own; see Checkpoints for what this attribute does.
            tracked.stops.junction = max(tracked.stops.junction, request.shared_prefix_boundary)
            self._aim(tracked, num_computed_tokens + gain)
        size = self._plan.block_size
        started = {num_computed_tokens // size, (num_computed_tokens + gain) // size}
        tracked.kept = {b for b in started if 0 < b <= len(tracked.prefix.hashes)}
        return gain, gain > 0

    def _gain(self, tracked: RequestTracker, num_computed_tokens: int) -> int | None:
        """Tokens past ``num_computed_tokens`` that the ranks promise. Mutates ``tracked``.

        None as long as they have not answered.
        """
        request = tracked.request
        tracked.stops.begin(request.num_tokens)
        if tracked.load_failed or request.skip_reading_prefix_cache or not tracked.prefix.hashes:
            return 0
        floor = num_computed_tokens // self._plan.block_size
        if tracked.inquiry is None and (tracked.answer is None or floor < tracked.floor):
            self._ask(tracked, floor)
        if tracked.inquiry is not None:
            answer = tracked.inquiry.poll(self._patience)
            self._patience = 0.0
            if answer is None:
                return None
            self._answered(tracked, tracked.inquiry, answer)
            if floor < tracked.floor:  # vLLM has lost blocks of its own in the meantime
                return self._gain(tracked, num_computed_tokens)
        assert tracked.answer is not None
        tracked.stops.junction = tracked.answer.attention * self._plan.block_size
        gain = tracked.answer.boundary * self._plan.block_size - num_computed_tokens
        return gain if gain >= max(1, self._options.min_retrieve_tokens) else 0

    def _ask(self, tracked: RequestTracker, floor: int) -> None:
        """Ask the ranks, if there is anything to ask for. Mutates ``tracked``."""
        request, size = tracked.request, self._plan.block_size
        tracked.floor = floor
        # What is computed anew is stored anew: it may be missing because its save failed.
        tracked.forget_saved(tracked.saved)
        # The last token is always computed: a state that has seen it is too deep.
        limit = min((request.num_tokens - 1) // size, len(tracked.prefix.hashes))
        if self._options.max_tokens_per_load:
            limit = min(limit, floor + self._options.max_tokens_per_load // size)
        if limit <= floor and not tracked.save:
            tracked.answer = LookupResult(0, 0)
            return
        question = LookupRequest(request.request_id, tracked.prefix, limit, floor)
        if len(tracked.prefix.hashes) <= floor and tracked.prefix.identified:
            # Nothing to load and nothing new: nobody waits to learn what is stored already.
            tracked.answer = LookupResult(0, 0)
            tracked.stored = self._inquiries.ask(question)
            return
        tracked.inquiry = self._inquiries.ask(question)
        tracked.claimed = tracked.inquiry.question.number

    def _answered(
        self, tracked: RequestTracker, inquiry: PendingLookup, answer: LookupResult
    ) -> None:
        """Take the ranks' answer. Mutates ``tracked``."""
        request, size = tracked.request, self._plan.block_size
        tracked.inquiry, tracked.stored, tracked.answer = None, None, answer
        known = tracked.identify(answer.adapter)
        if answer.available:
            tracked.saved = answer.attention  # less than was sent to be saved, where that failed
        self._watch(tracked)
        limit = inquiry.question.limit
        # Past the limit nothing could be loaded in any case.
        lost = min(answer.attention, limit) - max(answer.boundary, tracked.floor)
        with self.ledger as counts:
            counts.lookups.add(answer.outcome(tracked.floor, limit))
            counts.lookup_seconds.append(inquiry.seconds)
            if not known:
                counts.skipped_requests.add("adapter")
            if lost > 0:
                counts.lost_hits += 1
                counts.lost_tokens += lost * size
        level, tracked.logged = logging.DEBUG if tracked.logged else logging.INFO, True
        logger.log(
            level,
            "Reqid: %s, Total tokens %d, Inference Engine computed tokens: %d, "
            "LMCache hit tokens: %d, need to load: %d",
            request.request_id,
            request.num_tokens,
            tracked.floor * size,
            answer.boundary * size,
            max(0, answer.boundary - tracked.floor) * size,
        )

    def allocated(
        self, request: "Request", block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """vLLM has blocks for the request; load into them if it takes our tokens.

        Args:
            block_ids: of the request, per KV cache group.
            num_external_tokens: what :meth:`match` offered, or 0 when nothing is loaded.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        answer, tracked.answer = tracked.answer, None
        if num_external_tokens == 0:
            self._give_up(tracked)
            return
        assert answer is not None, "vLLM loads tokens that were never offered"
        size, boundary = self._plan.block_size, answer.boundary
        start = boundary - num_external_tokens // size
        windows = [(w.group, range(w.first(start, boundary), boundary)) for w in self._plan.windows]
        tracked.saved_windows.update(
            (group, block) for group, blocks in windows for block in blocks
        )
        tracked.loading, tracked.loading_tokens = boundary, num_external_tokens
        self._loading.add(request.request_id)
        with self.ledger as counts:
            counts.hits.add(answer.source)
            for source, blocks in answer.last(boundary - start):
                counts.hit_tokens.add(source, blocks * size)
            counts.loads_in_flight = len(self._loading)
        self._loads.append(
            LoadSpec(
                request.request_id,
                tracked.prefix.up_to(boundary),
                start,
                boundary,
                tuple(tuple(block_ids[g][start:boundary]) for g in self._plan.attention),
                tuple(
                    block_ids[g][boundary - 1] if boundary <= len(block_ids[g]) else NULL_BLOCK
                    for g in self._plan.states
                ),
                tuple(tuple(block_ids[g][blocks.start : blocks.stop]) for g, blocks in windows),
            )
        )

    def _track(self, request: "Request") -> RequestTracker:
        tracked = self._tracked.get(request.request_id)
        size = self._plan.block_size
        if tracked is None:
            prefix = prefix_of(request, size, self._hashes_per_block)
            unsaved = why_unsaved(request, prefix, self._options)
            save = unsaved is None
            if unsaved or not (prefix and prefix.hashes):
                with self.ledger as counts:
                    counts.skipped_requests.add(unsaved or "short")
            stops = Checkpoints(
                size,
                self._options.checkpoint_tokens,
                self._options.save_decode,
                offered=bool(self._plan.states),
            )
            tracked = RequestTracker(request, prefix or Prefix(()), save, stops)
            self._tracked[request.request_id] = tracked
        elif self._options.save_decode:
            self._extend(tracked, len(request.block_hashes) // self._hashes_per_block)
        self._watch(tracked)
        return tracked

    def _watch(self, tracked: RequestTracker) -> None:
        """Look at the request in every step for as long as it has blocks to store."""
        if tracked.unsaved:
            self._unsaved[tracked.request.request_id] = tracked
        else:
            self._unsaved.pop(tracked.request.request_id, None)

    def _extend(self, tracked: RequestTracker, blocks: int) -> None:
        """Take generated tokens into the prefix, ``blocks`` blocks in all. Mutates ``tracked``."""
        if tracked.save and blocks > len(tracked.prefix.hashes):
            tracked.prefix = extended(
                tracked.prefix, tracked.request, blocks, self._hashes_per_block
            )

    def _give_up(self, tracked: RequestTracker) -> None:
        """Nothing will be loaded from the last question: let the ranks drop their claims."""
        if tracked.inquiry is not None:
            tracked.inquiry.give_up()
            tracked.inquiry = None
        tracked.answer = (
            None if tracked.answer is None else LookupResult(0, tracked.answer.attention)
        )
        if tracked.claimed:
            self._dropped.append((tracked.request.request_id, tracked.claimed))
            tracked.claimed = 0

    # Reset

    def begin_reset(self) -> int:
        """Give up what was promised and stored before. Returns the number of the new epoch.

        Requests that have computed or loaded something go on without the store: their
        blocks may be of weights that were replaced. The others start anew. Until
        :meth:`end_reset` nothing is looked up.
        """
        self._epoch, self.closed = self._epoch + 1, True
        for request_id, tracked in list(self._tracked.items()):
            if tracked.stored is not None:
                tracked.stored.give_up()
            if tracked.loading:
                tracked.load_failed, tracked.save = True, False
            elif tracked.request.num_computed_tokens:
                self._give_up(tracked)
                tracked.load_failed, tracked.save, tracked.stored = True, False, None
            else:
                self._give_up(tracked)
                del self._tracked[request_id]
        self._unsaved.clear()
        return self._epoch

    def end_reset(self, done: bool) -> None:
        """Serve again, if every rank was reset; else serve nothing until a reset succeeds."""
        self.closed = not done
        if not done:
            logger.error(
                "A reset of all caches failed: this engine computes every prompt and stores "
                "nothing until one succeeds (POST /reset_prefix_cache?reset_running_requests=true"
                "&reset_external=true while nothing is being loaded), or until it is restarted."
            )

    # One step

    def step(self, output: "SchedulerOutput") -> ConnectorMetadata:
        """This step's loads and saves. Resets what was collected since the last step."""
        saves: list[SaveSpec] = []
        block_state = output.kv_connector_block_state
        if block_state is not None and (self._unsaved or block_state.boundary_state_offloads):
            saves = list(self._saves(output.num_scheduled_tokens, block_state))
        while self._inquiries.left_over:
            self._dropped.append(self._inquiries.left_over.popleft())
        idle = output.total_num_scheduled_tokens == 0
        self._patience = IDLE_WAIT_SECONDS if idle else 0.0
        if not (saves or self._loads or self._dropped or idle):
            return NOTHING
        loads, self._loads = self._loads, []
        dropped, self._dropped = self._dropped, []
        return ConnectorMetadata(tuple(loads), tuple(saves), tuple(dropped), idle, self._epoch)

    def _saves(
        self, scheduled: dict[str, int], block_state: "KVConnectorBlockState"
    ) -> Iterable[SaveSpec]:
        offers = block_state.boundary_state_offloads
        for request_id in dict.fromkeys((*self._unsaved, *offers)):
            tracked = self._tracked.get(request_id)
            if tracked is None or request_id not in scheduled or not tracked.saving:
                # Finished, preempted or waiting: its blocks may belong to another by now.
                if tracked is None or tracked.saving:
                    self._drop_offers("not_running", len(offers.get(request_id, ())))
                continue
            computed = tracked.request.num_computed_tokens + scheduled[request_id]
            if request_id in offers:
                self._reached(tracked, max(tokens for _, _, tokens in offers[request_id]))
            sealed = self._sealed(tracked, computed) if tracked.seal else []
            attention = self._attention_to_save(tracked, computed, block_state)
            states = self._states_to_save(tracked, computed, offers.get(request_id, ()))
            sealed += [boundary for boundary, _ in states]
            windows = self._windows_to_save(tracked, sealed, block_state)
            if attention or states or windows:
                kept = self._kept(tracked, sealed)
                yield SaveSpec(request_id, tracked.prefix, attention, states, windows, kept)
            self._watch(tracked)

    def _aim(self, tracked: RequestTracker, computed: int) -> None:
        """Let vLLM end a step at the next boundary wanted. Mutates ``tracked``."""
        tracked.request.shared_prefix_boundary = tracked.stops.after(computed)
        if not self._plan.states:
            tracked.seal = tracked.request.shared_prefix_boundary
            self._watch(tracked)

    def _reached(self, tracked: RequestTracker, boundary: int) -> None:
        """``boundary`` (tokens) can be stored now: aim at the next one. Mutates ``tracked``."""
        self._aim(tracked, boundary)
        if self._options.save_decode:
            self._extend(tracked, boundary // self._plan.block_size)

    def _sealed(self, tracked: RequestTracker, computed: int) -> list[int]:
        """Blocks up to each boundary reached, where no state tells. Mutates ``tracked``."""
        size, sealed = self._plan.block_size, []
        # Of tokens that are still in flight or drafts there is no hash.
        known = len(tracked.request.block_hashes) // self._hashes_per_block * size
        while 0 < tracked.seal <= min(computed, known):
            sealed.append(tracked.seal // size)
            self._reached(tracked, tracked.seal)
        # A resumed request may be past its prompt, where nothing is stored unless asked for.
        return [boundary for boundary in sealed if boundary <= len(tracked.prefix.hashes)]

    def _kept(self, tracked: RequestTracker, sealed: Iterable[int]) -> tuple[int, ...]:
        """Boundaries to keep longest, when there is a new one. Mutates ``tracked``."""
        size, stops = self._plan.block_size, tracked.stops
        new = [boundary for boundary in sealed if stops.lasting(boundary * size)]
        if not new:
            return ()
        tracked.kept.update(new)
        # Of those that generated tokens reached the next turn needs the deepest.
        generated = sorted(b for b in tracked.kept if b * size > stops.end)
        tracked.kept.difference_update(generated[:-1])
        return tuple(sorted(tracked.kept))

    def _windows_to_save(
        self,
        tracked: RequestTracker,
        boundaries: Iterable[int],
        block_state: "KVConnectorBlockState",
    ) -> tuple[tuple[int, int, int], ...]:
        """(group, block, block id) of the last pages before each boundary. Mutates ``tracked``."""
        wanted = dict.fromkeys(
            (window.group, block)
            for boundary in boundaries
            for window in self._plan.windows
            for block in range(window.first(0, boundary), boundary)
            if (window.group, block) not in tracked.saved_windows
        )
        if not wanted:
            return ()
        block_ids = block_state.get_block_ids(tracked.request.request_id)
        assert block_ids is not None
        tracked.saved_windows.update(wanted)
        pages = ((group, block, block_ids[group][block]) for group, block in wanted)
        # vLLM may have given up a page that drafts have passed: then there is no hit here.
        return tuple(page for page in pages if page[2] != NULL_BLOCK)

    def _attention_to_save(
        self, tracked: RequestTracker, computed: int, block_state: "KVConnectorBlockState"
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Blocks that are full after this step and not in the store yet. Mutates ``tracked``."""
        if tracked.stored is not None:
            answer = tracked.stored.poll()
            if answer is None:
                return ()  # the pages stay what they are while the request runs
            self._answered(tracked, tracked.stored, answer)
            tracked.answer = None  # of a request that runs; the next question is another
        first = tracked.saved
        last = min(computed // self._plan.block_size, len(tracked.prefix.hashes))
        if last <= first:
            return ()
        block_ids = block_state.get_block_ids(tracked.request.request_id)
        assert block_ids is not None
        tracked.saved = last
        return tuple(
            (block, tuple(block_ids[group][block] for group in self._plan.attention))
            for block in range(first, last)
        )

    def _states_to_save(
        self, tracked: RequestTracker, computed: int, offers: Iterable[tuple[int, int, int]]
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Boundaries that vLLM hands off for every state group. Mutates ``tracked``."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            boundary, rest = divmod(tokens, self._plan.block_size)
            stored = boundary in tracked.saved_states and not rest
            if stored or boundary > len(tracked.prefix.hashes):
                continue  # stored already, or of generated tokens, which nobody asked for
            if rest or block == NULL_BLOCK or tokens > computed or boundary == 0:
                self._drop_offers("unusable", 1)
                continue
            by_boundary.setdefault(boundary, {})[group] = block
        states = []
        for boundary, blocks in sorted(by_boundary.items()):
            if blocks.keys() >= set(self._plan.states):
                tracked.saved_states.add(boundary)
                states.append((boundary, tuple(blocks[group] for group in self._plan.states)))
            else:
                self._drop_offers("incomplete", len(blocks))
        return tuple(states)

    def _drop_offers(self, reason: str, offers: int) -> None:
        if offers:
            with self.ledger as counts:
                counts.dropped_offers.add(reason, offers)

    # Completions

    def transferred(self, output: "KVConnectorOutput") -> None:
        """Take note of finished and failed loads of all ranks."""
        failed = output.failed_recving or ()
        for request_id in failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                # What the store promised was not there: store all of it anew.
                tracked.load_failed = True
                tracked.forget_saved()
                self._watch(tracked)
                with self.ledger as counts:
                    counts.failed_loads += 1
                    counts.failed_tokens += tracked.loading_tokens
        for request_id in output.finished_recving or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                if request_id not in failed and not tracked.load_failed:
                    tracked.saved_states.add(tracked.loading)
                tracked.loading = tracked.loading_tokens = 0
                tracked.claimed = 0
            self._loading.discard(request_id)  # also of a request that was aborted
            with self.ledger as counts:
                counts.loads_in_flight = len(self._loading)

    def finished(self, request: "Request") -> None:
        """Forget the request. A load under way goes on until the worker reports it."""
        tracked = self._tracked.pop(request.request_id, None)
        self._unsaved.pop(request.request_id, None)
        # The worker's load holds the claim itself and drops it when it ends.
        if tracked is not None and not tracked.loading:
            self._give_up(tracked)
        if tracked is not None and tracked.stored is not None:
            tracked.stored.give_up()
        if not self._tracked:
            self._patience = IDLE_WAIT_SECONDS

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)
