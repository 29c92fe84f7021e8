# SPDX-License-Identifier: Apache-2.0
"""Saves vLLM's blocks of one rank into the store.

They are copied, or their copies queued, inside the step that computed them, because the next step
may overwrite a state in place.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import STATE
from lmcache_hybrid.core.lmcache_stats import Monitor
from lmcache_hybrid.core.threads import started as started_thread
from lmcache_hybrid.identity.adapters import LoadedAdapters
from lmcache_hybrid.protocol.hit_records import used_keys
from lmcache_hybrid.protocol.metadata import ConnectorMetadata, SaveSpec
from lmcache_hybrid.storage.store import Store
from lmcache_hybrid.worker.copies import Copies, Records, gather_records
from lmcache_hybrid.worker.pages import GroupPages

logger = init_logger("vllm.lmcache_hybrid.worker.saver")


class Saver:
    """Stores the blocks of one rank.

    The thread that runs the model saves and suspends; the one that answers lookups resets.
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
    ) -> None:
        """Start the thread. For the arguments see :class:`.worker.HybridWorker`."""
        self._plan, self._pages, self._store = plan, pages, store
        self._copies, self._ledger, self._monitor = copies, ledger, monitor
        self._adapters = adapters
        # Completes device copies that outlast their step, in the order of the steps.
        self._finisher = started_thread(1, "hybrid-finish")
        # Kinds of failure already logged: out of memory (True), other errors (False).
        self._warned: set[bool] = set()
        # Saves handed to that thread, and those that it has finished.
        self._queued = self._ended = 0
        self._epoch = 0
        # Held while a step's blocks are copied: a reset comes before or after all of them.
        self._saving = threading.Lock()
        # The KV cache has no memory, see suspend().
        self._asleep = False
        self._step = 0

    def begin(self, step: int) -> None:
        """Note that a step has begun: those before it have saved.

        Args:
            step: see :attr:`.ConnectorMetadata.step`.
        """
        self._step = step

    def stored_before(self, step: int, seconds: float) -> bool:
        """Whether all saves of steps before ``step`` are with the store. Any thread may call it.

        Args:
            seconds: max time to wait for copies that are still in flight.
        """
        if self._step < step:
            return False
        try:
            self._finisher.submit(int).result(seconds)
        except TimeoutError:
            return False
        return True

    def save(self, metadata: ConnectorMetadata) -> None:
        """Copy this step's blocks, or queue their copies. Never raises: a lost save is a miss."""
        if not metadata.saves:
            return
        started = time.perf_counter()
        # All ranks take part, so it comes before anything that one rank decides alone.
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
        # Excludes copies that a device still makes; includes failed saves.
        with self._ledger as counts:
            counts.save_seconds.append(time.perf_counter() - started)

    def _skip(self, reason: str, saves: int) -> None:
        with self._ledger as counts:
            counts.skipped_saves[reason] += saves

    @contextmanager
    def _save_errors(self, save: SaveSpec) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            full = isinstance(error, MemoryError)
            with self._ledger as counts:
                counts.skipped_saves["no_room" if full else "error"] += 1
                warned = full in self._warned
                self._warned.add(full)
            if not warned:
                logger.warning(
                    "Reqid: %s, storing failed, so later requests compute what is missing; further "
                    "failures are only counted (vllm:lmcache_hybrid_skipped_saves_total): %r",
                    save.request_id,
                    error,
                    exc_info=None if full else error,
                )

    def _save(self, save: SaveSpec) -> None:
        started = time.perf_counter()
        pages = save.pages(self._plan)
        records, rest = gather_records(self._copies, self._store, self._pages, pages)
        if rest is None:
            self._put(save, records, started)
        else:
            self._queued += 1
            self._finisher.submit(self._finish, save, records, rest, started)

    def _finish(
        self, save: SaveSpec, records: Records, rest: Callable[[], None], started: float
    ) -> None:
        """Complete a device copy that is still in flight. Runs on the finishing thread."""
        try:
            with self._save_errors(save):
                try:
                    rest()
                except BaseException:
                    for _, buffer in records:
                        buffer.release()
                    raise
                self._put(save, records, started)
        finally:
            self._ended += 1

    @property
    def unfinished(self) -> bool:
        """Whether device copies of saves are still in flight."""
        return self._ended < self._queued

    def _put(self, save: SaveSpec, records: Records, started: float) -> None:
        """Hand copied records to the store, which takes over their buffers."""
        size = sum(self._pages[key.group].block_bytes for key, _ in records)
        self._store.put(records)
        # In write order the first pages of a prefix would be evicted first.
        used = used_keys(save.prefix, save.boundaries, self._plan, save.inner)
        lasting = set(used)
        # States at chunk ends or every T tokens: a later prompt may branch there, or none ever.
        passing = [key for key, _ in records if key.kind == STATE and key not in lasting]
        if used or passing:
            self._store.arrange(used, passing, save.request_id)
        seconds = time.perf_counter() - started
        with self._ledger as counts:
            save.count(counts, size)
        self._monitor.stored(len(save.attention) * self._plan.block_size, started)
        logger.debug(
            "Reqid: %s, Stored %d blocks and %d states. size: %.4f GB, cost: %.4f ms",
            save.request_id,
            len(save.attention),
            len(save.states) + len(save.tails),
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
        self._finisher.submit(self._store.clear, epoch).result()

    def suspend(self) -> None:
        """Skip saves from now on, and wait until earlier ones are copied. Idempotent."""
        with self._saving:
            self._asleep = True
        self._finisher.submit(int).result()

    def resume(self) -> None:
        """Save again."""
        self._asleep = False

    def close(self) -> None:
        """Finish all saves and end the thread."""
        self._finisher.shutdown(wait=True)
