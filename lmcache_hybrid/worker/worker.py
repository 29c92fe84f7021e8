# SPDX-License-Identifier: Apache-2.0
"""Worker side: copies between vLLM's pages and the store, on one rank.

Saves are copied, or queued to be copied, inside the step that computed them, because
the next step may overwrite a state in place. Loads run on a thread of their own; their
requests wait outside the running batch until the load is reported.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, WorkerCounts, failure_label
from lmcache_hybrid.core.errors import (
    DamagedError,
    LoadError,
    NoRoomError,
    RecordError,
    UnwantedError,
)
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.core.lmcache_stats import NO_MONITOR, Monitor
from lmcache_hybrid.core.threads import started
from lmcache_hybrid.identity.adapters import ADAPTERS, LoadedAdapters, refuse, report_lost
from lmcache_hybrid.protocol.metadata import ConnectorMetadata, LoadSpec, SaveSpec
from lmcache_hybrid.protocol.prefix import used_keys
from lmcache_hybrid.storage.interface import Claim, Store
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.worker.copies import (
    Item,
    Mark,
    Records,
    Threads,
    copies_for,
    gather_records,
)
from lmcache_hybrid.worker.pages import GroupPages, in_parts

logger = init_logger("vllm.lmcache_hybrid.worker.worker")

# A step without a forward waits this long for a load before it returns to the
# scheduler, instead of spinning through empty steps beside the loading thread.
IDLE_WAIT_SECONDS = 0.005
# Records are read, checked and copied in parts of so many bytes or one record,
# as many parts at once as there are copying threads.
PART_BYTES = 8 << 20

Restore = Callable[[LoadSpec, Claim | None, Mark], int]


class HybridWorker:
    """Copies of one rank.

    Attributes:
        ledger: what is counted, for metrics.
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
        adapters: LoadedAdapters = ADAPTERS,
    ) -> None:
        """Take over a store.

        Args:
            pages: of every group in the plan, by group index.
            device: where the KV cache lies.
            part_bytes: most bytes to read, check and copy at once, one record at least.
            monitor: LMCache's own metrics.
            adapters: what vLLM has loaded on this rank.
        """
        self._plan = plan
        self._pages = pages
        self._store = store
        self._lookup = lookup
        self._part_bytes = part_bytes
        self._threads = Threads("hybrid-restore")
        # Others than those, which may be waiting for a store while a step saves.
        self._savers = Threads("hybrid-save")
        self._copies = copies_for(device, self._savers)
        self._executor = started(1, "hybrid-load")
        # Takes over from a step what a device has not copied yet, in the order of the steps.
        self._finisher = started(1, "hybrid-finish")
        self._loads: dict[str, tuple[Future[str | None], Claim | None, LoadSpec]] = {}
        # Requests that ended while their load runs; vLLM waits for it to give their blocks away.
        self._unwanted: set[str] = set()
        self._warned_save = False
        self._epoch = 0
        # Held while a step's blocks are copied: a reset comes before or after all of them.
        self._saving = threading.Lock()
        # The KV cache has no memory, see suspend().
        self._asleep = False
        self._monitor = monitor
        self._adapters = adapters
        self.ledger = Ledger("worker", WorkerCounts(failed_writes=store.failed_writes))

    @property
    def counts(self) -> WorkerCounts:
        return self.ledger.counts

    # Loading

    def start_loads(self, metadata: ConnectorMetadata) -> None:
        """Queue this step's loads and drop given-up claims. Never blocks on the store."""
        for request_id, number in metadata.dropped:
            self._lookup.drop(request_id, number)
        for load in metadata.loads:
            claim = self._lookup.take(load.request_id)
            after = self._copies.mark()
            restore: Restore = (
                self._restore if self._adapters.holds(load.prefix.adapter) else refuse
            )
            asked = time.perf_counter()
            future = self._executor.submit(self._load, load, claim, after, asked, restore)
            self._loads[load.request_id] = future, claim, load

    def results(self, finished: set[str], idle: bool) -> KVConnectorTransferResults:
        """Loads that ended since the last call; each is reported exactly once.

        Args:
            finished: requests that ended; a load of theirs that did not start is dropped, one
                that runs stops at its next part and counts as failed.
            idle: whether waiting a moment for a load delays nobody.
        """
        results = KVConnectorTransferResults()
        if not self._loads:
            return results
        for request_id in finished & self._loads.keys():
            if not self._loads[request_id][0].cancel():
                self._unwanted.add(request_id)
        if idle:
            futures = [future for future, _, _ in self._loads.values()]
            wait(futures, IDLE_WAIT_SECONDS, FIRST_COMPLETED)
        for request_id in [r for r, (future, _, _) in self._loads.items() if future.done()]:
            future, claim, load = self._loads.pop(request_id)
            self._unwanted.discard(request_id)
            if claim is not None:
                claim.release()  # a cancelled load never ran
            # vLLM keeps the blocks of an aborted request until its load is named.
            results.finished_recving.add(request_id)
            # Cancelled, too: vLLM lets a new request have the ID of one that has just ended.
            failed = future.cancelled() or future.exception() or future.result() is not None
            # vLLM may have evicted the adapter since, and found other files to load anew.
            if not failed and not self._adapters.holds(load.prefix.adapter):
                report_lost(self.ledger, request_id)
                failed = True
            if failed:
                results.failed_recving.add(request_id)
        return results

    def _load(
        self, load: LoadSpec, claim: Claim | None, after: Mark, asked: float, restore: Restore
    ) -> str | None:
        """Restore one request's blocks; returns why it failed, None on success."""
        started = time.perf_counter()
        tokens = (load.boundary - load.start) * self._plan.block_size
        try:
            size = restore(load, claim, after)
        except UnwantedError as error:
            return str(error)
        except Exception as error:
            expected = isinstance(error, (LoadError, RecordError))
            with self.ledger as counts:
                counts.failed_loads[failure_label(error)] += 1
            self._monitor.retrieved(tokens, 0, started)
            reason = str(error) if expected else repr(error)
            logger.warning(
                "Reqid: %s, loading %d tokens failed and they are computed instead: %s",
                load.request_id,
                tokens,
                reason,
                exc_info=not expected,
            )
            return reason
        finally:
            if claim is not None:
                claim.release()
        seconds = time.perf_counter() - started
        with self.ledger as counts:
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
            load.boundary * self._plan.block_size,
            " and the state there" if self._plan.states else "",
            size / 1e9,
            seconds * 1e3,
            size / 1e9 / seconds,
        )
        return None

    def _restore(self, load: LoadSpec, claim: Claim | None, after: Mark) -> int:
        """Copy all records of a load into the cache; returns the bytes copied."""
        if claim is None:
            raise LoadError("its records are no longer pinned", "unpinned")
        targets = self._targets(load)
        size = sum(self._pages[key.group].block_bytes for key, _ in targets)
        crowded_out: list[list[tuple[RecordKey, int]]] = []

        def restore(part: list[tuple[RecordKey, int]]) -> None:
            self._check_wanted(load)
            try:
                self._restore_part(claim, part, after)
            except NoRoomError:
                crowded_out.append(part)

        self._threads.each(restore, list(in_parts(targets, self._pages, self._part_bytes)), size)
        # The parts beside them may have held the room that they lacked.
        for part in crowded_out:
            self._check_wanted(load)
            self._restore_part(claim, part, after)
        return size

    def _check_wanted(self, load: LoadSpec) -> None:
        """Raises UnwantedError when its request has ended, LoadError when vLLM falls asleep."""
        if load.request_id in self._unwanted:
            raise UnwantedError("its request has ended", "unwanted")
        if self._asleep:
            raise LoadError("vLLM has put the engine to sleep", "asleep")

    def _targets(self, load: LoadSpec) -> list[tuple[RecordKey, int]]:
        """(record, block id) of everything the load writes, in blocks that exist."""
        targets = load.pages(self._plan)
        for key, block in targets:
            if not 0 < block < self._pages[key.group].num_blocks:
                raise LoadError(f"vLLM gave block {block} for {key.label} at {key.boundary}")
        return targets

    def _restore_part(
        self, claim: Claim, part: Sequence[tuple[RecordKey, int]], after: Mark
    ) -> None:
        items = []
        with ExitStack() as stack:
            buffers = self._store.fetch(claim, [key for key, _ in part])
            for buffer in buffers:
                stack.callback(buffer.release)
            for (key, block), buffer in zip(part, buffers, strict=True):
                pages, size = self._pages[key.group], buffer.payload.numel()
                if size != pages.block_bytes:
                    # Kept, it would be promised and fail again for every later request.
                    self._store.discard(key)
                    raise LoadError(f"record {key.label} has {size} bytes", "length", key)
                items.append(Item(key, pages, block, buffer))
            try:
                self._copies.scatter(items, after)
            except DamagedError as error:
                self._store.discard(error.key)
                raise
            self._store.keep(claim, [(item.key, item.buffer) for item in items])

    # Saving

    def save(self, metadata: ConnectorMetadata) -> None:
        """Store this step's blocks. Never raises: a lost save is only a later miss."""
        if not metadata.saves:
            return
        started = time.perf_counter()
        # A collective call, so before anything that one rank may decide by itself.
        held = self._adapters.all_hold([save.prefix.adapter for save in metadata.saves])
        if not self._store.writable():
            reason = "frozen" if self._store.readable() else "unhealthy"
            self._skip(reason, len(metadata.saves))
            return
        with self._saving:
            if metadata.epoch != self._epoch:
                self._skip("reset", len(metadata.saves))
                return
            if self._asleep:
                self._skip("asleep", len(metadata.saves))
                return
            for save, named in zip(metadata.saves, held, strict=True):
                if not named:
                    self._skip("adapter", 1)
                    continue
                with self._save_errors(save):
                    self._save(save)
        # Whatever a device still copies, and failed saves, too: the step goes on from here.
        with self.ledger as counts:
            counts.save_seconds.append(time.perf_counter() - started)

    def _skip(self, reason: str, saves: int) -> None:
        with self.ledger as counts:
            counts.skipped_saves[reason] += saves

    @contextmanager
    def _save_errors(self, save: SaveSpec) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with self.ledger as counts:
                full = isinstance(error, MemoryError)
                counts.skipped_saves["no_room" if full else "error"] += 1
                warned, self._warned_save = self._warned_save, True
            if not warned:
                logger.warning(
                    "Reqid: %s, storing failed; later failures are counted only: %r",
                    save.request_id,
                    error,
                )

    def _save(self, save: SaveSpec) -> None:
        started = time.perf_counter()
        pages = save.pages(self._plan)
        records, rest = gather_records(self._copies, self._store, self._pages, pages)
        if rest is None:
            self._put(save, records, started)
        else:
            self._finisher.submit(self._finish, save, records, rest, started)

    def _finish(
        self, save: SaveSpec, records: Records, rest: Callable[[], None], started: float
    ) -> None:
        with self._save_errors(save):
            try:
                rest()
            except BaseException:
                for _, buffer in records:
                    buffer.release()
                raise
            self._put(save, records, started)

    def _put(self, save: SaveSpec, records: Records, started: float) -> None:
        size = sum(self._pages[key.group].block_bytes for key, _ in records)
        self._store.put(records)
        if save.boundaries:
            # As they were written, the first pages would be evicted first.
            self._store.arrange(used_keys(save.prefix, save.boundaries, self._plan))
        seconds = time.perf_counter() - started
        with self.ledger as counts:
            save.count(counts, size)
        self._monitor.stored(len(save.attention) * self._plan.block_size, started)
        logger.debug(
            "Reqid: %s, Stored %d blocks and %d states. size: %.4f GB, cost: %.4f ms",
            save.request_id,
            len(save.attention),
            len(save.states),
            size / 1e9,
            seconds * 1e3,
        )

    def reset(self, epoch: int) -> None:
        """Clear the store, in-flight saves included. Thread-safe.

        Args:
            epoch: of the steps whose blocks are stored from now on.
        """
        with self._saving:
            self._epoch = epoch
        self._adapters.forget()
        self._finisher.submit(self._store.clear).result()

    # Sleep

    def suspend(self) -> None:
        """End all copies and let go of the KV cache, whose memory vLLM is about to free.

        Called by the thread that runs the model, between two steps. Until :meth:`resume`
        loads fail and saves are skipped. Loads under way stop at their next part and are
        reported as failed; saves of steps before are finished. Idempotent.
        """
        with self._saving:
            self._asleep = True
        running = [future for future, _, _ in self._loads.values() if not future.cancel()]
        for future in running:
            with suppress(Exception):  # results() sees to it
                future.result()
        self._finisher.submit(int).result()
        for pages in self._pages.values():
            pages.unmap()

    def resume(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map the KV cache anew, whose memory vLLM has allocated again. Idempotent.

        Raises:
            ConfigError: its layout is another one; then nothing is loaded and saved.
        """
        for pages in self._pages.values():
            pages.map(kv_caches)
        self._asleep = False

    def shutdown(self) -> None:
        """End the threads; loads that did not start are dropped, saves are finished."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._finisher.shutdown(wait=True)
        self._threads.close()
        self._savers.close()
