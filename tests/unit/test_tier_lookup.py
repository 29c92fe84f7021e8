# SPDX-License-Identifier: Apache-2.0
"""Questions of lookups to LMCache's backends, real ones: how many, and what when one fails."""

import math
import threading
import time
from collections import Counter

import pytest

from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.storage import silent_lookups, tier_lookup
from lmcache_hybrid.storage.folder import record_io
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.remote import fs as fs_records
from lmcache_hybrid.storage.remote import sockets
from lmcache_hybrid.storage.tiers.remote import RemoteTier

from .helpers import PLAN, N, make_prefix, put
from .store_box import (  # noqa: F401 (fixtures)
    KEYS,
    Box,
    box,
    until,
    valkey,
)

BLOCKS = 24
PREFIX = make_prefix(BLOCKS)


@pytest.fixture
def trips(monkeypatch) -> Counter:
    """How often an answer of Redis was waited for, and of how many commands."""
    sent: Counter[str] = Counter()
    replies = sockets.replies

    def counted(sock, count, deadline):
        sent["round trips"] += 1
        sent["commands in them"] += count
        return replies(sock, count, deadline)

    monkeypatch.setattr(sockets, "replies", counted)
    return sent


@pytest.mark.parametrize(
    "stored, hit, round_trips",
    [(BLOCKS, BLOCKS, 1), (1, 1, 2), (0, 0, 2)],
    ids=["hit", "shallower", "miss"],
)
def test_a_lookup_in_redis_takes_two_round_trips_at_most(box, trips, stored, hit, round_trips):  # noqa: F811
    """Of all boundaries one has a state, or none: each one deeper was asked for by itself."""
    box = box("redis").write(load_keys(PREFIX, 0, BLOCKS, PLAN)[:BLOCKS], size=8)
    if stored:
        box.write(load_keys(PREFIX, 0, stored, PLAN), size=8)
    before = box.redis.info("commandstats")["cmdstat_exists"]["calls"]
    trips.clear()
    answer = RankLookup(PLAN, box.store).answer(LookupRequest("r", PREFIX, BLOCKS, 0))
    assert (answer.boundary, answer.attention) == (hit, BLOCKS)
    states = len(PLAN.states) * (BLOCKS if round_trips > 1 else 1)
    assert trips == {"round trips": round_trips, "commands in them": BLOCKS + states}
    after = box.redis.info("commandstats")["cmdstat_exists"]["calls"]
    assert after - before == BLOCKS + states, "as the server saw it"


def test_a_lookup_in_an_empty_redis_takes_one_round_trip(box, trips):  # noqa: F811
    answer = RankLookup(PLAN, box("redis").store).answer(LookupRequest("r", PREFIX, BLOCKS, 0))
    assert (answer.boundary, answer.attention) == (0, 0)
    assert trips["round trips"] == 1


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_lookup_in_a_local_backend_takes_its_lock_once_for_each_question(box, kind):  # noqa: F811
    box = box(kind).write()
    name = "cpu_lock" if kind == "ram" else "disk_lock"
    lock = Counting(getattr(box.backend, name))
    setattr(box.backend, name, lock)
    assert list(box.store.locate(KEYS)) == KEYS
    assert lock.taken == 1


class Counting:
    """A lock that counts how often it is taken."""

    def __init__(self, lock) -> None:
        self._lock, self.taken = lock, 0

    def __enter__(self):
        self.taken += 1
        return self._lock.__enter__()

    def __exit__(self, *args):
        return self._lock.__exit__(*args)


def test_a_lookup_in_a_folder_is_shared_out_over_threads(box, monkeypatch):  # noqa: F811
    """On NFS each question is a round trip."""
    monkeypatch.setattr(fs_records, "LEAST_ASKED", 1)
    box = box("fs").write()
    together, holds = threading.Barrier(len(KEYS)), record_io.holds
    monkeypatch.setattr(
        record_io, "holds", lambda path: (together.wait(20), holds(path))[1], raising=True
    )
    assert list(box.store.locate(KEYS)) == KEYS


def filled(box, kind: str, keys, evicted) -> Box:  # noqa: F811
    """Records in a remote store and in RAM, from where some of them were evicted."""
    made = box(kind, local_cpu=True)
    put(made.store, keys)
    engine_keys = [made.store.engine_key(key) for key in keys]
    until(lambda: all(made.tier.held(engine_keys, 5)), "nothing was written")
    for key in evicted:
        made.manager.local_cpu_backend.remove(made.store.engine_key(key))
    return made


def half_in_ram(box, kind: str) -> Box:  # noqa: F811
    return filled(box, kind, KEYS, KEYS[2:])


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_a_store_that_does_not_answer_costs_half_of_the_time_left(box, kind, monkeypatch):  # noqa: F811
    """What lies in RAM can still be claimed."""
    box = half_in_ram(box, kind)
    answers = threading.Event()
    if kind == "redis":
        box.redis.client_pause(1000)
    else:
        monkeypatch.setattr(record_io, "holds", lambda path: answers.wait(60))
    monkeypatch.setattr(silent_lookups, "PAUSE_SECONDS", 0.0)
    existing, given = RemoteTier.held, []

    def timed(tier, keys, seconds):
        given.append(seconds)
        return existing(tier, keys, 0.05)

    monkeypatch.setattr(RemoteTier, "held", timed)
    deadline = time.monotonic() + 100
    assert list(box.store.locate(KEYS, deadline)) == KEYS[:2]
    assert 0 < given[0] <= 50
    box.store.locate(KEYS, 0.0)
    assert given[1] == 0.0
    box.store.locate(KEYS)
    assert given[2] == math.inf
    answers.set()


