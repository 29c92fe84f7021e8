# SPDX-License-Identifier: Apache-2.0
"""What a load leaves in vLLM's blocks, and how it ends."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.errors import LoadError, NoRoomError
from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.storage.record_format import HEADER_BYTES, digests_of
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from lmcache_hybrid.worker import copy_threads, loads, worker
from lmcache_hybrid.worker.loads import PART_BYTES
from tests.naive_store import NaiveStore

from .helpers import PLAN, WIDE, keys_of
from .worker_rig import DEADLINE, PREFIX, assert_failed, raise_in


@pytest.fixture
def rig(worker_rig):
    return worker_rig


@pytest.mark.parametrize("plan", [PLAN, WIDE], ids=["three state groups", "two attention groups"])
@pytest.mark.parametrize("part_bytes", [1, 3000, PART_BYTES])
@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("threads", [False, True])
def test_a_load_restores_every_byte_and_touches_nothing_else(
    rig, monkeypatch, plan, part_bytes, start, threads
):
    monkeypatch.setattr(copy_threads, "WORTH_A_THREAD", 0 if threads else 1 << 30)
    rig = rig(plan, part_bytes=part_bytes).saved()
    # Distinct destinations, because groups overlay each other in the buffer.
    attention = tuple(tuple(range(4 + start, 7)) for _ in plan.attention)
    if plan is WIDE:
        attention = (tuple(range(4 + start, 7)), tuple(range(7 + start, 10)))
    states = (10,) if plan is WIDE else (7, 8, 9)
    source = {
        (kind, group, i): rig.bytes_of(group, block)
        for kind, group, i, block in [
            *((ATTENTION, group, i, 1 + i) for group in plan.attention for i in range(start, 3)),
            *((STATE, group, 2, 4 + i) for i, group in enumerate(plan.states)),
        ]
    }
    before = rig.buffer.clone()
    load = rig.load(start=start)
    results = rig.run(dataclasses.replace(load, attention_blocks=attention, state_blocks=states))
    assert results.finished_recving == {"r"} and not results.failed_recving
    targets = {
        (ATTENTION, group, i): block
        for group, blocks in zip(plan.attention, attention)
        for i, block in zip(range(start, 3), blocks)
    } | {(STATE, group, 2): block for group, block in zip(plan.states, states)}
    for (kind, group, i), block in targets.items():
        assert rig.bytes_of(group, block) == source[kind, group, i]
    untouched = [b for b in range(12) if b not in targets.values()]
    assert torch.equal(rig.buffer[:, untouched], before[:, untouched])
    for group, block in zip(plan.states, states):
        size = 100 + 10 * group  # helpers.make_pages
        assert torch.equal(rig.buffer[:, block, size:], before[:, block, size:])
    counts = rig.worker.counts
    assert (counts.loaded_attention, counts.loaded_states) == (3 - start, 1)
    assert counts.loaded_bytes == sum(map(len, source.values()))
    assert not counts.failed_loads
    rig.assert_clean()


@pytest.mark.parametrize("part_bytes, fetches", [(1, 6), (1024, 4), (3 * 1024, 2), (1 << 20, 1)])
def test_parts_hold_no_more_than_allowed(rig, part_bytes, fetches):
    rig = rig(part_bytes=part_bytes).saved()
    fetch, seen = rig.store.fetch, []

    def counting(claim, keys):
        assert rig.store.live_buffers == 0  # the batch before was let go
        seen.append(sum(rig.pages[key.group].block_bytes for key in keys))
        return fetch(claim, keys)

    rig.store.fetch = counting
    rig.run(rig.load())
    assert len(seen) == fetches
    assert all(size <= max(part_bytes, 1024) for size in seen)  # one record at least


def restored(rig) -> bool:
    """Load into zeros; whether it is said to be there. If so, every byte is."""
    (attention,), states = rig.plan.attention, rig.plan.states
    saved = [(attention, 1 + i) for i in range(3)] + [(g, 4 + i) for i, g in enumerate(states)]
    expected = [rig.bytes_of(*place) for place in saved]
    load = dataclasses.replace(rig.load(), attention_blocks=((9, 10, 11),), state_blocks=(7, 8, 6))
    places = [(attention, block) for block in (9, 10, 11)] + list(zip(states, (7, 8, 6)))
    rig.buffer.zero_()
    if rig.run(load).failed_recving:
        return False
    assert [rig.bytes_of(*place) for place in places] == expected
    return True


@pytest.mark.parametrize("fewest, parts", [(1, 2), (2, 3), (8, 5)])
def test_a_long_load_has_larger_parts(rig, monkeypatch, fewest, parts):
    """Up to four times as large; three records of 1,024 bytes and three states of 680 together."""
    monkeypatch.setattr(loads, "FEWEST", fewest)
    rig = rig(part_bytes=512).saved()
    fetch, seen = rig.store.fetch, []
    rig.store.fetch = lambda claim, keys: seen.append(len(keys)) or fetch(claim, keys)
    assert restored(rig) and len(seen) == parts


def test_a_load_with_a_deadline_goes_record_by_record(rig):
    """So that it is given up in time."""
    rig = rig().saved()
    fetch, seen = rig.store.fetch, []
    rig.store.fetch = lambda claim, keys: seen.append(len(keys)) or fetch(claim, keys)
    rig.run(dataclasses.replace(rig.load(), deadline=time.monotonic() + 60))
    assert seen == [1] * 6


def test_a_large_part_that_finds_no_room_goes_in_small_ones(rig, monkeypatch):
    monkeypatch.setattr(copy_threads, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(loads, "FEWEST", 1)
    rig = rig(part_bytes=1024).saved()
    fetch, seen = rig.store.fetch, []

    def crowded(claim, keys):
        seen.append(sum(rig.pages[key.group].block_bytes for key in keys))
        if seen[-1] > 1024:
            raise NoRoomError("no room")
        return fetch(claim, keys)

    rig.store.fetch = crowded
    assert restored(rig)
    assert max(seen) > 1024
    rig.assert_clean()


def test_a_part_that_finds_no_room_goes_record_by_record(rig):
    """As in a pool smaller than a part."""
    rig = rig().saved()
    fetch, seen = rig.store.fetch, []

    def crowded(claim, keys):
        seen.append(len(keys))
        if len(keys) > 1:
            raise NoRoomError("no room")
        return fetch(claim, keys)

    rig.store.fetch = crowded
    assert restored(rig) and seen == [6, *[1] * 6]
    rig.assert_clean()


@pytest.mark.parametrize("always", [False, True])
def test_parts_that_find_no_room_go_one_by_one(rig, monkeypatch, always):
    """The ones beside them may have held it."""
    monkeypatch.setattr(copy_threads, "WORTH_A_THREAD", 0)
    rig = rig(part_bytes=1).saved()
    fetch, refused = rig.store.fetch, set()

    def crowded(claim, keys):
        if always or keys[0] not in refused:
            refused.add(keys[0])
            raise NoRoomError("no room")
        return fetch(claim, keys)

    rig.store.fetch = crowded
    assert restored(rig) is not always
    assert len(refused) == 6
    rig.assert_clean()


def lose(store, key):
    del store.records[key]


def flip(store, key):
    store.records[key][HEADER_BYTES] ^= 1


def flip_digest(store, key):
    store.records[key][-1] ^= 1


def cut(store, key):
    del store.records[key][-1:]


def shorter(store, key):
    """A whole record of the right key, but of another size."""
    del store.records[key]
    buffer = store.reserve(7)
    buffer.digests = digests_of(memoryview(buffer.payload.numpy()))
    store.put([(key, buffer)])


@pytest.mark.parametrize("kind, block", [(ATTENTION, 0), (ATTENTION, 2), (STATE, 2)])
@pytest.mark.parametrize(
    "damage, reason",
    [
        (lose, "gone"),
        (flip, "checksum"),
        (flip_digest, "checksum"),
        (cut, "length"),
        (shorter, "length"),
    ],
)
def test_a_bad_record_fails_the_load_once(rig, hybrid_log, damage, reason, kind, block):
    rig = rig().saved()
    load = rig.load()
    claims, discard = [], rig.store.discard
    rig.store.discard = lambda key, claim=None: (claims.append(claim), discard(key, claim))
    damage(rig.store, keys_of(PREFIX, block, kind)[-1])
    results = rig.run(load)
    assert_failed(rig, results)
    assert keys_of(PREFIX, block, kind)[-1] not in rig.store.records, "promised again and again"
    assert all(claims), "nobody knows which backend it was read from"
    kind_name = "state" if kind == STATE else "attention"
    assert rig.worker.counts.failed_loads == {f"{reason},{kind_name}": 1}
    (warning,) = [r for r in hybrid_log.records if r.levelname == "WARNING"]
    assert "Reqid: r, loading 48 tokens failed" in warning.getMessage()
    assert not warning.exc_info  # it is expected


def test_an_unexpected_error_fails_the_load_too(rig, hybrid_log):
    rig = rig().saved()
    load = rig.load()
    raise_in(rig.store, "fetch")
    assert_failed(rig, rig.run(load))
    (warning,) = [r for r in hybrid_log.records if r.levelname == "WARNING"]
    assert warning.exc_info  # a bug of ours or of LMCache: say where


def test_without_a_claim_nothing_is_loaded(rig):
    rig = rig().saved()
    before = rig.buffer.clone()
    assert_failed(rig, rig.run(rig.load(claim=False)))
    assert torch.equal(rig.buffer, before)


@pytest.mark.parametrize("where", ["state", "attention"])
@pytest.mark.parametrize("block", [0, -1, 12])
def test_a_block_that_is_none_fails_the_load_before_any_copy(rig, where, block):
    rig = rig().saved()
    load = rig.load()
    before = rig.buffer.clone()
    if where == "state":
        attention, states = load.attention_blocks, (load.state_blocks[0], block, 11)
    else:
        attention, states = ((7, 8, block),), load.state_blocks
    load = dataclasses.replace(load, attention_blocks=attention, state_blocks=states)
    assert_failed(rig, rig.run(load))
    assert torch.equal(rig.buffer, before)


def test_dropped_requests_lose_their_claims(rig):
    rig = rig().saved()
    rig.load("a")
    rig.load("b")
    rig.worker.start_loads(ConnectorMetadata(released=(("a", 1), ("b", 1), ("unknown", 1))))
    rig.assert_clean()


def test_several_loads_are_each_reported_once(rig):
    rig = rig().saved()
    loads = [rig.load("a"), rig.load("b", boundary=3), rig.load("c", claim=False)]
    rig.start(*loads)
    finished, failed = [], []
    while len(finished) < 3:
        results = rig.results()
        finished += results.finished_recving
        failed += results.failed_recving
    assert sorted(finished) == ["a", "b", "c"] and failed == ["c"]
    assert not rig.worker.results({"a", "b", "c"}, True).finished_recving
    rig.assert_clean()


class SlowStore(NaiveStore):
    """Reads wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def fetch(self, claim, keys):
        self.reading.set()
        if not self.go_on.wait(DEADLINE):
            raise LoadError("the test did not go on")
        return super().fetch(claim, keys)


