# SPDX-License-Identifier: Apache-2.0
"""Engines of the simulation: vLLM's scheduler, our connector, LMCache's storage, a toy model.

Everything between the requests and the pages is the real thing: vLLM's ``Scheduler`` or
``AsyncScheduler`` with its block managers, ``LMCacheConnectorV1`` as patched, both our sides,
:class:`LMCacheStore` over LMCache's ``StorageManager``, vLLM's aggregator of the ranks' results.
What is left out is time: loads run when the program says so, questions to the ranks are function
calls, and all engines and ranks live in one thread. With ``Setup.device`` pages lie on a simulated
device and each rank has threads, see :mod:`tests.sim.device`.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from unittest import mock

import msgspec
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import lmcache_hybrid.connector
from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.groups import GroupPlan, plan_groups
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.hit_records import block_keys
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.scheduler import waits
from lmcache_hybrid.storage import keep_shares
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.worker import loads
from vllm_patch import sessions

from . import device, integrity, orders, saves
from .connector import SimConnector
from .device import Device
from .flight import Flight
from .model import ToyRank
from .sessions import Sessions
from .setup import Setup, base_config
from .storage import KEEP_SHARE, Clock, ManualExecutor, N, Pool, RankView, make_stores, storage
from .threads import Threads
from .truth import Truth

# Steps without progress after which a request counts as stuck.
PATIENCE = 400
# Turns of the threads between two steps.
SPANS = (0, 2, 10, 50, 1000)


class Stuck(AssertionError):
    """Requests that should end do not."""


def install(patch) -> None:
    """Put the parts of the simulation in place, until pytest undoes ``patch``."""
    patch.setattr(lmcache_hybrid.connector, "HybridConnector", SimConnector)
    sessions.forget_columns_of_parts()  # as each worker does
    patch.setattr(loads, "IDLE_WAIT_SECONDS", 0)
    patch.setattr(keep_shares, "time", Clock())
    patch.setattr(waits, "IDLE_SECONDS", 0)
    patch.setattr(waits, "BUSY_SECONDS", (0.0, 0.0))
    patch.setattr(waits, "LAST_CHANCE_SECONDS", 0)
    orders.install(patch, ToyRank.running_connector)
    saves.install(patch)
    device.install(patch)


class SimEngine:
    """One vLLM engine: scheduler, ranks, connectors.

    Attributes:
        holding: loads do not run.
        silent: ranks do not answer: their questions are "lost", "late" or the answers "unheard".
    """

    def __init__(self, setup: Setup, pool: Pool) -> None:
        self.setup, self._pool = setup, pool
        self.holding = False
        self.silent = ""
        self.steps = 0
        self.events: Counter[str] = Counter()
        self.requests: dict[str, Request] = {}
        self._truths: dict[str, Truth] = {}
        self._late: list[LookupRequest] = []
        base, structured_output = base_config()
        config = setup.vllm_config(base)
        kv_cache_config = setup.kv_cache_config()
        self.options = Options(
            save=True,
            priority_limit=None,
            min_retrieve_tokens=0,
            max_tokens_per_load=setup.load_limit,
            checkpoint_tokens=setup.checkpoint,
            chunk_ends=setup.chunk_ends,
            save_decode=setup.save_decode,
            keep_share=KEEP_SHARE,
        )
        block_size, self.hash_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        self.plan: GroupPlan = plan_groups(kv_cache_config, setup.dcp).with_unit(self.hash_size)
        look_ahead = getattr(config, "num_hash_lookahead_tokens", 0)  # since vLLM 0.33
        self._look_ahead = {"num_hash_lookahead_tokens": look_ahead} if look_ahead else {}
        self._hasher = get_request_block_hasher(self.hash_size, sha256_cbor, **self._look_ahead)
        self._make_ranks(pool)
        for rank in self.ranks:
            rank.checkpoint = self._checkpoints(config, kv_cache_config, block_size)
        self.asking = ManualExecutor(at_once=not setup.answers)
        SimConnector.building = self
        from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_connector as vllms

        v2 = str(int(setup.runner != "v1"))
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=v2):
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=structured_output,
                block_size=block_size,
                hash_block_size=self.hash_size,
            )
        assert self.scheduler.use_v2_model_runner == (setup.runner != "v1")
        for rank in self.ranks:
            SimConnector.rank = rank.rank
            ToyRank.running = rank
            own = setup.kv_cache_config(rank.rank)
            rank.connector = vllms.LMCacheConnectorV1(config, KVConnectorRole.WORKER, own)
            rank.order = orders.make_order(setup.runner, rank.connector, config, setup.drafts > 0)
        self.hybrid = self.scheduler.connector.scheduler
        aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, setup.ranks)
        self._depth = config.max_concurrent_batches
        self._queue = Flight(self.ranks, setup.stages, self._truths, aggregator)
        self.sessions = Sessions(self)

    def _checkpoints(self, config, kv_cache_config, block_size: int):
        """(offset, column) of a chunk's checkpoint, as vLLM's backends find them."""
        compute = partial(
            compute_mamba_prefill_checkpoints,
            hash_block_size=self.hash_size,
            mamba_block_size=N,
            checkpoint_alignment=self.setup.interior or None,
            drop_eagle_block=self.setup.drafts > 0
            and config.speculative_config.use_eagle_block_drop()
            and not self._look_ahead,
            **self._look_ahead,
            cache_hit_alignment_tokens=resolve_cache_hit_alignment_tokens(
                kv_cache_config, config, block_size, self.hash_size
            ),
        )

        def checkpoint(end: int, count: int) -> tuple[int, int]:
            (offset,), (column,) = compute([end], [count])
            return offset, column

        return checkpoint if self.setup.interior else lambda end, count: (0, -1)

    def _make_ranks(self, pool: Pool) -> None:
        setup, self.threads = self.setup, Threads(self.setup.seed)
        self.ranks = [
            ToyRank(
                rank,
                setup.blocks,
                N,
                self.plan.attention,
                self.plan.states,
                {window.group: setup.window for window in self.plan.windows},
                self.plan.replicated,
                {group: setup.ring for group, kind in enumerate(setup.groups) if kind == "c"},
                setup.drafts,
                Device(setup.device, self.threads, pool.reuses) if setup.device else None,
                layers=setup.layers(rank),
                wide=setup.wide,
                optimistic=setup.overlap and setup.drafts > 0,
                context=(setup.dcp, rank % setup.dcp, setup.interleave),
            )
            for rank in range(setup.ranks)
        ]
        self.views = [RankView(storage(), rank, setup.ranks) for rank in range(setup.ranks)]
        self.stores = make_stores(self.views, self.plan)
        pool.bound_once()
        for store in self.stores:
            store.damaged, store.pause = pool.damaged, self.threads.pause
        self.lookups = [RankLookup(self.plan, store) for store in self.stores]

    # What a program does to an engine

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        output: int,
        salt: str = "",
        priority: int = 0,
        stops: Sequence[int] = (),
        resumable: bool = False,
        params: dict | None = None,
        reads: bool = True,
    ) -> None:
        """A new request; ``output`` tokens are generated, or those up to one of ``stops``.

        Args:
            params: its ``kv_transfer_params``.
            reads: whether it may hit; False computes every token, as prompt log-probabilities do.
        """
        self._truths[request_id] = Truth(prompt, salt, self.room)
        self.requests[request_id] = request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=output,
                ignore_eos=True,
                stop_token_ids=list(stops),
                extra_args={"kv_transfer_params": params} if params else None,
                skip_reading_prefix_cache=not reads,
            ),
            pooling_params=None,
            cache_salt=salt or None,
            priority=priority,
            block_hasher=self._hasher,
            resumable=resumable,
        )
        self.events["requests that must not read"] += not reads
        self.scheduler.add_request(request)

    @property
    def room(self) -> int:
        """Most tokens of a request, those included that steps ahead compute for nothing."""
        return self.setup.longest + 3 * self.setup.drafts + 3

    @property
    def live(self) -> list[str]:
        return [r for r, request in self.requests.items() if not request.is_finished()]

    def abort(self, request_id: str) -> None:
        self.events["aborted " + self.requests[request_id].status.name] += 1
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, running: bool) -> None:
        """Empty vLLM's own cache; ``running``: preempt for it what runs."""
        while running and self._queue:
            self._finish_step()
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
            self.events["reset"] += 1
        except RuntimeError:
            # vLLM cannot reset beside a request that holds blocks and does not run.
            self.events["reset refused"] += 1

    def clear_store(self) -> None:
        self.scheduler.reset_connector_cache()

    def ask(self, question: LookupRequest) -> list[LookupResult]:
        """The scheduler's question to its ranks."""
        if self.silent == "lost":
            return []
        if self.silent == "late":
            self._late.append(msgspec.structs.replace(question, deadline=0.0))
            return []
        answers = [lookup.answer(question) for lookup in self.lookups]
        for lookup in self.lookups:
            lookup.refresh()  # as the server does once it has sent the answer
        self.events["ranks disagree"] += len({answer.boundary for answer in answers}) > 1
        return [] if self.silent == "unheard" else answers

    def drop(self, request: DropRequest) -> list[DropResult]:
        """The scheduler lets its ranks remove records."""
        if self.silent == "lost":
            return []
        request = msgspec.structs.replace(request, deadline=time.monotonic() + 1000)
        results = []
        for rank, store in zip(self.ranks, self.stores):
            result = rank.connector.worker.drop(request)
            results.append(result)
            self.events["records dropped"] += sum(result.removed.values())
            self.events["drops refused"] += bool(result.refusal)
            if request.block is None or result.refusal or result.waits:
                continue
            for block in range(request.block, result.block):
                keys = block_keys(request.prefix, block, self.plan)
                left = store.locate([key for key in keys if key.boundary > request.start])
                assert not left, f"{left} were dropped and are found"
        return results if not self.silent else []

    def keep(self, request: KeepRequest) -> list[KeepResult]:
        """The scheduler lets its ranks evict records last."""
        if self.silent == "lost":
            return []
        results = [rank.connector.worker.keep(request) for rank in self.ranks]
        self._pool.check_kept(len(self.ranks))
        return results if not self.silent else []

    # One step

    def step(self) -> None:
        """Schedule and execute once; in overlapped mode take up the oldest result."""
        self.steps += 1
        output = self.scheduler.schedule()
        integrity.check(self)
        if self.setup.answers and self.steps % self.setup.answers == 0:
            while self.asking.run():
                self.events["late answers"] += 1
        self._queue.schedule(output)
        while self._late:
            question = self._late.pop()
            assert all(lookup.answer(question).boundary == 0 for lookup in self.lookups)
        self.check_devices()
        if len(self._queue) < self._depth and output.total_num_scheduled_tokens:
            return
        self._finish_step()

    def _finish_step(self) -> None:
        output, result = self._queue.finish()
        for rank in self.ranks:
            rank.await_tokens()
        self.check_devices()
        transfers = result.kv_connector_output
        if transfers is not None:
            failed = transfers.failed_recving or ()
            stopped = sum(self.requests[request_id].is_finished() for request_id in failed)
            self.events["failed loads"] += len(failed) - stopped
            self.events["loads stopped with their requests"] += stopped
            for request_id in transfers.finished_recving or ():
                request = self.requests[request_id]
                self.events["loads"] += 1
                self.events["loads of aborted requests"] += request.is_finished()
                self.events["loads after preemption"] += request.num_preemptions > 0
        self.scheduler.update_from_output(output, result)
        if self.setup.drafts:
            self._draft(output, result)
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            truth = self._truths[request_id].tokens
            assert (
                list(request.output_token_ids)
                == truth[request.num_prompt_tokens : request.num_tokens]
            ), f"{request_id} got other tokens than its prompt has"

    def _draft(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Drafts for the next step, of which the first few are right."""
        ids, drafts = [], []
        for request_id, tokens in zip(result.req_ids, result.sampled_token_ids):
            request = self.requests[request_id]
            ahead = " of steps ahead" if self.setup.overlap else ""
            self.events["accepted drafts" + ahead] += max(0, len(tokens) - 1)
            if not tokens or request.is_finished():
                continue
            ids.append(request_id)
            drafts.append(self._truths[request_id].drafts(request.num_tokens, self.setup.drafts))
        if not self.setup.overlap:  # else they stay with the ranks
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def load(self, rank: int | None = None) -> None:
        """Run the oldest load of one rank, or all loads of all ranks.

        With devices: the oldest of one rank to its end, or those of all ranks for a while.
        """
        held, self.holding = self.holding, False
        for each in self.ranks if rank is None else [self.ranks[rank % len(self.ranks)]]:
            executor = each.connector.worker.loads._executor
            if self.setup.device and rank is None:
                executor.begin()
                continue
            while executor.run() and rank is None:
                pass
        if self.setup.device and rank is None:
            self.threads.advance(self.threads.random.choice(SPANS))
        self.holding = held

    def begin_load(self, rank: int) -> None:
        self.ranks[rank % len(self.ranks)].connector.worker.loads._executor.begin()
        self.threads.advance(self.threads.random.choice(SPANS[:3]))

    def check_devices(self) -> None:
        """Raises what went wrong on a device."""
        for rank in self.ranks:
            if rank.device is not None:
                rank.device.check()

    # The end

    def heal(self) -> None:
        """Switch all faults off."""
        self.silent = ""
        for view, store in zip(self.views, self.stores):
            view.healthy, store.failing, store.full = True, 0, False
        for rank in self.ranks:
            if rank.device is not None:
                rank.device.breaking = 0

    def drain(self) -> None:
        """Run until every request has ended; sessions get no part more.

        Raises:
            Stuck: after PATIENCE steps without one that ends.
        """
        self.sessions.end()
        idle = 0
        while self.scheduler.has_requests() or self._queue:
            if not self.scheduler.has_requests():
                self._finish_step()
                continue
            live = len(self.live)
            self.load()
            self.step()
            idle = 0 if len(self.live) < live else idle + 1
            if idle > PATIENCE:
                raise Stuck(f"{self.live} do not end")
        while self.asking.run():
            pass
        self.step()  # what those left behind is dropped with the next request's step
        while self._queue:
            self._finish_step()
        self.settle()

    def settle(self) -> None:
        """Let threads and devices end what they were given."""
        self.holding = False
        while self.threads.advance(1000):
            pass
        for rank in self.ranks:
            if rank.device is not None:
                rank.device.drain()
        self.check_devices()

    def check_empty(self) -> None:
        """Raises AssertionError when ended requests left something behind."""
        blocks = self.scheduler.kv_cache_manager.block_pool
        assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1, "blocks are leaked"
        assert not self.hybrid._trackers, "requests are still tracked"
        assert not self.hybrid._may_store and not self.hybrid._loads
        assert not any(map(vars(self.hybrid._policy).get, ("_sent", "_computing")))
        assert not self.hybrid._queue.unreleased
        assert not any(store.wronged for store in self.stores), "a good record was rejected"
        broken = sum(rank.device.events["broken copies"] for rank in self.ranks if rank.device)
        counts = [rank.connector.worker.counts for rank in self.ranks]
        errors = sum(each.failed_loads.get("error,none", 0) for each in counts)
        errors += sum(each.skipped_saves.get("error", 0) for each in counts)
        assert errors <= broken, "a load or a save met an error that nobody planted"
        for rank, lookup in zip(self.ranks, self.lookups):
            assert not lookup._claims, f"rank {rank.rank} still holds claims"
            assert not rank.connector.worker.loads._running

    def kill(self) -> None:
        """The process is gone, and its pins with it."""
        self.settle()
        for rank in self.ranks:
            if rank.device is not None:
                rank.device.retire()
        for lookup in self.lookups:
            for request_id in list(lookup._claims):
                lookup.release(request_id)
        for rank in self.ranks:
            for running in rank.connector.worker.loads._running.values():
                if running.claim is not None:
                    running.claim.release()
