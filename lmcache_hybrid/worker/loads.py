# SPDX-License-Identifier: Apache-2.0
"""Loads records of one rank from the store into vLLM's blocks, off the model's thread.

Their requests wait outside the running batch until the load is reported.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, WorkerCounts, failure_label
from lmcache_hybrid.core.errors import (
    DamagedError,
    LoadError,
    NoRoomError,
    RecordError,
    SlowError,
    UnwantedError,
)
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import Block, GroupPlan
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.core.late_loads import Pace
from lmcache_hybrid.core.lmcache_stats import Monitor
from lmcache_hybrid.core.threads import started
from lmcache_hybrid.identity.adapters import LoadedAdapters, report_lost
from lmcache_hybrid.protocol.metadata import LoadSpec
from lmcache_hybrid.storage.store import Claim, Store
from lmcache_hybrid.worker.copies import Copies, CopyJob, StreamEvent
from lmcache_hybrid.worker.copy_threads import CopyThreads
from lmcache_hybrid.worker.pages import GroupPages, in_parts

logger = init_logger("vllm.lmcache_hybrid.worker.loads")

# Max seconds that a step without a forward waits for a load; empty steps would take the GIL from
# the loading thread.
IDLE_WAIT_SECONDS = 0.005
# Bytes to read, check and copy at once, one record at least; each copying thread takes one part
# at a time.
PART_BYTES = 8 << 20
# Max factor on the parts of a long load, and its min number of parts. Each part takes the GIL a
# dozen times, some 75 us each beside three other threads on an H100's host.
LARGER, FEWEST = 4, 8

# Whether every byte of a load is in place; SlowError.seconds of one that was given up, else None.
TransferResult = tuple[bool, float | None]


@dataclass(frozen=True)
class _Running:
    """A load not reported yet. It owns ``claim`` until it ends or is cancelled."""

    load: LoadSpec
    claim: Claim | None
    future: Future[TransferResult]


class LoadQueue:
    """Runs the loads of one rank, one after the other.

    All methods are called by the thread that runs the model. A load runs on a thread of its
    own and copies its parts on several.

    Attributes:
        failed: failures among the loads that :meth:`results` returned last, see
            :attr:`.SlowLoads.seconds`.
    """

    def __init__(
        self,
        plan: GroupPlan,
        pages: Mapping[int, GroupPages],
        store: Store,
        copies: Copies,
        ledger: Ledger[WorkerCounts],
        monitor: Monitor,
        adapters: LoadedAdapters,
        part_bytes: int,
    ) -> None:
        """Start the threads. For the arguments see :class:`.worker.HybridWorker`."""
        self._plan, self._pages, self._store = plan, pages, store
        self._copies, self._ledger, self._monitor = copies, ledger, monitor
        self._adapters, self._part_bytes = adapters, part_bytes
        self._threads = CopyThreads("hybrid-restore")
        self._executor = started(1, "hybrid-load")
        self._running: dict[str, _Running] = {}
        # Requests that ended during their load: vLLM keeps their blocks until it is reported.
        self._unwanted: set[str] = set()
        # The KV cache has no memory, see suspend().
        self._asleep = False
        self.failed: dict[str, float | None] = {}

    def __len__(self) -> int:
        """Return the number of loads not reported yet."""
        return len(self._running)

    def start(self, load: LoadSpec, claim: Claim | None) -> None:
        """Queue a load, which takes over the claim. Never blocks on the store."""
        after = self._copies.mark()
        future = self._executor.submit(self._load, load, claim, after, time.perf_counter())
        self._running[load.request_id] = _Running(load, claim, future)

    def refuse(self, load: LoadSpec) -> None:
        """Report a load as failed, unless it was queued. The caller keeps its claim."""
        if load.request_id in self._running:
            return
        future: Future[TransferResult] = Future()
        future.set_result((False, None))
        self._running[load.request_id] = _Running(load, None, future)
        with self._ledger as counts:
            counts.failed_loads["error,none"] += 1

    def results(self, finished: set[str], waits: bool) -> KVConnectorTransferResults:
        """Return the loads that ended since the last call; each is reported exactly once.

        Args:
            finished: requests that ended. Their queued loads are dropped; one that runs stops
                at its next part and counts as failed.
            waits: whether it may wait for a load, up to IDLE_WAIT_SECONDS.
        """
        results = KVConnectorTransferResults()
        self.failed = {}
        if not self._running:
            return results
        for request_id in finished & self._running.keys():
            if not self._running[request_id].future.cancel():
                self._unwanted.add(request_id)
        if waits:
            futures = [load.future for load in self._running.values()]
            wait(futures, IDLE_WAIT_SECONDS, FIRST_COMPLETED)
        for request_id in [r for r, each in self._running.items() if each.future.done()]:
            running = self._running.pop(request_id)
            self._unwanted.discard(request_id)
            # vLLM keeps the blocks of an aborted request until its load is named.
            results.finished_recving.add(request_id)
            try:
                if running.claim is not None:
                    running.claim.release()  # a cancelled load never ran
                ok, slow = self._ended(running)
            except Exception as error:
                caught("end_load", error, "its prompt is computed", self._ledger)
                ok, slow = False, None
            if not ok:
                results.failed_recving.add(request_id)
                self.failed[request_id] = slow
        return results

    def _ended(self, running: _Running) -> TransferResult:
        """Return the result of a load that has ended; not ok where its blocks must not be used."""
        future, load = running.future, running.load
        # A cancelled load counts as failed: vLLM may give its ID to a new request at once.
        if future.cancelled() or future.exception():
            return False, None
        ok, slow = future.result()
        # vLLM may have evicted the adapter since and loaded it anew from other files.
        if ok and not self._adapters.holds(load.prefix.adapter):
            report_lost(self._ledger, load.request_id)
            return False, None
        return ok, slow

    def _load(
        self,
        load: LoadSpec,
        claim: Claim | None,
        after: StreamEvent,
        asked: float,
    ) -> TransferResult:
        """Restore one request's blocks. Runs on the load thread, which releases the claim."""
        started = time.perf_counter()
        tokens = load.end(self._plan) - load.start * self._plan.block_size
        try:
            self._check_adapter(load)
            size = self._restore(load, claim, after)
            self._check_adapter(load)  # others' may have taken its place among those that wait
        except UnwantedError:
            return False, None
        except Exception as error:
            expected = isinstance(error, (LoadError, RecordError))
            label = failure_label(error)
            with self._ledger as counts:
                counts.failed_loads[label] += 1
            self._monitor.retrieved(tokens, 0, started)
            logger.log(
                # The load policy tries slow stores again and again.
                logging.DEBUG if label == "slow,none" else logging.WARNING,
                "Reqid: %s, loading %d tokens failed and they are computed instead: %s",
                load.request_id,
                tokens,
                str(error) if expected else repr(error),
                exc_info=not expected,
            )
            return False, error.seconds if isinstance(error, SlowError) else None
        finally:
            if claim is not None:
                claim.release()
        seconds = time.perf_counter() - started
        with self._ledger as counts:
            load.count(counts, size)
            counts.load_seconds.append(seconds)
            counts.load_wait_seconds.append(started - asked)
        self._monitor.retrieved(tokens, tokens, started)
        # The scheduler has logged this request's hit; each rank would repeat it.
        logger.debug(
            "Reqid: %s, Retrieved %d tokens up to %d%s. size: %.4f GB, cost: %.4f ms, "
            "throughput: %.4f GB/s",
            load.request_id,
            tokens,
            load.end(self._plan),
            " and the state there" if self._plan.states else "",
            size / 1e9,
            seconds * 1e3,
            size / 1e9 / seconds,
        )
        return True, None

    def _restore(self, load: LoadSpec, claim: Claim | None, after: StreamEvent) -> int:
        """Copy all records of a load into the KV cache; return the bytes copied."""
        if claim is None:
            raise LoadError("its records are no longer pinned", "unpinned")
        targets = self._targets(load)
        size = sum(self._pages[key.group].block_bytes for key, _ in targets)
        crowded_out: list[list[tuple[RecordKey, Block]]] = []
        pace = Pace(load.deadline, size)

        def restore(part: list[tuple[RecordKey, Block]]) -> None:
            self._check_wanted(load)
            pace.check()
            try:
                self._restore_part(claim, part, after, pace)
            except NoRoomError:
                crowded_out.append(part)

        # A load with a deadline is a trial: it checks its pace before each record.
        most = self._part_bytes if load.deadline == math.inf else 1
        larger = max(most, min(size // FEWEST, LARGER * most))
        self._threads.each(restore, list(in_parts(targets, self._pages, larger)), size)
        # Retry alone, record by record: other parts may have held the memory that these needed.
        for part in crowded_out:
            for piece in in_parts(part, self._pages, 1):
                self._check_wanted(load)
                pace.check()
                self._restore_part(claim, piece, after, pace)
        return size

    def _check_adapter(self, load: LoadSpec) -> None:
        """Raise LoadError if vLLM would compute with another content than the records'."""
        if not self._adapters.holds(load.prefix.adapter, reads=True):
            raise LoadError("its LoRA adapter was loaded anew with another content", "adapter")

    def _check_wanted(self, load: LoadSpec) -> None:
        """Raise UnwantedError if its request has ended, LoadError if vLLM is asleep."""
        if load.request_id in self._unwanted:
            raise UnwantedError("its request has ended", "unwanted")
        if self._asleep:
            raise LoadError("vLLM has put the engine to sleep", "asleep")

    def _targets(self, load: LoadSpec) -> list[tuple[RecordKey, Block]]:
        """Pair every record of the load with the block id that it goes to.

        Raises:
            LoadError: vLLM has no such block.
        """
        targets = load.pages(self._plan)
        for key, block in targets:
            if not self._pages[key.group].takes(block):
                raise LoadError(f"vLLM gave block {block} for {key.label} at {key.boundary}")
        return targets

    def _restore_part(
        self, claim: Claim, part: Sequence[tuple[RecordKey, Block]], after: StreamEvent, pace: Pace
    ) -> None:
        """Read, check and copy records; a damaged one is removed from the store."""
        items = []
        with ExitStack() as stack:
            with pace.reading(sum(self._pages[key.group].block_bytes for key, _ in part)):
                buffers = self._store.fetch(claim, [key for key, _ in part])
            for buffer in buffers:
                stack.callback(buffer.release)
            for (key, block), buffer in zip(part, buffers, strict=True):
                pages, size = self._pages[key.group], buffer.payload.numel()
                if size != pages.block_bytes:
                    # Kept, it would be promised to every later request and fail.
                    self._store.discard(key, claim)
                    raise LoadError(f"record {key.label} has {size} bytes", "length", key)
                items.append(CopyJob(key, pages, block, buffer))
            try:
                self._copies.scatter(items, after)
            except DamagedError as error:
                self._store.discard(error.key, claim)
                raise
            self._store.keep(claim, [(item.key, item.buffer) for item in items])

    def suspend(self) -> None:
        """Fail all loads, later ones included, and wait until none copies. Idempotent."""
        self._asleep = True
        futures = [load.future for load in self._running.values()]
        for future in [future for future in futures if not future.cancel()]:
            with suppress(Exception):  # results() reports it
                future.result()

    def resume(self) -> None:
        """Load again."""
        self._asleep = False

    def close(self) -> None:
        """End the threads; loads that did not start are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._threads.close()

    def check_integrity(self) -> None:
        """Assert what holds between two steps."""
        assert self._unwanted <= self._running.keys(), "an ended load is still stopped"
        for request_id, running in self._running.items():
            assert running.load.request_id == request_id
