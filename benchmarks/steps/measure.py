# SPDX-License-Identifier: Apache-2.0
"""The real scheduler side without an engine, with vLLM's requests and step outputs.

A rank that holds what it is told to answers at once. Each step computes PER_STEP blocks with a
state at each end.
"""

import time
from concurrent.futures import Executor, Future
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: F401
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import tags_digest, wide_hash
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.record_reports import (
    RAM,
    RankReport,
    RankReports,
    RecordName,
)
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.scheduler import HybridScheduler

N = 16
PER_STEP = 32
PLAN = GroupPlan(N, (2,), (0, 1, 3))
OPTIONS = Options(save=True, priority_limit=None, min_retrieve_tokens=0, max_tokens_per_load=0)


class AtOnce(Executor):
    """Runs what it is given right away."""

    def submit(self, function, /, *args, **kwargs):
        done: Future = Future()
        done.set_result(function(*args, **kwargs))
        return done


class Rig:
    """A scheduler side, and the small part of vLLM that calls it."""

    def __init__(self, events: bool, executor: Executor | None = None) -> None:
        """
        Args:
            executor: in place of the queue's thread; by default lookups are answered at once.
        """
        self.held = 0
        self.queue = LookupQueue(self._answer, 60_000, executor or AtOnce())
        published = KVEvents(PLAN, groups(), 1) if events else None
        self.scheduler = HybridScheduler(PLAN, OPTIONS, N, self.queue, events=published)
        self.scheduler.blocks = SimpleNamespace(hold=lambda request, offer: True)
        self.tags = tags_digest(())

    def _answer(self, question: LookupRequest) -> list[LookupResult]:
        found = min(self.held, question.limit)
        return [LookupResult(found, found, (("LocalCPUBackend", found),) if found else ())]

    def step(self, request: Request, blocks: int) -> float:
        """Compute blocks, store their pages and states, and publish that they are there.

        Returns:
            Milliseconds that the scheduler side took.
        """
        first = request.num_computed_tokens // N
        offers = [
            (group, at + 1, (at + 1) * N)
            for at in range(first, first + blocks)
            for group in PLAN.states
        ]
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {request.request_id: blocks * N}
        output.total_num_scheduled_tokens = blocks * N
        ids = list(range(1, first + blocks + 1))
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids={request.request_id},
            resolve_block_ids=lambda _: (ids,) * 4,
            boundary_state_offloads={request.request_id: offers},
        )
        reported = self._report(request, first, first + blocks)
        start = time.thread_time()
        self.scheduler.build_connector_meta(output)
        self.scheduler.update_connector_output(KVConnectorOutput(kv_cache_events=reported))
        if self.scheduler.events is not None:
            self.scheduler.events.drain()
        taken = time.thread_time() - start
        request.num_computed_tokens += blocks * N
        return 1000 * taken

    def _report(self, request: Request, first: int, end: int) -> RankReports | None:
        """What the rank says that it has stored."""
        if self.scheduler.events is None:
            return None
        groups = PLAN.groups
        changes = tuple(
            (RecordName(group, wide_hash(request.block_hashes[at]), self.tags), RAM)
            for at in range(first, end)
            for group in groups
        )
        return RankReports([RankReport(0, 0, changes, True, False)])


def groups() -> list[KVCacheGroupSpec]:
    pages = FullAttentionSpec(block_size=N, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=N, shapes=((4,),), dtypes=(torch.float32,))
    return [KVCacheGroupSpec([f"g{i}"], pages if i == 2 else state) for i in range(4)]


def request(name: str, blocks: int, params: dict[str, Any] | None = None) -> Request:
    """A request of so many blocks and a token.

    Args:
        params: its ``kv_transfer_params``.
    """
    return Request(
        request_id=name,
        prompt_token_ids=list(range(blocks * N + 1)),
        sampling_params=SamplingParams(
            max_tokens=8, extra_args={"kv_transfer_params": params} if params else None
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(N, sha256_cbor),
    )


def begin() -> None:
    """What vLLM does in an engine: blocks have hashes, and what is there is no garbage."""
    init_none_hash(sha256_cbor)
    freeze_gc_heap()


def timed(function, *args) -> float:
    start = time.thread_time()
    function(*args)
    return 1000 * (time.thread_time() - start)


def measure(blocks: int, events: bool) -> dict[str, float]:
    """Milliseconds of each kind of step with a prompt of ``blocks`` blocks."""
    rig, first = Rig(events), request("first", blocks)
    arrival = timed(rig.scheduler.get_num_new_matched_tokens, first, 0)
    rig.scheduler.update_state_after_alloc(first, ([],) * 4, 0)
    steps = [rig.step(first, PER_STEP) for _ in range(blocks // PER_STEP)]
    # The last ones: what comes before them is longest then.
    found = {"arrival": arrival, "step": median(steps[-len(steps) // 4 :])}
    rig.scheduler.request_finished(first)
    rig.held, second = blocks, request("second", blocks)
    found["arrival of a hit"] = timed(rig.scheduler.get_num_new_matched_tokens, second, 0)
    if events:
        # As after a restart: a step that is told of all at once.
        rig, again = Rig(events), request("again", blocks)
        rig.scheduler.get_num_new_matched_tokens(again, 0)
        rig.scheduler.update_state_after_alloc(again, ([],) * 4, 0)
        found["all at once"] = rig.step(again, blocks // PER_STEP * PER_STEP)
    return {name: round(each, 3) for name, each in found.items()}
