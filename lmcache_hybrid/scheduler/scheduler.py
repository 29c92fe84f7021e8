# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the connector: lookups, loads and saves of all requests."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import RequestStatus

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.failed_loads import SlowLoads
from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata, LoadSpec, SaveSpec
from lmcache_hybrid.scheduler.admission import Admission
from lmcache_hybrid.scheduler.arrivals import Arrivals
from lmcache_hybrid.scheduler.drops import Drops
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.keeps import RESET, Keeps
from lmcache_hybrid.scheduler.load_planner import load_of
from lmcache_hybrid.scheduler.load_policy import LoadPolicy
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.lookup_reports import LookupReports, count_hit
from lmcache_hybrid.scheduler.lookups import Lookups
from lmcache_hybrid.scheduler.pin_limit import Pins
from lmcache_hybrid.scheduler.save_planner import CachedBlocks, FinalSaves, Offer, SavePlanner
from lmcache_hybrid.scheduler.shared_prefills import SharedPrefills
from lmcache_hybrid.scheduler.step_ends import Drafter
from lmcache_hybrid.scheduler.store_watch import StoreWatch
from lmcache_hybrid.scheduler.tracker import Loading, RequestTracker
from lmcache_hybrid.scheduler.waits import IdleSteps

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.scheduler")