def test_a_store_that_had_hardly_any_time_is_asked_again(box, monkeypatch, hybrid_log):  # noqa: F811
    """A rank that is busy begins late; that says nothing of its store."""
    box = half_in_ram(box, "fs")
    existing, now = RemoteTier.held, [1000.0]
    monkeypatch.setattr(tier_lookup.time, "monotonic", lambda: now[0])

    def silent(*args):
        raise TimeoutError

    assert list(box.store.locate(KEYS, now[0] + 1)) == KEYS
    monkeypatch.setattr(RemoteTier, "held", silent)
    for left in (0.2, 0.0, -1.0):
        assert list(box.store.locate(KEYS, now[0] + left)) == KEYS[:2]
    assert "did not answer" not in hybrid_log.text
    monkeypatch.setattr(RemoteTier, "held", existing)
    assert list(box.store.locate(KEYS, now[0] + 1)) == KEYS
    monkeypatch.setattr(RemoteTier, "held", silent)
    box.store.locate(KEYS, now[0] + 0.3)
    assert "did not answer" in hybrid_log.text


def test_a_store_that_does_not_answer_is_left_alone_for_longer_each_time(
    box,  # noqa: F811
    monkeypatch,
    hybrid_log,
):
    box = half_in_ram(box, "fs")
    now, asked = [1000.0], []
    monkeypatch.setattr(tier_lookup.time, "monotonic", lambda: now[0])

    def silent(*args):
        asked.append(now[0])
        raise TimeoutError

    def lookup():
        return list(box.store.locate(KEYS, now[0] + 1))

    existing = RemoteTier.held
    monkeypatch.setattr(RemoteTier, "held", silent)
    for pause in (1, 2, 4, 8, 10, 10):
        assert lookup() == KEYS[:2] and asked[-1] == now[0]
        now[0] += pause - 0.1
        assert lookup() == KEYS[:2] and asked[-1] < now[0]
        now[0] += 0.2
    said = [record.getMessage() for record in hybrid_log.records]
    assert len([line for line in said if "did not answer a cache lookup in time" in line]) == 1
    monkeypatch.setattr(RemoteTier, "held", existing)
    assert lookup() == KEYS
    monkeypatch.setattr(RemoteTier, "held", silent)
    lookup()
    now[0] += 1.1
    monkeypatch.setattr(RemoteTier, "held", existing)
    assert lookup() == KEYS, "an answer did not end the pauses"


def test_a_store_that_fails_counts_as_empty_and_is_asked_again(box, monkeypatch, hybrid_log):  # noqa: F811
    """A warning comes less often the longer it fails: else each lookup would be a line."""
    box = half_in_ram(box, "fs")
    existing, now = RemoteTier.held, [1000.0]
    monkeypatch.setattr(tier_lookup.time, "monotonic", lambda: now[0])

    def fails(*args):
        raise OSError("of the test")

    def said() -> int:
        assert list(box.store.locate(KEYS)) == KEYS[:2]
        lines = [record.getMessage() for record in hybrid_log.records]
        fail = "Lookups in RemoteBackend fail and count as misses: OSError: of the test"
        return sum(fail in line for line in lines)

    monkeypatch.setattr(RemoteTier, "held", fails)
    told = []
    for _ in range(4 * 60):  # two hours
        if said() > len(told):
            told.append(now[0] - 1000)
        now[0] += 30
    assert told == [0, 60, 180, 420, 900, 1860, 3780]
    monkeypatch.setattr(RemoteTier, "held", existing)
    assert list(box.store.locate(KEYS)) == KEYS, "it is left alone"
    monkeypatch.setattr(RemoteTier, "held", fails)
    now[0] += 601
    assert said() == 8, "after ten minutes of health a failure is not told"


def test_a_store_that_is_not_connected_is_empty(box):  # noqa: F811
    box = half_in_ram(box, "fs")
    box.backend.connection = None
    assert list(box.store.locate(KEYS)) == KEYS[:2]


def test_a_backend_that_may_not_be_read_is_not_asked(box):  # noqa: F811
    box = half_in_ram(box, "fs")
    box.engine.retrieve_locations = ["LocalCPUBackend"]
    assert list(box.store.locate(KEYS)) == KEYS[:2]
    box.engine.retrieve_locations = ["RemoteBackend"]
    assert set(box.store.locate(KEYS).values()) == {"RemoteBackend"}


def test_holes_in_a_nearer_backend_are_filled_from_one_behind_it(box):  # noqa: F811
    """Eviction leaves holes; what follows one in RAM is not to be read from the store behind."""
    keys = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(4)]
    keys.append(RecordKey(STATE, 0, keys[-1].block_hash, keys[-1].boundary))
    box = filled(box, "fs", keys, (keys[1], keys[3]))
    ram, behind = "LocalCPUBackend", "RemoteBackend"
    assert list(box.store.locate(keys).values()) == [ram, behind, ram, behind, ram]
