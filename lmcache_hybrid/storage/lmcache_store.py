# SPDX-License-Identifier: Apache-2.0
"""Records in LMCache's StorageManager: RAM, local disk, ``fs://``, Redis, S3.

LMCache's ``store`` and ``retrieve`` handle attention slots only, so records go to its storage
backends directly. This module honours the same settings: health, freeze mode,
``store_location``, ``retrieve_locations``, pins.
"""

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from vllm.logger import init_logger

from lmcache_hybrid.core.digests import PLAIN, Digester
from lmcache_hybrid.core.errors import (
    DamagedError,
    LoadError,
    NoRoomError,
    RecordError,
    RemovalError,
)
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage import tier_lookup
from lmcache_hybrid.storage.buffer import LMCacheBuffer, record_shape
from lmcache_hybrid.storage.claims import LMCacheClaim
from lmcache_hybrid.storage.hidden_records import DamagedRecords
from lmcache_hybrid.storage.keep_shares import KeptNames
from lmcache_hybrid.storage.read_reservation import ReadReservation
from lmcache_hybrid.storage.record_format import open_record, record_bytes, seal
from lmcache_hybrid.storage.record_names import RecordNames, Replicas
from lmcache_hybrid.storage.residency import Residency
from lmcache_hybrid.storage.silent_lookups import SilentStores
from lmcache_hybrid.storage.tiers import open_tiers
from lmcache_hybrid.storage.tiers.base import Opening, StorageTier

if TYPE_CHECKING:
    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine

logger = init_logger("vllm.lmcache_hybrid.storage.lmcache_store")


