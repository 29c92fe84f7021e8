# SPDX-License-Identifier: Apache-2.0
"""One simulated engine: a rank's real store and lookups, and requests in place of a model.

Every byte of a record follows from its key, so any engine can check what another one stored.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from lmcache.v1.config import LMCacheEngineConfig

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage.lmcache_store import LMCacheStore
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_format import digests_of, record_bytes
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

MODEL, BLOCK = "many-engines", 784
# Groups with states, as Qwen3.6 has.
STATES = 3
PLAN = GroupPlan(BLOCK, (STATES,), tuple(range(STATES)))
# Max seconds for one call of the store, and for a write or removal.
PATIENCE = 60.0


@dataclass(frozen=True)
class Settings:
    """What all engines do.

    Attributes:
        url, extra: LMCache's ``remote_url`` and ``extra_config``.
        environment: of the processes, for credentials.
        engines: how many there are.
        requests: a second, of each engine; they come at random.
        hit_share: of the requests, those for a prompt that some engine has stored.
        prompts: that each engine keeps; for one more it removes its oldest.
        blocks: of a prompt.
        payload: bytes of each record's pages.
        run: a word of this run's own, so that it finds nothing that another one left in the store.
    """

    url: str
    extra: dict[str, Any]
    environment: dict[str, str]
    engines: int
    requests: float
    hit_share: float
    prompts: int
    blocks: int
    payload: int
    run: str = ""

    @property
    def prompt_bytes(self) -> int:
        return (self.blocks + STATES) * record_bytes(self.payload)


class Ring(Protocol):
    """An integer for each engine, in memory that all processes share; only its engine sets it."""

    def __getitem__(self, engine: int) -> int: ...
    def __setitem__(self, engine: int, value: int) -> None: ...


@dataclass
class Kept:
    """Which prompts are stored: those from ``first`` to before ``end``, of each engine.

    An engine raises ``first`` before it removes a prompt, and ``end`` after it has stored one.
    """

    first: Ring
    end: Ring

    def of(self, engine: int) -> range:
        return range(self.first[engine], self.end[engine])


@dataclass
class Seen:
    """What one engine has seen.

    Attributes:
        counts: ``requests``, ``lookups``, ``hits``, ``stored`` prompts, ``removed`` prompts;
            ``lost``: a prompt that was stored and that a lookup or load did not find;
            ``damaged``: a record with other bytes; ``failed_writes``: a prompt that was not
            stored at once; ``failed_loads``: a load that failed and that was found right after;
            ``gone``: a prompt that its engine removed between two calls here, which is no loss.
        lookups: seconds of each.
        read, written: bytes of records.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lookups: list[float] = field(default_factory=list)
    read: int = 0
    written: int = 0


def prefix_of(engine: int, number: int, blocks: int, run: str = "") -> Prefix:
    """The prompt that an engine stores as its ``number``-th."""
    names = (f"{run}/{engine}/{number}/{block}" for block in range(blocks))
    return Prefix(tuple(hashlib.sha256(name.encode()).digest() for name in names))


def payload_of(key: RecordKey, size: int) -> np.ndarray:
    """The bytes of a record's pages."""
    seed = hashlib.sha256(repr((key.kind, key.group, key.block_hash, key.boundary)).encode())
    return np.frombuffer(random.Random(seed.digest()).randbytes(size), np.uint8)


