# SPDX-License-Identifier: Apache-2.0
"""What a request keeps is evicted last, for its time and within its share."""

import hashlib
import threading
import time

import pytest

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.hit_records import block_keys, load_keys
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage import keep_shares, keeps
from lmcache_hybrid.storage.keep_shares import OF_SALT, KeptNames
from lmcache_hybrid.storage.record_format import record_bytes

from ..helpers import put
from ..store_box import BACKEND, SIZE, N

PLAN = GroupPlan(N, attention=(2,), states=(0,))


def prompt(blocks: int, name: str) -> Prefix:
    return Prefix(tuple(hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(blocks)))


PROMPT = prompt(3, "kept")
NEEDED = load_keys(PROMPT, 0, 3, PLAN)  # three pages, and the states at the end
RECORD = record_bytes(SIZE)
SIZES = {0: RECORD, 2: RECORD}
POLICIES = (None, "LRU", "LFU", "FIFO", "MRU")
evicting = pytest.mark.parametrize("kind", ["ram", "disk"])


def asked(prefix: Prefix = PROMPT, backends=None, **more) -> KeepRequest:
    values = {"boundaries": (len(prefix.hashes),), "salt": b"", "seconds": 60, "share": 0.25}
    return KeepRequest(prefix, **values | more, backends=backends)


def keep(one, kind: str, prefix: Prefix = PROMPT, **more) -> KeepResult:
    return keeps.keep(PLAN, one.store, SIZES, asked(prefix, (BACKEND[kind],), **more))


def save(one, keys, owner: str = "first"):
    """Store records and set their order, as each save does."""
    put(one.store, keys, SIZE)
    one.store.arrange(keys, owner=owner)
    one.settle()
    return one