class HybridScheduler:
    """Tracks requests from lookup to completion. Called by vLLM's scheduler thread only.

    Attributes:
        ledger: counts, for metrics.
        events: as given.
        blocks: vLLM's; no state is stored before :meth:`bind`.
        idle_steps: says when a step may wait for loads.
        drafter: the engine's; none by default.
        prefills: running prefills that others wait for.
        store_watch: warns where nothing is stored or hit; the caller passes it the ranks' counts.
        closed: a reset failed or is under way: nothing is looked up or stored.
    """

    def __init__(
        self,
        plan: GroupPlan,
        options: Options,
        hash_block_size: int,
        queue: LookupQueue,
        policy: LoadPolicy | None = None,
        events: KVEvents | None = None,
        pins: Pins | None = None,
        store_watch: StoreWatch | None = None,
    ) -> None:
        """Track requests.

        Args:
            hash_block_size: tokens per entry of ``request.block_hashes``; divides N.
            queue: asks the ranks.
            policy: which hits are loaded; all by default.
            events: publishes what is stored and found; None to publish nothing.
            pins: bounds what waiting requests pin; no bound by default.
            store_watch: warns where nothing is stored or hit; one of its own by default.

        Raises:
            ValueError: ``hash_block_size`` does not divide N.
        """
        if plan.block_size % hash_block_size:
            raise ValueError(f"blocks of {plan.block_size} tokens have no hash of their own")
        self._plan = plan
        self._options = options
        self._hashes_per_block = plan.block_size // hash_block_size
        self._hash_block_size = hash_block_size
        self.blocks, self.idle_steps = CachedBlocks(None, hash_block_size), IdleSteps()
        self._queue = queue
        self._policy, self.events = policy or LoadPolicy(), events
        self._trackers: dict[str, RequestTracker] = {}
        # Requests that may have blocks to store. A step looks only at these and at those with
        # states handed off. A request enters when vLLM asks for it or another waits for its
        # prefix, and leaves once it stores nothing, or after a step that leaves nothing to store.
        self._may_store: dict[str, None] = {}
        self._loads: list[LoadSpec] = []
        self._unloadable: list[str] = []
        # Running requests with a part of their answer that had none of the last step.
        self._left_out: set[str] = set()
        self._final = FinalSaves()
        # Loads under way, those of requests that have ended included.
        self._loading: set[str] = set()
        # Failures among these, as ranks reported them.
        self._failures = SlowLoads({})
        self._epoch = 0
        self.drafter = Drafter()
        self.closed = False
        self.ledger = queue.ledger = Ledger("scheduler", SchedulerCounts())
        self._planner = SavePlanner(plan, options, self._hashes_per_block, self.ledger)
        self.prefills = SharedPrefills(plan.block_size, self.ledger, self._meet)
        self._arrivals = Arrivals(plan, options, self._hashes_per_block, self.ledger)
        self.store_watch = store_watch or StoreWatch(plan, options)
        self._keeps = Keeps(plan, options.keep_share, queue, self.ledger)
        self._reports = LookupReports(plan, self.ledger, self.store_watch, events)
        pins = pins or Pins(plan, {}, None)
        self._lookups = Lookups(plan, options, queue, pins, self.ledger, self._reports)
        self._drops = Drops(plan, queue, self.ledger)
        self._admission = Admission(
            plan, options, self._lookups, self._policy, self._drops, self.prefills, self.ledger
        )

    @property
    def counts(self) -> SchedulerCounts:
        return self.ledger.counts

    @property
    def loads_in_flight(self) -> bool:
        """Whether a load was not reported yet, such as one of a request that has ended."""
        return bool(self._loading)

    def bind(self, pool: "BlockPool") -> None:
        """Set vLLM's block pool, before its first step."""
        self.blocks = CachedBlocks(pool, self._hash_block_size)

    # Admission

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens past ``num_computed_tokens`` can be loaded.

        vLLM calls it again for as long as the request waits; the ranks are asked once.

        Returns:
            (tokens, True) for an asynchronous load, (0, False) for none, and (None, False) while
            the request must wait.
        """
        if request.request_id.startswith("mock_req") or self.closed:
            return 0, False
        tracker = self._track(request)
        if tracker.prefetch is not None:
            tracker.prefetch.ask(num_computed_tokens)
        if tracker.keep is not None:
            tracker.keep.asked = num_computed_tokens
        gain = self._admission.promise(tracker, num_computed_tokens)
        if gain is not None:
            self._planner.admit(tracker, num_computed_tokens, gain)
        return gain, bool(gain)

    def update_state_after_alloc(
        self, request: "Request", block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Start the promised load into the blocks that vLLM has allocated, if any.

        Args:
            block_ids: of the request, per KV cache group.
            num_external_tokens: what :meth:`get_num_new_matched_tokens` offered; 0 for no load.
        """
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return
        self.prefills.end_wait(tracker)
        if tracker.keep is not None:
            self._keeps.admit(
                tracker.keep,
                request,
                tracker.prefix,
                tracker.step_ends,
                tracker.save,
                tracker.keep.asked + num_external_tokens,
            )
        if num_external_tokens == 0:
            self._lookups.admit(tracker)
            self.prefills.begin(tracker)
            if tracker.prefetch is not None:
                tracker.prefetch.admit(None, self._plan.block_size)
            return
        size = self._plan.block_size
        result = self._lookups.load(tracker, num_external_tokens)
        start = (result.tokens(size) - num_external_tokens) // size
        load = load_of(tracker, self._plan, block_ids, start, result)
        if tracker.prefetch is not None:
            tracker.prefetch.admit(result, size)
        self._policy.sent(request.request_id, result, start * size)
        self._loads.append(load)
        self._loading.add(request.request_id)
        count_hit(self.ledger, result, start, size, len(self._loading))

    def _track(self, request: "Request") -> RequestTracker:
        before = self._trackers.get(request.request_id)
        if before is not None and before.prompt_tokens == request.num_prompt_tokens:
            tracker = before
            if self._options.save_decode:
                blocks = len(request.block_hashes) // self._hashes_per_block
                tracker.extend(blocks, self._hashes_per_block)
        else:
            if before is not None:
                # A session's next part has started over, see vllm_patch/sessions.py.
                self.request_finished(request)
            tracker = self._arrivals.track(request, before, self.drafter)
            self._trackers[request.request_id] = tracker
            if tracker.prefetch is not None:
                tracker.prefetch.begin(request, tracker.tags is not None, self.store_watch.in_ram)
        self._may_store[request.request_id] = None
        return tracker

    def _meet(self, tracker: RequestTracker, boundary: int) -> None:
        """Let a running request end a step at ``boundary`` (tokens), where another waits for it."""
        self._planner.meet(tracker, boundary)
        self._may_store[tracker.request.request_id] = None

    # After an error

    def give_up(self, request_id: str, waits: bool = False) -> None:
        """Stop loading and storing a request.

        Args:
            waits: vLLM has blocks for its load, so report it as failed.
        """
        tracker = self._trackers.get(request_id)
        if waits:
            self._loads = [load for load in self._loads if load.request_id != request_id]
            self._unloadable.append(request_id)
            self._loading.add(request_id)
            with self.ledger as counts:
                counts.loads_in_flight = len(self._loading)
        if tracker is None:
            return
        tracker.leave_store()
        if not isinstance(tracker.phase, Loading):
            self._lookups.admit(tracker)

    def leave_tail(self, request_id: str) -> None:
        """Drop the final save of an ended request: vLLM frees its blocks."""
        self._final.remove(request_id)

    # Reset

    def begin_reset(self) -> int:
        """Forget all promises and records. Nothing is looked up until :meth:`end_reset`.

        Requests that have computed or loaded something go on without the store: their blocks may
        be of replaced weights. The others start over.

        Returns:
            The number of the new epoch.
        """
        self._epoch, self.closed = self._epoch + 1, True
        for request_id, tracker in list(self._trackers.items()):
            tracker.cancel_background()
            if tracker.keep is not None:
                tracker.keep.error = tracker.keep.error or RESET
            loading = isinstance(tracker.phase, Loading)
            if not loading:
                self._lookups.withdraw(tracker)
            if loading or tracker.request.num_computed_tokens:
                if tracker.unsaved:
                    with self.ledger as counts:
                        counts.skipped_requests["reset"] += 1
                tracker.leave_store()
            elif tracker.request.resumable:
                tracker.prompt_tokens = 0  # tracked anew; what earlier parts asked for still holds
            else:
                del self._trackers[request_id]
        self._keeps.reset()
        self.prefills.clear()
        self._final.forget()
        self.store_watch.forget()
        if self.events is not None:
            self.events.reset(self._epoch)
        return self._epoch

    def end_reset(self, done: bool) -> None:
        """Serve again if every rank was reset; else serve nothing until a reset succeeds."""
        self.closed = not done
        if done and not self._options.save:
            logger.warning(
                "This engine stores nothing, and since the reset it looks for records that no "
                "engine writes: no prompt hits until it is restarted."
            )
        if not done:
            logger.error(
                "A reset of all caches failed: this engine computes every prompt and stores "
                "nothing until one succeeds or it is restarted: POST /pause?mode=keep, POST "
                "/reset_prefix_cache?reset_running_requests=true&reset_external=true, and /resume."
            )

    # One step

    def build_connector_meta(self, output: "SchedulerOutput") -> ConnectorMetadata:
        """Return the step's work for the workers, and forget it here."""
        saves: list[SaveSpec] = []
        block_state = output.kv_connector_block_state
        if self.drafter.forgets and self._options.save_decode and self._plan.states:
            self._leave_skipped(output.num_scheduled_tokens)
        if block_state is not None and (self._may_store or block_state.boundary_state_offloads):
            saves = list(self._saves(output.num_scheduled_tokens, block_state))
        self.prefills.step()
        self._policy.scheduled(
            self._trackers[new.req_id].request
            for new in output.scheduled_new_reqs
            if new.req_id in self._trackers
        )
        self._lookups.begin(self.idle_steps.add(output.total_num_scheduled_tokens == 0))
        return self.send(output, saves)

    def send(self, output: "SchedulerOutput", saves: list[SaveSpec]) -> ConnectorMetadata:
        """Return ``saves`` and all other work queued for the workers; report the lookups."""
        self._reports.send()
        released = tuple(self._lookups.take_released())
        final, ended = self._final.drain()
        saves = [*saves, *final]
        idle, step = output.total_num_scheduled_tokens == 0, self._drops.begin()
        if not (saves or self._loads or released or idle or ended or self._unloadable or step):
            return NOTHING
        loads, self._loads = tuple(self._loads), []
        unloadable, self._unloadable = tuple(self._unloadable), []
        return ConnectorMetadata(
            loads,
            tuple(saves),
            released,
            idle,
            self._epoch,
            ended,
            self.idle_steps.waits,
            unloadable,
            step,
            time.monotonic() if loads else 0.0,
        )

    def _saves(
        self, scheduled: dict[str, int], block_state: KVConnectorBlockState
    ) -> Iterator[SaveSpec]:
        """Plan the saves of each scheduled request."""
        offers = block_state.boundary_state_offloads
        for request_id in dict.fromkeys((*self._may_store, *offers)):
            tracker, offered = self._trackers.get(request_id), offers.get(request_id, ())
            may_save = tracker is not None and (tracker.saving or tracker.background is not None)
            if tracker is None or request_id not in scheduled or not may_save:
                # Finished, preempted or waiting: its blocks may belong to another by now.
                self._drop_offers(tracker, offered)
                if tracker is None or not tracker.save:
                    self._may_store.pop(request_id, None)
                elif tracker.unsaved:
                    self._may_store[request_id] = None
                continue
            try:
                save = self._save_of(tracker, scheduled[request_id], offered, block_state)
            except Exception as error:
                caught("plan_save", error, "nothing more of a request is stored", self.ledger)
                self.give_up(request_id)
                continue
            if save is not None:
                yield save
            if tracker.unsaved:  # a handed-off state may add blocks to store
                self._may_store[request_id] = None
            else:
                self._may_store.pop(request_id, None)

    def _leave_skipped(self, scheduled: Mapping[str, int]) -> None:
        """Store no more of answers that go on after a step left them out.

        See :attr:`Drafter.forgets`. One that has ended goes on no more.
        """
        for request_id in self._left_out & scheduled.keys() & self._trackers.keys():
            self._trackers[request_id].leave_store()
            with self.ledger as counts:
                counts.skipped_requests["skipped_step"] += 1
        self._left_out = {
            request_id
            for request_id, tracker in self._trackers.items()
            if tracker.request.status == RequestStatus.RUNNING
            and tracker.request.num_output_tokens
            and tracker.save
            and request_id not in scheduled
        }

    def _drop_offers(self, tracker: RequestTracker | None, offers: Sequence[Offer]) -> None:
        """Count handed-off states of a request that does not run, unless it saves none."""
        if tracker is None or tracker.saving:
            self._planner.drop_offers("not_running", len(offers))
        if tracker is not None and tracker.saving:  # it may run again
            self._planner.lose(tracker, offers)

    def _save_of(
        self,
        tracker: RequestTracker,
        scheduled: int,
        offered: Sequence[Offer],
        block_state: KVConnectorBlockState,
    ) -> SaveSpec | None:
        """Plan the save of a request for a step that computes ``scheduled`` of its tokens."""
        self._lookups.learn_stored(tracker)
        if not tracker.saving:
            return None
        request = tracker.request
        computed = request.num_computed_tokens + scheduled
        if request.skip_reading_prefix_cache and computed >= request.num_prompt_tokens:
            # It may end with this step: what may be stored is stored twice rather than not at all.
            tracker.cancel_background()
        held = [offer for offer in offered if self.blocks.hold(request, offer)]
        self._planner.drop_offers("not_cached", len(offered) - len(held))
        save = self._planner.plan(tracker, computed, held, block_state)
        self._planner.lose(tracker, set(offered) - set(held))
        tracker.settle_keep(self._plan)
        if save is not None and self.events is not None:
            self.events.learn_save(request, save)
        return save

    # Completions

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """Take the loads that ended on all ranks, and those that failed on any."""
        if self.events is not None:
            self.events.receive(output.kv_cache_events)
        self._failures, slow = self._failures.after(output, self._loading)
        failed = self._loading & set(output.failed_recving or ())  # not other connectors'
        self._policy.ended(output.finished_recving or (), failed, slow)
        for request_id in failed:
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                self._count_failure(tracker)
                tracker.fail_load(slow=request_id in slow)
        for request_id in output.finished_recving or ():
            tracker = self._trackers.get(request_id)
            if tracker is not None and isinstance(tracker.phase, Loading):
                tracker.end_load()
            self._loading.discard(request_id)  # also of a request that was aborted
            with self.ledger as counts:
                counts.loads_in_flight = len(self._loading)

    def _count_failure(self, tracker: RequestTracker) -> None:
        with self.ledger as counts:
            counts.failed_loads += 1
            if isinstance(tracker.phase, Loading):
                counts.failed_tokens += tracker.phase.tokens

    def end_loads(self, output: "KVConnectorOutput") -> None:
        """End loads after :meth:`update_connector_output` failed, so that none lasts for ever."""
        for request_id in output.finished_recving or ():
            tracker = self._trackers.get(request_id)
            if tracker is not None and isinstance(tracker.phase, Loading):
                tracker.leave_store()
                tracker.end_load()
            self._loading.discard(request_id)
        with self.ledger as counts:
            counts.loads_in_flight = len(self._loading)

    def register_finished_partial_tail(
        self, request: "Request", block_ids: tuple[list[int], ...], offers: Sequence[Offer]
    ) -> bool:
        """Save the states of a request that ends right at a boundary inside a block.

        Args:
            offers: what vLLM hands off only now, as no later step preserves it.

        Returns:
            Whether vLLM must keep the request's blocks until every rank has reported it.
        """
        tracker = self._trackers.get(request.request_id)
        if not self._options.alone:
            # MultiConnector does not count saves of two connectors: the first that ends frees the
            # blocks, and the second crashes the engine.
            self._planner.drop_offers("beside_others", len(offers))
            return False
        if tracker is not None:
            self._lookups.learn_stored(tracker)
        if tracker is None or not tracker.saving or tracker.background is not None:
            self._drop_offers(tracker, offers)
            return False
        blocks = KVConnectorBlockState({request.request_id}, lambda _: block_ids, {})
        save = self._planner.plan(tracker, request.num_computed_tokens, offers, blocks)
        if save is not None:
            self._final.add(save)
            if self.events is not None:
                self.events.learn_save(request, save)
        return save is not None

    def request_finished(self, request: "Request") -> dict[str, Any] | None:
        """Forget the request. A load under way goes on until the worker reports it.

        Returns:
            ``kv_transfer_params`` of its answer, None where it asked for nothing.
        """
        tracker = self._trackers.pop(request.request_id, None)
        self._may_store.pop(request.request_id, None)
        self.prefills.forget(request.request_id)
        if tracker is not None:
            # The worker's load owns its claim and releases it at its end.
            if not isinstance(tracker.phase, Loading):
                self._lookups.withdraw(tracker)
            elif request.status == RequestStatus.FINISHED_ERROR:  # see LOAD_FAILURE_KEY
                self._count_failure(tracker)
            tracker.cancel_background()
            self._policy.finished(request)
        if not self._trackers:
            self._lookups.begin(idle=self.idle_steps.alone)
        if tracker is not None:
            # It only warns, and an error in it must leave no claim behind.
            self.store_watch.ended(tracker)
            tracker.settle_keep(self._plan)
            if tracker.keep is not None and tracker.keep.promised:
                self._keeps.take_back(tracker.keep, tracker.stored.attention)
        return self._arrivals.answer(request, tracker)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of vLLM."""
        for request_id, tracker in self._trackers.items():
            assert request_id in self._may_store or not tracker.unsaved, "never looked at"
            tracker.check_integrity()
            assert tracker.request.request_id == request_id
            loading = isinstance(tracker.phase, Loading)
            assert not loading or request_id in self._loading
        assert self.counts.loads_in_flight == len(self._loading)
        self.prefills.check_integrity()
        self._lookups.check_integrity(self._trackers.values())