class LMCacheStore:
    """Records of one rank in the backends that LMCache's configuration names.

    Any thread may call it; :meth:`locate` only the lookup thread.

    Attributes:
        tiers: the backends by name, the nearest first.
        reads: records read, by backend.
        failed_writes: records that a backend accepted and could not write, by backend.
        rewritten_bytes: of records that were put although a backend held them, by backend.
        kept: records that are evicted last, by each backend that this package makes evict so.
    """

    def __init__(
        self,
        engine: "LMCacheEngine",
        model_name: str,
        fingerprint: bytes,
        max_payload: int,
        digester: Digester = PLAIN,
        replicas: Replicas | None = None,
        residency: Residency | None = None,
        visit: bool = False,
    ) -> None:
        """Wrap an engine after its ``post_init``.

        Args:
            engine: LMCache's engine of this worker.
            model_name: readable part of the keys; the fingerprint makes them exact.
            fingerprint: 16 bytes naming model, layout and rank.
            max_payload: bytes of the largest record's payload.
            digester: keyed where others can write to a backend.
            replicas: groups that other ranks also hold; None where there are none.
            residency: follows all records, where KV cache events are published.
            visit: whether the backends are only tried, by the doctor.
        """
        self._engine = engine
        self.manager = engine.storage_manager
        self._digester = digester
        self._names = RecordNames(model_name, engine.metadata, fingerprint, replicas)
        self.engine_key = self._names.engine_key
        self._residency = residency
        self.reads: Counter[str] = Counter()
        self.failed_writes: Counter[str] = Counter()
        self.rewritten_bytes: Counter[str] = Counter()
        self._cleared = -math.inf  # time.monotonic of the last reset
        self.tiers: dict[str, StorageTier] = {}
        self._damaged = DamagedRecords(self.manager.storage_backends, self.tiers, residency)
        self._silent = SilentStores()
        self._claims: list[LMCacheClaim] = []
        self._claims_lock = threading.Lock()
        self._counts_lock = threading.Lock()
        self._reservation = ReadReservation(
            self.manager.local_cpu_backend, record_bytes(max_payload)
        )
        opening = Opening(
            engine.config,
            engine.metadata,
            model_name,
            self._names,
            self._count_failed_writes,
            self._count_rewritten,
            self._damaged.written,
            residency.restored if residency is not None else lambda key, header: None,
            visit,
        )
        self.tiers.update(open_tiers(self.manager, opening))
        self.kept: Mapping[str, KeptNames] = {
            name: tier.kept for name, tier in self.tiers.items() if tier.kept is not None
        }
        if residency is not None:
            for name, tier in self.tiers.items():
                if name in (engine.retrieve_locations or (name,)):
                    tier.observe(residency)

    @property
    def fingerprint(self) -> bytes:
        return self._names.fingerprint

    def readable(self) -> bool:
        return self._engine.is_healthy()

    def writable(self) -> bool:
        return self._engine.is_healthy() and not self._engine.is_frozen()

    # Reading

    def locate(self, keys: Sequence[RecordKey], deadline: float = math.inf) -> dict[RecordKey, str]:
        engine_keys = [self.engine_key(key) for key in keys]
        wanted = self._engine.retrieve_locations
        active = self.manager.get_active_storage_backends(search_range=wanted)
        locations = tier_lookup.locate(
            (self.tiers[name] for name, _ in active),
            engine_keys,
            deadline,
            self._silent,
            self._damaged.hidden,
        )
        found = {key: name for key, name in zip(keys, locations, strict=True) if name is not None}
        if self._residency is not None:
            self._residency.found(dict(zip(engine_keys, keys, strict=True)), found)
        return found

    def claim(self, located: Mapping[RecordKey, str]) -> LMCacheClaim | None:
        claim, made = LMCacheClaim(located), False
        try:
            made = claim.pin(self.tiers, self.engine_key)
        finally:
            if not made:
                claim.release()
        if not made:
            return None
        with self._claims_lock:
            self._claims = [each for each in self._claims if each.held]
            self._claims.append(claim)
        return claim

    def refresh(self, keys: Sequence[RecordKey]) -> None:
        engine_keys = [self.engine_key(key) for key in reversed(keys)]
        for tier in self.tiers.values():
            tier.used(engine_keys)

    def arrange(
        self, keys: Sequence[RecordKey], passing: Sequence[RecordKey] = (), owner: str = ""
    ) -> None:
        ordered = [self.engine_key(key) for key in reversed(keys)]
        first = [self.engine_key(key) for key in passing]
        for tier in self.tiers.values():
            tier.arrange(ordered, first, owner)

    def fetch(self, claim: LMCacheClaim, keys: Sequence[RecordKey]) -> list[LMCacheBuffer]:
        if not self.readable():
            raise LoadError("LMCache is unhealthy", "unhealthy")
        by_location: dict[str, list[RecordKey]] = defaultdict(list)
        for key in keys:
            by_location[claim.located[key]].append(key)
        buffers: dict[RecordKey, LMCacheBuffer] = {}
        try:
            for location, wanted in by_location.items():
                self._read(location, wanted, claim.made, buffers)
            for key in keys:
                if key not in buffers:
                    raise self._why_unread(key, claim)
            for key in keys:
                self._check(key, claim, buffers[key])
        except BaseException:
            for buffer in buffers.values():
                buffer.release()
            raise
        return [buffers[key] for key in keys]

    def _read(
        self,
        location: str,
        keys: list[RecordKey],
        promised: float,
        buffers: dict[RecordKey, LMCacheBuffer],
    ) -> None:
        refused = self._reservation.refused
        in_place = self.tiers[location].in_place
        with self._reservation.room_for(0 if in_place else len(keys)):
            memories = self._read_from(location, keys, promised)
        read = {
            key: LMCacheBuffer(memory, self._digester)
            for key, memory in zip(keys, memories)
            if memory is not None
        }
        buffers |= read
        self.reads[location] += len(read)
        if self._reservation.refused != refused and len(read) < len(keys):
            raise NoRoomError("LMCache's CPU pool is full (max_local_cpu_size)")

    def _read_from(
        self, location: str, keys: list[RecordKey], promised: float
    ) -> list[MemoryObj | None]:
        engine_keys = [self.engine_key(key) for key in keys]
        if location not in dict(self.manager.get_active_storage_backends(location)):
            raise LoadError(f"{location} is switched off", "unreachable")
        try:
            return self.tiers[location].read(engine_keys, promised)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{location} failed: {error!r}", "unreachable") from error

    def keep(self, claim: LMCacheClaim, records: Iterable[tuple[RecordKey, LMCacheBuffer]]) -> None:
        """Copy records of other tiers to RAM, if LMCache uses it (local_cpu)."""
        read = [(k, b) for k, b in records if not self.tiers[claim.located[k]].in_place]
        # Make the names first: a reset sets _cleared before it renames.
        names = [self.engine_key(key) for key, _ in read]
        if read and claim.made > self._cleared:  # else the records have names from before
            self.manager.local_cpu_backend.batched_submit_put_task(
                names, [buffer.memory for _, buffer in read]
            )

    def _check(self, key: RecordKey, claim: LMCacheClaim, buffer: LMCacheBuffer) -> None:
        try:
            buffer.digests = open_record(
                buffer.record, key, self._names.fingerprint_of(key), self._digester
            )
        except RecordError as error:
            # Kept, it would be promised to every later request and fail.
            self.discard(key, claim)
            raise DamagedError(key, error) from error

    def _why_unread(self, key: RecordKey, claim: LMCacheClaim) -> LoadError | RecordError:
        """Find out why a promised record could not be read.

        A damaged one is removed. One that may be whole stays, hidden for a while.
        """
        location = claim.located[key]
        what = f"record {key.label} at token {key.boundary}"
        try:
            fate = self.tiers[location].fate(self.engine_key(key), self._reservation.largest)
        except Exception as error:  # the store may only be away
            return LoadError(
                f"{location} does not say where {what} is: {error!r}", "unreachable", key
            )
        if fate == "damaged":
            self.discard(key, claim)
            return DamagedError(key, RecordError("wrapper", "its file has the wrong length"))
        if fate == "unreadable":
            self._damaged.unreadable(self.engine_key(key), location)
            return LoadError(f"{what} cannot be read from {location}, and stays there", fate, key)
        return LoadError(f"{what} is gone from {location}", fate, key)

    def discard(self, key: RecordKey, claim: LMCacheClaim | None = None) -> None:
        """See :meth:`.Store.discard`."""
        location = claim.located.get(key) if claim is not None else None
        self._damaged.remove(self.engine_key(key), location)

    # Removing what a request asks for

    def in_use(self, hashes: Set[bytes], tags: tuple[tuple[str, str], ...]) -> bool:
        with self._claims_lock:
            claims = [claim for claim in self._claims if claim.held]
        keys = (key for claim in claims for key in claim.keys)
        return any(key.block_hash in hashes and key.tags == tags for key in keys)

    def is_writing(self, keys: Sequence[RecordKey], seconds: float) -> bool:
        engine_keys = [self.engine_key(key) for key in keys]
        for name, tier in self.tiers.items():
            try:
                if tier.is_writing(engine_keys, seconds):
                    return True
            except Exception as error:
                raise RemovalError(name, error) from error
        return False

    def remove(self, keys: Sequence[RecordKey], seconds: float) -> dict[str, int]:
        engine_keys = [self.engine_key(key) for key in keys]
        for kept in self.kept.values():
            kept.end(engine_keys)
        removed: dict[str, int] = {}
        ends = time.monotonic() + seconds
        for name, tier in reversed(self.tiers.items()):
            try:
                removed[name] = tier.remove_all(engine_keys, max(0.0, ends - time.monotonic()))
            except Exception as error:
                raise RemovalError(name, error) from error
            finally:  # some may be gone, and a lookup announces the others again
                if self._residency is not None and not tier.indexed:
                    for key in engine_keys:
                        self._residency.discarded(key)
        return removed

    # Writing

    def reserve(self, payload: int) -> LMCacheBuffer | None:
        memory = self.manager.allocate(
            record_shape(record_bytes(payload)),
            torch.uint8,
            fmt=MemoryFormat.KV_2LTD,
            busy_loop=False,
        )
        return None if memory is None else LMCacheBuffer(memory, self._digester)

    def put(self, records: Iterable[tuple[RecordKey, LMCacheBuffer]]) -> None:
        records = list(records)
        try:
            for key, buffer in records:
                fingerprint = self._names.fingerprint_of(key)
                seal(buffer.record, key, fingerprint, buffer.digests, self._digester)
            if self._residency is not None:
                self._residency.expect((self.engine_key(key), key) for key, _ in records)
            ours = [record for record in records if self._names.is_written_here(record[0])]
            others = [record for record in records if not self._names.is_written_here(record[0])]
            self._submit(ours, [self._engine.store_location])
            self._submit(others, self._locations(shared=False))
            for name in self._locations(shared=True):
                for key, _ in others:
                    self._damaged.written_elsewhere(name, self.engine_key(key))
        finally:
            for _, buffer in records:
                buffer.release()
        if self._residency is not None:
            # Replicas count although another rank writes them: remote stores are asked for them.
            written = [self.engine_key(key) for key, _ in records]
            self._residency.written(written, self._engine.store_location)

    def _locations(self, shared: bool) -> list[str]:
        """List the tiers written to that all ranks share, or only this one sees."""
        wanted = self._engine.store_location
        return [
            name
            for name, tier in self.tiers.items()
            if tier.shared == shared and wanted in (None, "", name)
        ]

    def _submit(
        self,
        records: Sequence[tuple[RecordKey, LMCacheBuffer]],
        locations: Sequence[str | None],
    ) -> None:
        """Hand records to backends, None for all; these take their own references."""
        keys = [self.engine_key(key) for key, _ in records]
        memories = [buffer.memory for _, buffer in records]
        for location in locations if records else ():
            self._count_held(keys, memories, location)
            for memory in memories:
                memory.ref_count_up()
            try:
                # Drops one reference of each, unless it raises.
                self.manager.batched_put(keys, memories, location=location)
            except BaseException:
                for memory in memories:
                    memory.ref_count_down()
                raise

    def _count_held(
        self,
        keys: Sequence[CacheEngineKey],
        memories: Sequence[MemoryObj],
        location: str | None,
    ) -> None:
        """Count records that an index already has; other tiers count when they write."""
        for name, tier in self.tiers.items():
            if tier.indexed and location in (None, "", name):
                held = zip(memories, tier.held(keys, 0), strict=True)
                if size := sum(memory.get_size() for memory, is_held in held if is_held):
                    self._count_rewritten(name, size)

    def _count_rewritten(self, name: str, size: int) -> None:
        with self._counts_lock:  # called by the backends' writers
            self.rewritten_bytes[name] += size

    def _count_failed_writes(self, name: str, records: int) -> None:
        with self._counts_lock:  # called by the backends' writers
            self.failed_writes[name] += records

    def clear(self, epoch: int) -> None:
        """Forget all records of this rank, in-flight saves included. Mutates the fingerprint.

        LMCache clears only unpinned records in RAM, and other backends may be shared. So from now
        on this rank reads and writes under names that no other engine has.
        """
        self._cleared = time.monotonic()
        self._names.reset(epoch)
        self._damaged.clear()
        for kept in self.kept.values():
            kept.clear()
        self.manager.clear()
        logger.info(
            "Reset: records of this rank have the fingerprint %s until it is restarted.",
            self.fingerprint[:8].hex(),
        )

    def close(self) -> None:
        """See :meth:`.Store.close`."""
        for tier in self.tiers.values():
            tier.close()

    def check_integrity(self) -> None:
        """Assert what holds while no write is in flight. Walks every index: for tests."""
        self._reservation.check_integrity()
        for tier in self.tiers.values():
            tier.check_integrity()