def flood(one, kind: str, first: int = 1000) -> None:
    """Store three times what the backend has room for, prompt by prompt."""
    records = 3 * one.store.kept[BACKEND[kind]]._capacity // RECORD
    for seed in range(first, first + records // 20):
        other = prompt(10, f"other {seed}")
        save(one, [key for at in range(10) for key in block_keys(other, at, PLAN)], str(seed))


def small(box, kind: str, policy: str | None = None):
    """Room for some 400 records."""
    settings = {"max_local_cpu_size": 0.001, "max_local_disk_size": 0.0005}
    return box(kind, **settings, **({"cache_policy": policy} if policy else {}))


@evicting
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_outlives_all_else(box, kind, policy):
    one = save(small(box, kind, policy), NEEDED)
    other = prompt(3, "other")
    save(one, load_keys(other, 0, 3, PLAN), "second")
    assert keep(one, kind) == KeepResult({BACKEND[kind]: ""})
    flood(one, kind)
    assert set(one.store.locate(NEEDED)) == set(NEEDED)
    if policy != "MRU":  # it evicts the newest first
        assert not one.store.locate(load_keys(other, 0, 3, PLAN))
    one.read(NEEDED)


@evicting
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_goes_where_nothing_else_is_left(box, kind, policy):
    """No save fails and no loop is endless because of it."""
    one = small(box, kind, policy)
    capacity = one.store.kept[BACKEND[kind]]._capacity
    long = prompt(5 * capacity // (4 * RECORD), "long")
    assert keep(one, kind, long) == KeepResult({BACKEND[kind]: ""}), "no share is asked for"
    pages = [key for key in load_keys(long, 0, len(long.hashes), PLAN) if key.kind == ATTENTION]
    for first in range(0, len(pages), 20):
        put(one.store, pages[first : first + 20], SIZE)
        one.settle()
    if policy != "MRU":  # it evicts the newest first
        assert set(one.store.locate(pages[-20:])) == set(pages[-20:])
    assert not one.store.failed_writes
    one.store.check_integrity()


@evicting
def test_a_record_that_is_stored_later_is_kept(box, kind):
    one = small(box, kind)
    keep(one, kind)
    save(one, NEEDED)
    flood(one, kind)
    assert set(one.store.locate(NEEDED)) == set(NEEDED)


@evicting
@pytest.mark.parametrize("how", ["time", "end", "drop", "reset"])
def test_what_is_kept_no_longer_is_evicted(box, kind, how, monkeypatch):
    one = save(small(box, kind), NEEDED)
    now = time.monotonic()
    keep(one, kind)
    kept = one.store.kept[BACKEND[kind]]
    assert kept.size == len(NEEDED) * RECORD
    if how == "time":
        monkeypatch.setattr(keep_shares.time, "monotonic", lambda: now + 62)
    elif how == "end":
        assert keep(one, kind, seconds=0) == KeepResult({BACKEND[kind]: ""})
    elif how == "drop":
        one.store.remove(NEEDED, 10)
        save(one, NEEDED)
    else:
        one.store.clear(1)
    assert kept.size == 0
    kept.forget_ended()
    assert not kept
    kept.check_integrity()
    if how != "reset":
        monkeypatch.undo()
        flood(one, kind)
        assert not one.store.locate(NEEDED)


def test_evictions_meet_a_kept_record_once_per_turn_of_the_cache(box, monkeypatch):
    """Each eviction would take longer the more is kept."""
    for policy in set(POLICIES) - {"FIFO"}:
        one = save(small(box, "ram", policy), NEEDED)
        keep(one, "ram")
        if policy == "MRU":  # it meets only what was used since the cache was full
            flood(one, "ram", 5000)
            one.store.refresh(NEEDED)
        looked, real = [], keep_shares._Spared.__getitem__
        monkeypatch.setattr(
            keep_shares._Spared,
            "__getitem__",
            lambda self, name, looked=looked, real=real: looked.append(name) or real(self, name),
        )
        flood(one, "ram")
        kept = sum(name in one.store.kept["LocalCPUBackend"] for name in looked)
        assert len(NEEDED) <= kept < len(looked) / 20, policy
        monkeypatch.undo()


def test_ram_that_lmcache_does_not_use_and_remote_stores_keep_nothing(box):
    assert not box("fs").store.kept
    assert set(box("disk").store.kept) == {"LocalDiskBackend"}
    assert keeps.keep(PLAN, box("redis").store, SIZES, asked()) == KeepResult()


@evicting
def test_asking_keeps_nothing(box, kind):
    one = box(kind)
    assert keeps.keep(PLAN, one.store, SIZES, asked()) == KeepResult({BACKEND[kind]: ""})
    assert not one.store.kept[BACKEND[kind]]


def test_states_of_other_boundaries_are_not_kept():
    class Names(dict):
        kept = {"ram": KeptNames(1 << 30)}
        engine_key = staticmethod(lambda key: key)

    keeps.keep(PLAN, Names(), SIZES, asked(backends=("ram",), boundaries=(1, 3)))
    states = {key.boundary // N for key in Names.kept["ram"]._names if key.kind == STATE}
    pages = {key.boundary // N for key in Names.kept["ram"]._names if key.kind == ATTENTION}
    assert (states, pages) == ({1, 3}, {1, 2, 3})


# Shares

ROOM = 1000


def records(first: int, count: int, size: int = 10) -> dict[int, int]:
    return dict.fromkeys(range(first, first + count), size)


def test_a_salt_has_its_share_and_is_told_of_its_own_records_only():
    kept = KeptNames(ROOM)
    share = int(OF_SALT * 0.25 * ROOM)  # 100 bytes
    assert kept.why_full(records(0, 10), b"a", 0.25) == ""
    assert "this cache_salt would keep" in kept.why_full(records(0, 11), b"a", 0.25)
    assert "without a cache_salt" in kept.why_full(records(0, 11), b"", 0.25)
    kept.keep(records(0, 10), b"a", 60)
    assert kept.size == share
    assert kept.why_full(records(5, 5), b"a", 0.25) == "", "what is kept is counted again"
    assert kept.why_full(records(5, 6), b"a", 0.25)
    assert kept.why_full(records(100, 10), b"b", 0.25) == "", "another salt has a share of its own"


def test_all_salts_together_have_a_share_and_none_learns_what_others_keep():
    kept = KeptNames(ROOM)
    for number, salt in enumerate((b"a", b"b")):
        kept.keep(records(100 * number, 10), salt, 60)
    assert kept.why_full(records(900, 5), b"c", 0.25) == ""
    said = kept.why_full(records(900, 6), b"c", 0.25)
    assert said == "what may be kept for all is in use. Try again later."
    assert not any(letter.isdigit() for letter in said)


def test_what_has_ended_takes_no_share(monkeypatch):
    kept, now = KeptNames(ROOM), [100.0]
    monkeypatch.setattr(keep_shares.time, "monotonic", lambda: now[0])
    kept.keep(records(0, 10), b"a", 5)
    assert 0 in kept
    now[0] += 5.5
    assert 0 not in kept
    assert kept.why_full(records(50, 10), b"a", 0.25) == ""
    assert kept.size == 0 and not kept
    kept.check_integrity()


def test_the_longer_time_counts_and_the_same_is_kept_once(monkeypatch):
    kept, now = KeptNames(ROOM), [100.0]
    monkeypatch.setattr(keep_shares.time, "monotonic", lambda: now[0])
    for seconds in (60, 5, 3600, 3600, 7):
        kept.keep(records(0, 10), b"a", seconds)
        kept.check_integrity()
    assert kept.size == 100
    now[0] += 3599
    assert 0 in kept and kept.size == 100
    now[0] += 2
    assert 0 not in kept and kept.size == 0


@pytest.mark.parametrize("number", [1, 2, 8, 20])
def test_what_several_keep_is_let_go_with_the_last_of_them(number):
    kept = KeptNames(ROOM)
    for each in range(1, 21):
        kept.keep(records(0, 1), b"a", 60, each)
        kept.keep(records(1, 1), b"a", 60, number)
    ended = [each for each in range(1, 21) if each != number]
    for each in ended:
        kept.end([0, 1], each)
    assert 0 in kept and 1 in kept, "a keep that has not ended"
    kept.end([0, 1], number)
    assert 1 not in kept
    assert 0 in kept, "keeps that are not told apart end with their time"
    kept.check_integrity()


@pytest.mark.parametrize("before", [1, 20])
def test_a_keep_that_is_over_holds_nothing_that_a_later_one_names(monkeypatch, before):
    """As of an agent that keeps its prompt again every few minutes, and then aborts."""
    kept, now = KeptNames(ROOM), [100.0]
    monkeypatch.setattr(keep_shares.time, "monotonic", lambda: now[0])
    for each in range(1, before + 1):
        kept.keep(records(0, 1), b"a", 60, each)
        now[0] += 50
    kept.keep(records(0, 1), b"a", 86400, 99)
    kept.end([0], 99)
    kept.check_integrity()
    assert 0 in kept, "the last keep before has 10 seconds more"
    now[0] += 11
    assert 0 not in kept
    assert kept.size == 0


def test_the_gauge_waits_for_no_keep():
    """It is read between two steps of the model."""
    kept, read = KeptNames(ROOM), []
    kept.keep(records(0, 10), b"a", 60)
    with kept._lock:  # a long prompt is being kept
        reader = threading.Thread(target=lambda: read.append(kept.size), daemon=True)
        reader.start()
        reader.join(20)
    assert read == [100]


def test_keeping_and_ending_for_ever_takes_no_memory(monkeypatch):
    kept = KeptNames(ROOM)
    monkeypatch.setattr(keep_shares.time, "monotonic", lambda: 100.0)
    for _ in range(100):
        kept.keep(records(0, 10), b"a", 60)
        kept.end(range(20))
    assert not kept and len(kept._ends) == len(kept._by_end) == 1 and not kept._of_salt
    kept.check_integrity()