def test_start_loads_and_results_do_not_wait_for_the_store(rig):
    rig = rig(store=SlowStore()).saved()
    rig.start(rig.load())
    assert rig.store.reading.wait(DEADLINE)
    for idle in (False, True):
        assert not rig.worker.results(set(), idle).finished_recving
    rig.store.go_on.set()
    assert rig.results().finished_recving == {"r"}
    rig.assert_clean()


def test_a_load_runs_beside_the_forward_of_its_own_step(worker_rig):
    """vLLM calls start_load_kv after the forward: the load would cost a step more."""
    rig = worker_rig().saved()
    connector = object.__new__(HybridConnector)
    connector.worker, connector._guard = rig.worker, WeightsGuard()
    connector.bind_connector_metadata(ConnectorMetadata(loads=(rig.load(),)))
    assert len(rig.worker.loads) == 1
    results = rig.results()
    assert results.finished_recving == {"r"} and not results.failed_recving
    connector.start_load_kv(None)
    assert len(rig.worker.loads) == 0, "it is started once"


def test_a_request_that_ends_before_its_load_starts_is_reported_and_lets_go(rig):
    rig = rig(store=SlowStore()).saved()
    rig.start(rig.load("first"), rig.load("aborted"))
    assert rig.store.reading.wait(DEADLINE)  # the only thread is busy with the first
    before = rig.buffer.clone()
    results = rig.worker.results({"aborted"}, False)
    # vLLM keeps an aborted request's blocks until it is named here.
    assert results.finished_recving == {"aborted"}
    assert torch.equal(rig.buffer, before)
    rig.store.go_on.set()
    assert rig.results().finished_recving == {"first"}
    assert rig.worker.counts.loaded_states == 1
    rig.assert_clean()


