# SPDX-License-Identifier: Apache-2.0
"""Repairs of bugs of vLLM's scheduler that break hybrid prefix caching. One function each.

Each acts only where this connector is used, or where its bug shows, and leaves vLLM alone
otherwise. A method that upstream renamed raises AttributeError when the plugin loads.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_patch.configuration import hybrids_of, is_ours

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def install() -> None:
    """Apply all repairs. Mutates vLLM's classes.

    Only the order of two matters: ``skip_partial_publish_when_full`` moves the end of a load that
    ``publish_restored_states`` reads.
    """
    promote_loads_in_order()
    publish_restored_states()
    skip_partial_publish_when_full()
    free_failed_loads()
    finish_resets()
    reserve_windows()
    unhash_uncomputed_blocks()
    publish_where_steps_ended()
    publish_checkpoints_once()
    leave_no_chunk_empty()
    part_chunks_of_two_blocks()


def promote_loads_in_order() -> None:
    """Requests whose loads are done must be promoted in order of admission.

    Bug: an asynchronous load is admitted when it leaves room for what the loads admitted
    before it still need. With ``--scheduling-policy priority`` the queue of these requests
    (``Scheduler.kv_holding_waiting``) is sorted by priority, so a later one that does not fit
    blocks the earlier one that does.
    Symptom: in a pool that is full to the last blocks both wait for ever.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: the queue is in order of admission, or the scheduler looks past
    its head.
    """
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__

    @functools.wraps(original)
    def __init__(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        assert not self.kv_holding_waiting
        if self.policy != SchedulingPolicy.FCFS and is_ours(self.vllm_config):
            self.kv_holding_waiting = create_request_queue(SchedulingPolicy.FCFS)

    Scheduler.__init__ = __init__


def publish_restored_states() -> None:
    """A restored state must be found again in vLLM's own prefix cache.

    Bug: with sparse retention vLLM publishes the states at a prompt's last
    boundary and at ``shared_prefix_boundary`` only. A state that a connector
    restored in the middle of a prompt is at neither.
    Symptom: the next request with the same prefix loads all of it again.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``Scheduler._update_waiting_for_remote_kv`` publishes what was loaded.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._update_waiting_for_remote_kv

    @functools.wraps(original)
    def _update_waiting_for_remote_kv(self: Scheduler, request: "Request") -> None:
        if not is_ours(self.vllm_config):
            original(self, request)
            return
        stop = request.shared_prefix_boundary
        # 0 after a failed load.
        request.shared_prefix_boundary = request.num_computed_tokens
        try:
            original(self, request)
        finally:
            request.shared_prefix_boundary = stop

    Scheduler._update_waiting_for_remote_kv = _update_waiting_for_remote_kv


def skip_partial_publish_when_full() -> None:
    """Publishing a partial-block load must not need blocks that nobody reserved.

    Bug: with ``--prefix-match-unit`` the end of a load is published when it is the last hash
    boundary of its prompt, and each state group then needs one block more, to keep what was
    published from the request's next step. The admission of the load did not count it.
    Symptom: in a pool that is full to the last blocks, loads wait for each other for ever.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``Scheduler._request_remaining_blocks`` counts these blocks at admission.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._update_waiting_for_remote_kv

    @functools.wraps(original)
    def _update_waiting_for_remote_kv(self: Scheduler, request: "Request") -> None:
        end = request.num_computed_tokens
        inside = end % self.cache_config.block_size
        if not inside or not is_ours(self.vllm_config) or _has_room_to_copy(self, request):
            original(self, request)
            return
        request.num_computed_tokens = end - inside
        try:
            original(self, request)
        finally:
            request.num_computed_tokens = end

    Scheduler._update_waiting_for_remote_kv = _update_waiting_for_remote_kv


def _has_room_to_copy(scheduler: "Scheduler", request: "Request") -> bool:
    """Whether one block per group is free beyond those the request still needs."""
    manager = scheduler.kv_cache_manager
    needed = scheduler._request_remaining_blocks(request)
    copies = len(manager.coordinator.single_type_managers)
    return manager.block_pool.get_num_free_blocks() >= needed + copies


def free_failed_loads() -> None:
    """A failed load must give its blocks back before another request asks for them.

    Bug: the blocks of a failed load are freed only when its request reaches the head of the
    queue. The request at the head may have failed too, start over and find no room. What was
    reserved for the rest of the failed load stays reserved even then.
    Symptom: in a pool that is full both wait for ever.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``Scheduler._update_from_kv_xfer_finished`` frees both.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._update_from_kv_xfer_finished

    @functools.wraps(original)
    def _update_from_kv_xfer_finished(
        self: Scheduler, kv_connector_output: "KVConnectorOutput"
    ) -> None:
        original(self, kv_connector_output)
        if is_ours(self.vllm_config):
            _free_ended(self)

    Scheduler._update_from_kv_xfer_finished = _update_from_kv_xfer_finished


