# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's streaming input (``Request.resumable``). One function each.

The prompt of a session comes in parts. When a part ends, like a request, its last sampled token is
discarded, and the next part goes on behind the kept tokens. Engines without this connector are not
changed.
"""

import functools
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.core.groups import is_served
from lmcache_hybrid.identity.media import carry_mark, mark_of
from vllm_patch.configuration import is_ours
from vllm_patch.scheduler_repairs import free_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, StreamingUpdate


def install() -> None:
    """Apply the repairs of the scheduler. Mutates its class."""
    start_parts_over()
    drop_output_of_preempted_sessions()


def start_parts_over() -> None:
    """A session's next part must not go on from a state that has seen a discarded token.

    Bug: vLLM sets ``num_computed_tokens`` back and goes on in the session's blocks. With
    asynchronous scheduling the next step has put the discarded token into the running state, in
    place. With drafts the state of the last kept token lies in a column that depends on how many
    were accepted, which runners forget when the next part comes. What the session goes on to
    need is reserved nowhere.
    Symptom: wrong tokens in the next part, with or without a connector. Its blocks get hashes:
    ordinary requests hit them in vLLM's own cache, and connectors store them and what follows.
    In a pool that is full, sessions and loads wait for each other for ever.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``Scheduler._update_request_as_session`` frees the blocks of models with states.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    original = Scheduler._update_request_as_session

    @functools.wraps(original)
    def _update_request_as_session(
        self: Scheduler, session: "Request", update: "StreamingUpdate"
    ) -> None:
        queued = session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        mark, had_media = mark_of(session.sampling_params), bool(session.mm_features)
        original(self, session, update)
        if not is_ours(self.vllm_config) or not is_served(self.kv_cache_config):
            return
        carry_mark(session, mark, had_media, bool(update.mm_features))
        _start_over(self, session)
        if queued:  # among those that hold blocks
            self.kv_holding_waiting.remove_requests([session])
            self.waiting.add_request(session)

    Scheduler._update_request_as_session = _update_request_as_session


def _start_over(scheduler: "Scheduler", session: "Request") -> None:
    """Free its blocks, so that it is looked up and computed like a new request.

    No block behind the last kept token has a hash: vLLM hashes what has been sampled, up to the
    last token, and the discarded one is the last.
    """
    free_blocks(scheduler, session)
    # Drafts that have come, or still come, are for the ended part.
    session.spec_token_ids, session.is_prefill_chunk = [], True
    # After a load vLLM does not send workers the new prompt of a preempted request.
    session.num_preemptions = 0


def drop_output_of_preempted_sessions() -> None:
    """A part must not end while its session is preempted.

    Bug: with asynchronous scheduling output of a preempted request still comes, and may end the
    part. ``num_computed_tokens`` is 0 by then: ``_update_request_as_session`` deletes all tokens
    but those of the next part. The session is in no queue any more.
    Symptom: the session waits for ever; with the V1 runner the hashes are those of other tokens.
    Seen in: vLLM 0.32.0; gone in 0.33.0.
    Remove when: vLLM >= 0.33 is the oldest supported version.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._preempt_request

    @functools.wraps(original)
    def _preempt_request(
        self: Scheduler, request: "Request", timestamp: float, drop_stale_output: bool = False
    ) -> None:
        # Dropped tokens are sampled again.
        drop = drop_stale_output or (request.resumable and is_ours(self.vllm_config))
        original(self, request, timestamp, drop_stale_output=drop)

    Scheduler._preempt_request = _preempt_request


@functools.cache
def forget_columns_of_parts() -> None:
    """The V1 runner must not take a session's new blocks for those of its last part. Idempotent.

    Bug: the runner keeps the column of a request's running state (``mamba_state_idx``) until the
    request ends or is preempted. A session's next part comes as a new request.
    Symptom: its first step copies a state from another column than the one it was restored to.
    Seen in: vLLM 0.32.0 and 0.33.0.
    Remove when: ``cleanup_mamba_state_idx`` leaves out ``scheduled_new_reqs``.
    """
    from vllm.v1.worker import mamba_utils

    utils: Any = mamba_utils
    original = mamba_utils.cleanup_mamba_state_idx

    @functools.wraps(original)
    def cleanup_mamba_state_idx(
        scheduler_output: "SchedulerOutput", mamba_state_idx: dict[str, int]
    ) -> None:
        original(scheduler_output, mamba_state_idx)
        for new in scheduler_output.scheduled_new_reqs:
            mamba_state_idx.pop(new.req_id, None)

    utils.cleanup_mamba_state_idx = cleanup_mamba_state_idx