def test_a_dropped_load_is_not_taken_for_done(rig):
    """vLLM may name an ID as ended in the step in which the next request of that ID loads."""
    rig = rig(store=SlowStore()).saved()
    rig.start(rig.load("first"), rig.load("again"))
    assert rig.store.reading.wait(DEADLINE)
    results = rig.worker.results({"again"}, False)
    assert results.finished_recving == results.failed_recving == {"again"}
    rig.store.go_on.set()
    assert not rig.results().failed_recving
    rig.assert_clean()


def test_a_load_that_ends_in_an_error_is_failed(rig):
    rig = rig().saved()
    load = rig.load()
    claim = rig.lookup._claims["r"][1]
    release, errors = claim.release, [OSError("broken store")]

    def broken():
        if errors:
            raise errors.pop()
        release()

    claim.release = broken
    results = rig.run(load)
    assert results.finished_recving == results.failed_recving == {"r"}


def test_a_request_that_ends_while_its_load_runs_is_reported_after_it(rig):
    """Before, vLLM would give its blocks to others while they are written."""
    rig = rig(store=SlowStore()).saved()
    rig.start(rig.load())
    assert rig.store.reading.wait(DEADLINE)
    assert not rig.worker.results({"r"}, False).finished_recving
    rig.store.go_on.set()
    assert rig.results().finished_recving == {"r"}
    rig.assert_clean()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_load_stops_at_its_next_part_when_its_request_ends(rig, monkeypatch, threads, crowded):
    """vLLM gives an aborted request's blocks to nobody before its load is reported."""
    monkeypatch.setattr(copy_threads, "WORTH_A_THREAD", 0 if threads else 1 << 30)
    monkeypatch.setattr(copy_threads, "COPIERS", 1)
    rig = rig(part_bytes=1).saved()
    load, fetch, read = rig.load(), rig.store.fetch, []
    reading, go_on = threading.Event(), threading.Event()

    def slow(claim, keys):
        read.append(keys)
        if crowded and len(read) <= 6:
            raise NoRoomError("of the test")
        reading.set()
        assert go_on.wait(DEADLINE)
        return fetch(claim, keys)

    rig.store.fetch = slow
    rig.start(load)
    assert reading.wait(DEADLINE)
    assert not rig.worker.results({"r"}, False).finished_recving
    begun = len(read)
    go_on.set()
    results = rig.results()
    # As failed, in case it is wanted after all.
    assert results.finished_recving == results.failed_recving == {"r"}
    assert len(read) == begun
    assert not rig.worker.counts.failed_loads and rig.worker.counts.loaded_states == 0
    rig.assert_clean()
    # Nothing is remembered of it.
    rig.store.fetch = fetch
    assert not rig.run(rig.load()).failed_recving