class Engine:
    """One engine. Its thread makes the calls, one after the other; owns its store until closed."""

    def __init__(self, number: int, settings: Settings, kept: Kept) -> None:
        self.number, self.settings, self.kept, self.seen = number, settings, kept, Seen()
        self._random = random.Random(number)
        self._name = f"{MODEL}-{number}"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=BLOCK,
            local_cpu=False,
            max_local_cpu_size=(4 * settings.prompt_bytes + (4 << 20)) / (1 << 30),
        )
        config.remote_url, config.extra_config = settings.url, dict(settings.extra)
        config.blocking_timeout_secs = PATIENCE
        engine = make_engine(self._name, config, MODEL)
        engine.post_init()
        self.store = LMCacheStore(engine, MODEL, bytes(16), settings.payload)
        self.lookup = RankLookup(PLAN, self.store)

    def run(self, ends: float) -> None:
        """Make requests until ``time.monotonic`` is ``ends``.

        One that comes while another is made waits for its turn; those of a second or more ago are
        left out.
        """
        due = time.monotonic()
        while True:
            due = max(due, time.monotonic() - 1)
            due += self._random.expovariate(self.settings.requests)
            if due >= ends:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            self.request()

    def request(self) -> None:
        """Ask for a prompt that an engine has stored, or for a new one, which is then stored."""
        self.seen.counts["requests"] += 1
        owner = self._random.randrange(self.settings.engines)
        stored = self.kept.of(owner)
        if stored and self._random.random() < self.settings.hit_share:
            self.hit(owner, self._random.choice(stored))
        else:
            self.new()

    def check_all(self, owner: int) -> None:
        """Look up, load and check every prompt that an engine keeps."""
        for number in self.kept.of(owner):
            self.hit(owner, number)

    # A prompt that is stored

    def hit(self, owner: int, number: int) -> None:
        damaged = self.seen.counts["damaged"]
        if self._found(owner, number):
            self.seen.counts["hits"] += self.seen.counts["damaged"] == damaged
        elif number < self.kept.first[owner]:
            self.seen.counts["gone"] += 1
        elif self._found(owner, number):  # the store did not answer the first time
            self.seen.counts["failed_loads"] += 1
        elif number < self.kept.first[owner]:
            self.seen.counts["gone"] += 1
        else:
            self.seen.counts["lost"] += 1

    def _found(self, owner: int, number: int) -> bool:
        prefix = prefix_of(owner, number, self.settings.blocks, self.settings.run)
        name = f"{self.number}/{owner}/{number}"
        if not self._look_up(name, prefix):
            return False
        claim = self.lookup.take_claim(name)
        assert claim is not None
        keys = load_keys(prefix, 0, self.settings.blocks, PLAN)
        try:
            buffers = self.store.fetch(claim, keys)
        except RecordError:
            self.seen.counts["damaged"] += 1
            return True
        except LoadError:
            return False
        finally:
            claim.release()
        for key, buffer in zip(keys, buffers):
            expected = payload_of(key, self.settings.payload)
            if not np.array_equal(buffer.payload.numpy(), expected):
                self.seen.counts["damaged"] += 1
            buffer.release()
        self.seen.read += len(keys) * record_bytes(self.settings.payload)
        return True

    def _look_up(self, name: str, prefix: Prefix) -> bool:
        """Whether all of a prompt is stored; it is claimed then."""
        began = time.perf_counter()
        answer = self.lookup.answer(LookupRequest(name, prefix, self.settings.blocks, 0))
        self.seen.lookups.append(time.perf_counter() - began)
        self.seen.counts["lookups"] += 1
        if answer.boundary == self.settings.blocks:
            return True
        self.lookup.release(name)
        return False

    # A new prompt

    def new(self) -> None:
        number = self.kept.end[self.number]
        prefix = prefix_of(self.number, number, self.settings.blocks, self.settings.run)
        self._look_up(f"{self.number}/new", prefix)
        self.lookup.release(f"{self.number}/new")
        if len(self.kept.of(self.number)) >= self.settings.prompts:
            self._remove_oldest()
        keys = load_keys(prefix, 0, self.settings.blocks, PLAN)
        if self._save(keys):
            self.kept.end[self.number] = number + 1
            self.seen.counts["stored"] += 1
        else:  # its next new prompt is this one again
            self.seen.counts["failed_writes"] += 1

    def _remove_oldest(self) -> None:
        number = self.kept.first[self.number]
        self.kept.first[self.number] = number + 1
        prefix = prefix_of(self.number, number, self.settings.blocks, self.settings.run)
        self.store.remove(load_keys(prefix, 0, self.settings.blocks, PLAN), PATIENCE)
        self.seen.counts["removed"] += 1

    def _save(self, keys: Sequence[RecordKey]) -> bool:
        """Store the records of a prompt; returns whether the store has all of them."""
        records = []
        for key in keys:
            buffer = self.store.reserve(self.settings.payload)
            if buffer is None:  # what is being written fills the pool
                for _, taken in records:
                    taken.release()
                return False
            payload = payload_of(key, self.settings.payload)
            buffer.payload.numpy()[:] = payload
            buffer.digests = digests_of(memoryview(payload))
            records.append((key, buffer))
        self.store.put(records)
        ends = time.monotonic() + PATIENCE
        while self.store.is_writing(keys, PATIENCE):
            if time.monotonic() > ends:
                return False
            time.sleep(0.002)
        self.seen.written += len(keys) * record_bytes(self.settings.payload)
        return len(self.store.locate(keys)) == len(keys)

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self._name)