def _free_ended(scheduler: "Scheduler") -> None:
    """Free the blocks of loads that have failed and ended, and queue their requests again."""
    ended = scheduler.failed_recving_kv_req_ids & scheduler.finished_recving_kv_req_ids
    if not ended:
        return
    failed = [
        request
        for request in scheduler.kv_holding_waiting
        if request.request_id in ended and not request.num_computed_tokens
    ]
    for request in failed:
        scheduler._handle_blocked_waiting_request(request)
        scheduler._inflight_prefills.discard(request)
    _start_over(scheduler, failed)


def _start_over(scheduler: "Scheduler", requests: list["Request"]) -> None:
    """Queue requests again that have given their blocks back."""
    from vllm.v1.core.sched.interface import PauseState

    if not requests:
        return
    scheduler.kv_holding_waiting.remove_requests(requests)
    if scheduler.pause_state == PauseState.PAUSED_NEW:
        # It ends once this queue is empty, and runs no others.
        for request in requests:
            scheduler.kv_holding_waiting.add_request(request)
        return
    # Reversed, because each is put in front of those before.
    scheduler.waiting.prepend_requests(requests[::-1])


def finish_resets() -> None:
    """A reset of all caches must fail loads in flight, and be all or nothing.

    Bug: ``Scheduler.reset_prefix_cache(reset_connector=True)`` does not touch loads in flight.
    While a request holds blocks the reset fails: with ``reset_running_requests`` before the
    connector is asked, without it after the connector was reset. It preempts only what runs, not
    what waits for room behind its load.
    Symptom: after weights were replaced, a load brings what the old weights left, and blocks
    of vLLM's own cache, which was not emptied, are stored again. A pause with ``mode=keep`` beside
    loads fails, and so does each retry.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: it fails or preempts loads, and tells connectors whether all of it succeeded.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.reset_prefix_cache

    @functools.wraps(original)
    def reset_prefix_cache(
        self: Scheduler, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if not reset_connector or not is_ours(self.vllm_config):
            return original(self, reset_running_requests, reset_connector)
        done = False
        _fail_loads(self)
        if reset_running_requests:
            _preempt_waiting(self)
        try:
            done = original(self, reset_running_requests, reset_connector)
            return done
        finally:
            if not done:
                for connector in hybrids_of(self.connector):
                    connector.reset_failed()

    Scheduler.reset_prefix_cache = reset_prefix_cache


def _fail_loads(scheduler: "Scheduler") -> None:
    """Fail every load that is in flight or not yet taken up: its request is computed."""
    from vllm.v1.request import RequestStatus

    for request in scheduler.kv_holding_waiting:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
    _free_ended(scheduler)


def _preempt_waiting(scheduler: "Scheduler") -> None:
    """Free the blocks of requests whose loads have ended, and that have not run since."""
    from vllm.v1.request import RequestStatus

    loaded = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    waiting = [each for each in scheduler.kv_holding_waiting if each.status in loaded]
    for request in waiting:
        free_blocks(scheduler, request)
    _start_over(scheduler, waiting)


def free_blocks(scheduler: "Scheduler", request: "Request") -> None:
    """Free what a request holds that does not run, so that it is computed from the beginning."""
    if scheduler.aux_output_connector is not None:
        scheduler.aux_output_connector.request_finished(request)
    scheduler._free_request_blocks(request)
    scheduler.encoder_cache_manager.free(request)
    scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0


def reserve_windows() -> None:
    """An admitted load must reserve all blocks that its window groups still need.

    Bug: ``get_num_blocks_to_allocate`` counts null blocks before the window against a window
    group's admission cap, so a request whose load ended past the window reserves nothing
    there.
    Symptom: models with windows; in a tight pool two loads wait for each other for ever.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``SingleTypeKVCacheManager.get_num_blocks_to_allocate`` leaves out null blocks.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._request_remaining_blocks

    @functools.wraps(original)
    def _request_remaining_blocks(self: Scheduler, request: "Request") -> int:
        reserved = original(self, request)
        if not is_ours(self.vllm_config):
            return reserved
        tokens = request.num_tokens
        if self.num_spec_tokens:
            tokens += 1 + self.num_spec_tokens + self.num_lookahead_tokens
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            cap = manager.max_admission_blocks_per_request
            blocks = manager.req_to_blocks.get(request.request_id)
            if cap is None or not blocks:
                continue
            all_needed = -(-tokens // manager.block_size)
            counted = max(min(all_needed, cap) - len(blocks), 0)
            held = sum(not block.is_null for block in blocks)
            reserved += max(min(all_needed - len(blocks), cap - held) - counted, 0)
        return reserved

    Scheduler._request_remaining_blocks = _request_remaining_blocks


def unhash_uncomputed_blocks() -> None:
    """A preempted step's uncomputed blocks must not be hit in vLLM's own prefix cache.

    Bug: blocks get their hash when the scheduler allocates them, before the step that
    computes them. With ``--scheduling-policy priority`` a request can be preempted later in
    the same ``schedule()``: it leaves the step, and its blocks keep their hash.
    Symptom: the request itself, or the next one with this prefix, hits blocks that were never
    computed and gets wrong tokens, with or without a connector. A connector stores them too.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``Scheduler._preempt_request`` evicts blocks past what was computed.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._preempt_request

    @functools.wraps(original)
    def _preempt_request(self: Scheduler, request: "Request", *args: Any, **kwargs: Any) -> None:
        if is_ours(self.vllm_config):
            # All tokens of steps scheduled before this one count as computed.
            computed = request.num_computed_tokens
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                blocks = manager.req_to_blocks.get(request.request_id, ())
                unfinished = blocks[computed // manager.block_size :]
                manager.block_pool.evict_blocks({b.block_id for b in unfinished if not b.is_null})
        original(self, request, *args, **kwargs)

    Scheduler._preempt_request = _preempt_request


def publish_where_steps_ended() -> None:
    """A state must be published although ``shared_prefix_boundary`` has moved on since its step.

    Bug: with a drafter of several MTP modules whose KV cache group vLLM does not know, vLLM takes
    every group for it. It then publishes the last tokens of a step with the request's next step,
    and with sparse retention no state there but the one at ``shared_prefix_boundary``. That is
    where the next step is to end by then.
    Symptom: of ``lmcache.hybrid_checkpoint_tokens`` no checkpoint is offered to connectors; a
    restored state is loaded again by the next request.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``KVCacheCoordinator.get_num_cacheable_tokens`` leaves out no tokens of states.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    original = KVCacheCoordinator.cache_blocks

    @functools.wraps(original)
    def cache_blocks(
        self: KVCacheCoordinator, request: "Request", num_computed_tokens: int
    ) -> None:
        if not self.num_reprefillable_tokens or not any(
            manager.use_eagle and isinstance(manager, MambaManager)
            for manager in self.single_type_managers
        ):
            return original(self, request, num_computed_tokens)
        boundary, ended = request.shared_prefix_boundary, getattr(request, "_hybrid_ended", 0)
        if num_computed_tokens == boundary:
            request._hybrid_ended = boundary
        if 0 < ended == request.num_computed_tokens:  # where this step begins
            request.shared_prefix_boundary = ended
        try:
            original(self, request, num_computed_tokens)
        finally:
            request.shared_prefix_boundary = boundary

    KVCacheCoordinator.cache_blocks = cache_blocks


def publish_checkpoints_once() -> None:
    """A block that holds a checkpoint from inside a chunk must not be published as its end later.

    Bug: where the model writes a checkpoint inside its last chunk
    (``num_prefill_checkpoint_blocks``), the block of the chunk's last boundary holds it, and gets
    its hash in place of the boundary's. For a drafter of several MTP modules hashes cover more
    than the next token, so where few tokens follow that boundary its hash is known only after the
    step. Then the block is published again, as the state at the boundary. Only then connectors are
    offered it. The code of 0.32 has the same gap where it publishes the last tokens of a step late
    (``num_reprefillable_tokens``); 192 programs did not show it there.
    Symptom: with asynchronous scheduling the state of an earlier token is found, and offered to
    connectors, as that of the boundary: the next request that begins with this prompt and its
    answer gets wrong tokens, with or without a connector.
    Seen in: vLLM 0.33.0.
    Remove when: ``MambaManager._cache_partial_tail_block`` counts the block of a checkpoint in
    ``num_cached_block``.
    """
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    original = MambaManager._cache_partial_tail_block

    @functools.wraps(original)
    def _cache_partial_tail_block(
        self: MambaManager, request: "Request", *args: Any, **kwargs: Any
    ) -> Any:
        published = original(self, request, *args, **kwargs)
        name = request.request_id
        position, column = self._checkpoints.get(name, (0, -1))
        if self.num_cached_block.get(name, 0) <= column:
            self.num_cached_block[name] = column + 1
            if published is not None:
                # The caller offers only what was full before this call.
                block = self.req_to_blocks[name][column]
                offer = name, self.kv_cache_group_id, block, position
                self._pending_boundary_state_offloads.append(offer)
        return published

    MambaManager._cache_partial_tail_block = _cache_partial_tail_block


def leave_no_chunk_empty() -> None:
    """A chunk that is shortened for MTP modules must end at a boundary, and must not be empty.

    Bug: for a drafter of several MTP modules vLLM shortens a chunk that leaves fewer known tokens
    than there are drafts. It no longer ends at a boundary; the next one must end there, and is
    shortened to nothing.
    Symptom: a prompt that is a few tokens longer than whole blocks is never finished, where the
    last step had room for its last whole block and no more, with or without a connector.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``Scheduler._reserve_prefill_lookahead`` knows ``_mamba_block_aligned_split``.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._reserve_prefill_lookahead

    @functools.wraps(original)
    def _reserve_prefill_lookahead(
        self: Scheduler, request: "Request", num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        count = original(self, request, num_computed_tokens, num_new_tokens)
        if count == num_new_tokens or not is_ours(self.vllm_config):
            return count
        if not self.need_mamba_block_aligned_split:
            return count
        size = self.cache_config.block_size
        end = (num_computed_tokens + count) // size * size
        # The drafter's guess at the last tokens costs less than to wait for a step with more room.
        return end - num_computed_tokens if end > num_computed_tokens else num_new_tokens

    Scheduler._reserve_prefill_lookahead = _reserve_prefill_lookahead


def part_chunks_of_two_blocks() -> None:
    """Beside one draft token, a chunk that more chunks follow must not go on for two columns.

    Bug: the running state moves into the block that the draft had, two columns on. The worker's
    table still has that block in the column before, too, and there the model writes the state of
    the boundary before the chunk's end, where it keeps states inside of chunks
    (``num_prefill_checkpoint_blocks``). The last convolution window is written before that, and
    only the recurrent state behind it.
    Symptom: the prompt goes on from a state whose convolution window is a block old: wrong tokens,
    with or without a connector. The state is published and offered to connectors.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: the worker's block table follows ``MambaManager._relocate_speculative_block``.
    """
    from vllm.utils.math_utils import cdiv
    from vllm.v1.core.sched.scheduler import Scheduler

    # vLLM asks this last, when media without room have shortened the chunk.
    original = Scheduler._reserve_prefill_lookahead

    @functools.wraps(original)
    def _reserve_prefill_lookahead(
        self: Scheduler, request: "Request", num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        count = original(self, request, num_computed_tokens, num_new_tokens)
        if self.num_spec_tokens != 1 or not is_ours(self.vllm_config):
            return count
        end = num_computed_tokens + count
        last = end >= max(request.num_prompt_tokens, request.num_tokens - 1)
        # A prompt's first chunk finds no draft's block to move.
        if last or not num_computed_tokens or not self.mamba_has_prefill_checkpoint_blocks:
            return count
        size = self.cache_config.block_size
        columns = cdiv(end, size) - cdiv(num_computed_tokens, size)
        return size - num_computed_tokens % size if columns == 2 else count

    Scheduler._reserve_prefill_lookahead = _reserve_prefill_lookahead