def test_shutdown_drops_loads_that_did_not_start(rig):
    rig = rig(store=SlowStore()).saved()
    rig.start(rig.load("first"), rig.load("second"))
    assert rig.store.reading.wait(DEADLINE)
    rig.store.go_on.set()
    rig.worker.shutdown()
    results = rig.worker.results(set(), False)
    assert results.finished_recving == {"first", "second"}
    rig.assert_clean()


def test_a_worker_that_cannot_start_leaves_no_thread(rig, monkeypatch):
    def fails(*args):
        raise RuntimeError("can't start new thread")

    made, make = [], loads.LoadQueue
    monkeypatch.setattr(worker, "LoadQueue", lambda *args: made.append(make(*args)) or made[0])
    before = set(threading.enumerate())
    monkeypatch.setattr(worker, "Saver", fails)
    with pytest.raises(RuntimeError, match="start new thread"):
        rig()
    assert made, "it ends by itself where nobody holds it"
    for each in set(threading.enumerate()) - before:
        each.join(1.0)
        assert not each.is_alive()


@pytest.mark.parametrize("open_", [True, False])
def test_an_engine_that_lmcache_could_not_close_is_closed(open_):
    """LMCache starts a thread for it."""
    thread, closed = SimpleNamespace(is_alive=lambda: open_), []
    engine = SimpleNamespace(
        storage_manager=SimpleNamespace(thread=thread), close=lambda: closed.append(True)
    )
    connector = object.__new__(HybridConnector)
    connector.worker = connector._queue = connector._client = connector._server = None
    connector._events, connector._cleaners = None, ()
    connector._manager = SimpleNamespace(lmcache_engine=engine, stop_services=lambda: None)
    connector.shutdown()
    assert closed == [True] * open_


def test_a_save_does_not_wait_for_a_load(rig, monkeypatch):
    """The store may take seconds for what a load waits for, and a step waits for its save."""
    monkeypatch.setattr(copy_threads, "WORTH_A_THREAD", 0)
    rig = rig(part_bytes=1).saved()
    load, fetch = rig.load(), rig.store.fetch
    begun, gate = threading.Event(), threading.Event()

    def slow(claim, keys):
        begun.set()
        assert gate.wait(DEADLINE)
        return fetch(claim, keys)

    rig.store.fetch = slow
    rig.start(load)
    assert begun.wait(DEADLINE)
    before = rig.worker.counts.saved_states
    rig.worker.save(rig.save_metadata("other"))
    assert rig.worker.counts.saved_states == before + 1
    gate.set()
    results = rig.results()
    assert results.finished_recving == {"r"} and not results.failed_recving
