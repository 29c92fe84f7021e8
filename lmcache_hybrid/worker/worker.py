# SPDX-License-Identifier: Apache-2.0
"""Worker side of one rank: runs loads and saves for the connector's calls."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.lmcache_stats import NO_MONITOR, Monitor
from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.failed_loads import SlowLoads
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.protocol.record_reports import RankReport
from lmcache_hybrid.storage.drops import drop
from lmcache_hybrid.storage.keeps import keep
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.storage.residency import Residency
from lmcache_hybrid.storage.store import Claim, Store
from lmcache_hybrid.worker.copy_threads import CopyThreads
from lmcache_hybrid.worker.loads import PART_BYTES, LoadQueue
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.saver import Saver
from lmcache_hybrid.worker.streams import copies_for


class HybridWorker:
    """Loads and saves of one rank. Called by the thread that runs the model.

    :meth:`reset`, :meth:`drop` and :meth:`keep` are called by the one that answers lookups.

    Attributes:
        plan, pages, store: as given.
        ledger: counts, for metrics.
        loads, saves: those in flight.
    """

    def __init__(
        self,
        plan: GroupPlan,
        pages: Mapping[int, GroupPages],
        store: Store,
        lookup: RankLookup,
        device: torch.device,
        part_bytes: int = PART_BYTES,
        monitor: Monitor = NO_MONITOR,
        residency: Residency | None = None,
    ) -> None:
        """Take over a store.

        Args:
            pages: of every group in the plan, by group index.
            device: where the KV cache lies.
            part_bytes: max bytes to read, check and copy at once, one record at least.
            monitor: LMCache's own metrics.
            residency: of the store, where KV cache events are published. Taken over.
        """
        self.plan, self.pages, self.store = plan, pages, store
        self._lookup, self._residency = lookup, residency
        self.ledger = Ledger(
            "worker",
            WorkerCounts(failed_writes=store.failed_writes, rewritten_bytes=store.rewritten_bytes),
        )
        ADAPTERS.ledger = self.ledger
        # Not the threads of loads, which may be waiting for a store while a step saves.
        self._threads = CopyThreads("hybrid-save")
        copies = copies_for(device, self._threads)
        self.loads = LoadQueue(
            plan, pages, store, copies, self.ledger, monitor, ADAPTERS, part_bytes
        )
        with ExitStack() as on_error:
            on_error.callback(self.loads.close)
            self.saves = Saver(plan, pages, store, copies, self.ledger, monitor, ADAPTERS)
            on_error.pop_all()

    @property
    def counts(self) -> WorkerCounts:
        return self.ledger.counts

    def start_loads(self, metadata: ConnectorMetadata) -> None:
        """Drop cancelled claims and queue this step's loads. Never blocks on the store.

        Each load that cannot be queued is reported as failed.
        """
        if metadata.step:
            self.saves.begin(metadata.step)
        for request_id, number in metadata.released:
            try:
                self._lookup.release(request_id, number)
            except Exception as error:
                caught("give_up_claim", error, "its records may stay pinned", self.ledger)
        for request_id in metadata.unloadable:
            self._give_back(self._lookup.take_claim(request_id))
        for load in metadata.loads:
            claim = self._lookup.take_claim(load.request_id)
            try:
                self.loads.start(load, claim)
            except Exception as error:
                caught("start_load", error, "its prompt is computed", self.ledger)
                self._give_back(claim)
                self.loads.refuse(load)

    def _give_back(self, claim: Claim | None) -> None:
        try:
            if claim is not None:
                claim.release()
        except Exception as error:
            caught("release_claim", error, "its records may stay pinned", self.ledger)

    def refuse_loads(self, metadata: ConnectorMetadata) -> None:
        """Report the step's loads that were not queued as failed."""
        for load in metadata.loads:
            self._give_back(self._lookup.take_claim(load.request_id))
            self.loads.refuse(load)

    def results(self, finished: set[str], waits: bool) -> KVConnectorTransferResults:
        """Return the loads that ended, see :meth:`.loads.LoadQueue.results`."""
        return self.loads.results(finished, waits)

    def fail(self, results: KVConnectorTransferResults) -> None:
        """Turn the loads of the last :meth:`results` into failures: the weights have changed."""
        results.failed_recving.update(results.finished_recving)
        self.loads.failed = dict.fromkeys(results.finished_recving)

    def failed_loads(self) -> SlowLoads | None:
        """Return the failures among the loads of the last :meth:`results`; None for none."""
        return SlowLoads(self.loads.failed) if self.loads.failed else None

    def save(self, metadata: ConnectorMetadata) -> None:
        """Store this step's blocks, see :meth:`.saver.Saver.save`."""
        self.saves.save(metadata)

    def skip_saves(self, metadata: ConnectorMetadata) -> None:
        """Count a step's saves as skipped."""
        if metadata.saves:
            with self.ledger as counts:
                counts.skipped_saves["error"] += len(metadata.saves)

    def report(self, serving: Callable[[], bool]) -> RankReport | None:
        """Report what the store has gained and lost, for events; None for nothing.

        Args:
            serving: tells whether the fingerprint still names the running weights.
        """
        if self._residency is None:
            return None
        return self._residency.report(serving() and self.store.readable(), self.saves.unfinished)

    def reset(self, epoch: int) -> None:
        """Clear the store, in-flight saves included. Thread-safe.

        Args:
            epoch: of the steps whose blocks are stored from now on.
        """
        self.saves.reset(epoch)
        if self._residency is not None:
            self._residency.clear(epoch)

    def drop(self, request: DropRequest) -> DropResult:
        """Remove records of a prompt, see :func:`.drops.drop`. Thread-safe."""
        if not self.saves.stored_before(request.step, request.deadline - time.monotonic()):
            return DropResult(request.block or 0, waits=True)
        result = drop(self.plan, self.store, request)
        with self.ledger as counts:
            counts.dropped_records.update(result.removed)
        return result

    def keep(self, request: KeepRequest) -> KeepResult:
        """Let records of a prompt be evicted last, see :func:`.keeps.keep`. Thread-safe."""
        sizes = {group: record_bytes(pages.block_bytes) for group, pages in self.pages.items()}
        return keep(self.plan, self.store, sizes, request)

    def count_kept(self) -> None:
        """Bring the gauge of kept bytes up to date."""
        kept = Counter({name: names.size for name, names in self.store.kept.items()})
        if kept != self.counts.kept_bytes:
            with self.ledger as counts:
                for name, size in kept.items():
                    counts.kept_bytes[name] = size

    def suspend(self) -> None:
        """End all copies and stop using the KV cache: vLLM is about to free its memory.

        Called between two steps. Until :meth:`resume` loads fail and saves are skipped. Loads
        under way stop at their next part and are reported as failed; saves of earlier steps
        are finished. Idempotent.
        """
        self.loads.suspend()
        self.saves.suspend()
        self.unmap()

    def unmap(self) -> None:
        """Release the KV cache: all copies fail from now on."""
        for pages in self.pages.values():
            pages.unmap()

    def resume(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map the KV cache again, whose memory vLLM has reallocated. Idempotent.

        Raises:
            ConfigError: its layout has changed; then nothing is loaded or saved.
        """
        for pages in self.pages.values():
            pages.map(kv_caches)
        self.loads.resume()
        self.saves.resume()

    def shutdown(self) -> None:
        """End the threads; loads that did not start are dropped, saves are finished."""
        self.loads.close()
        self.saves.close()
        if self._residency is not None:
            self._residency.close()
        self.store.close()
        self._threads.close()

    def check_integrity(self) -> None:
        """Assert what holds between two steps."""
        self.loads.check_integrity()
