# SPDX-License-Identifier: Apache-2.0
"""Questions and answers over LMCache's real ZMQ transports."""

import errno
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from vllm.config import KVTransferConfig

from lmcache_hybrid.core.backoff import Backoff
from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.storage import engine_address, rpc
from lmcache_hybrid.storage.drops import drop
from lmcache_hybrid.storage.keeps import keep
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.rpc import LookupClient, LookupServer
from tests.naive_store import NaiveStore

from .helpers import PLAN, fill, make_prefix
from .lmcache_settings import assert_one_sentence

PREFIX = make_prefix(3)
QUESTION = LookupRequest("r", PREFIX, 3, 0)
HIT = LookupResult(3, 3, (("naive", 3),))


class SlowStore(NaiveStore):
    """Lookups wait until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.asked = threading.Event(), threading.Event()

    def locate(self, keys, deadline=math.inf):
        self.asked.set()
        assert self.go.wait(20)
        return super().locate(keys, deadline)


class Wire:
    """A client and the servers of its ranks."""

    def __init__(self, ranks: int, timeout_ms: int) -> None:
        transfer = KVTransferConfig(
            kv_connector="LMCacheConnectorV1", kv_role="kv_both", engine_id=str(uuid.uuid4())
        )
        config = [
            SimpleNamespace(
                kv_transfer_config=transfer,
                parallel_config=SimpleNamespace(world_size=ranks, rank=rank),
            )
            for rank in range(ranks)
        ]
        self.stores = [SlowStore() for _ in range(ranks)]
        self.lookups = [RankLookup(PLAN, store) for store in self.stores]
        for store in self.stores:
            fill(store, PREFIX, 3, [3])
            store.go.set()
        self.servers = [LookupServer(each) for each in config]
        self.config = config[0]
        self.client = LookupClient(config[0], timeout_ms)
        self.epochs: list[int] = []
        self.dropped: list[DropRequest] = []
        self.sizes = dict.fromkeys(PLAN.groups, 1000)
        self.ledger = Ledger("worker", WorkerCounts())

    def serve(self) -> None:
        for server, lookup, store in zip(self.servers, self.lookups, self.stores):
            cleared, dropped = partial(self.cleared, store), partial(self.drop, store)
            kept = partial(keep, PLAN, store, self.sizes)
            server.serve(lookup, cleared, self.ledger, dropped, kept)

    def drop(self, store: NaiveStore, request: DropRequest) -> DropResult:
        self.dropped.append(request)
        return drop(PLAN, store, request)

    def cleared(self, store: NaiveStore, epoch: int) -> None:
        store.clear(epoch)
        self.epochs.append(epoch)

    def close(self) -> None:
        for store in self.stores:
            store.go.set()
        self.client.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def wire(request, monkeypatch):
    monkeypatch.setattr(rpc, "PAUSE_SECONDS", 0.0)
    made = Wire(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("wire", [(2, 10_000)], indirect=True)
def test_every_rank_answers(wire):
    assert [answer.boundary for answer in wire.client.ask(QUESTION)] == [0, 0], "no store yet"
    wire.serve()
    assert wire.client.ask(QUESTION) == [HIT, HIT]
    assert [len(lookup._claims) for lookup in wire.lookups] == [1, 1]
    assert wire.client.clear(7)
    assert [len(store.records) for store in wire.stores] == [0, 0]
    assert wire.epochs == [7, 7]


def test_ranks_are_reached_in_a_folder_with_a_long_path(monkeypatch):
    """vLLM's own sockets work there: it names them by 36 characters."""
    with tempfile.TemporaryDirectory() as folder:
        folder = f"{folder}/{'x' * (107 - len(folder) - len('/' + '/' + str(uuid.uuid4())))}"
        os.mkdir(folder)
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        wire = Wire(2, 10_000)
        try:
            wire.serve()
            assert wire.client.ask(QUESTION) == [HIT, HIT]
        finally:
            wire.close()


@pytest.mark.parametrize("wire", [(2, 10_000)], indirect=True)
def test_no_other_engine_gets_lookups_of_the_same_engine_id(wire):
    """ZMQ takes an address from whoever listens there, without a word to either."""
    wire.serve()
    with pytest.raises(ConfigError) as error:
        LookupServer(wire.config)
    assert f"engine_id='{wire.config.kv_transfer_config.engine_id}' of" in str(error.value)
    assert_one_sentence(str(error.value))
    assert wire.client.ask(QUESTION) == [HIT, HIT]
    wire.servers[0].close()
    LookupServer(wire.config).close()
    assert not os.path.exists(f"{wire.servers[0]._path}.lock")


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_an_engine_that_was_killed_leaves_its_address_to_the_next(wire):
    wire.servers[0].close()
    code = (
        "import fcntl, os, sys; claim = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)\n"
        "fcntl.flock(claim, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    lock = f"{wire.servers[0]._path}.lock"
    command = [sys.executable, "-c", code, lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(ConfigError):
            LookupServer(wire.config)
        other.kill()
    LookupServer(wire.config).close()
    assert not os.path.exists(lock)


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_turns_nothing_off(wire, number, monkeypatch):
    wire.servers[0].close()

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(engine_address.fcntl, "flock", flock)
    server = LookupServer(wire.config)
    lock = Path(f"{server._path}.lock")
    assert server._address is None
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(lock)]
    server.close()
    lock.unlink()


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_an_address_is_given_back_where_no_socket_can_be_had(wire, monkeypatch):
    wire.servers[0].close()

    def no_socket(*_, **__):
        raise RuntimeError("bind failed")

    with monkeypatch.context() as patch:
        patch.setattr(rpc, "ZmqRouterServerTransport", no_socket)
        with pytest.raises(RuntimeError, match="bind failed"):
            LookupServer(wire.config)
    LookupServer(wire.config).close()


def test_nobody_gives_back_an_address_that_another_engine_holds(tmp_path):
    """Its file was deleted, as by who cleans the temporary folder."""
    path, lock = str(tmp_path / "address"), tmp_path / "address.lock"
    first = engine_address.hold(path, "one")
    lock.unlink()
    second = engine_address.hold(path, "two")
    assert first is not None and second is not None
    engine_address.release(path, first)
    with pytest.raises(ConfigError, match="engine_id='three'"):
        engine_address.hold(path, "three")
    engine_address.release(path, second)
    assert not lock.exists()


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
@pytest.mark.parametrize("taken", ["a folder", "a link"])
def test_an_address_without_a_lock_is_served_all_the_same(wire, taken, tmp_path):
    wire.servers[0].close()
    lock = Path(f"{wire.servers[0]._path}.lock")
    if taken == "a folder":
        lock.mkdir()
    else:
        lock.symlink_to(tmp_path / "elsewhere")
    LookupServer(wire.config).close()
    assert not (tmp_path / "elsewhere").exists()
    lock.rmdir() if taken == "a folder" else lock.unlink()


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_what_a_lookup_found_is_marked_as_used_behind_the_answer(wire, lenient, hybrid_log):
    wire.serve()
    store, order = wire.stores[0], list(wire.stores[0].records)
    assert wire.client.ask(QUESTION) == [HIT]
    done = time.monotonic() + 20
    while list(store.records) == order:
        assert time.monotonic() < done
    store.refresh = None
    assert wire.client.ask(QUESTION) == [HIT]
    assert wire.client.clear(1), "the server has died"
    assert "evicted as if it had not been used" in hybrid_log.text
    assert wire.ledger.counts.caught_errors == lenient == {"refresh_records": 1}


@pytest.mark.parametrize("name", ["recv_request", "send_response"])
@pytest.mark.parametrize("wire", [(1, 500)], indirect=True)
def test_a_rank_whose_socket_failed_once_answers_again(wire, lenient, name, monkeypatch):
    """Without its thread every lookup would miss until the engine is restarted."""
    wire.serve()
    transport, broke = wire.servers[0]._transport, threading.Event()
    original = getattr(transport, name)

    def once(*args):
        monkeypatch.setattr(transport, name, original)
        broke.set()
        raise OSError("too many open files")

    monkeypatch.setattr(transport, name, once)
    wire.client.ask(QUESTION)  # answered late, or never
    assert broke.wait(20)
    assert wire.client.ask(QUESTION) == [HIT]
    assert wire.ledger.counts.caught_errors == lenient == {"serve_lookup": 1}


@pytest.mark.parametrize("wire", [(2, 10_000)], indirect=True)
def test_a_reset_that_fails_on_one_rank_is_no_success(wire, lenient, hybrid_log):
    wire.serve()
    wire.stores[1].clear = None
    assert not wire.client.clear(1)
    assert wire.stores[1].records
    assert wire.ledger.counts.caught_errors == lenient == {"reset_store": 1}
    assert "so the reset fails: repeat it, or restart the engine" in hybrid_log.text


DROP = DropRequest(PREFIX, 0, 3, 0, 0)


@pytest.mark.parametrize("wire", [(2, 10_000)], indirect=True)
def test_records_are_dropped_on_every_rank(wire):
    assert [bool(result.refusal) for result in wire.client.drop(DROP)] == [True, True]
    wire.serve()
    before = time.monotonic()
    assert wire.client.drop(DROP) == [DropResult(3, {"naive": 3 + len(PLAN.states)})] * 2
    assert not any(store.records for store in wire.stores)
    assert all(before + 8 <= each.deadline <= time.monotonic() + 8 for each in wire.dropped)


KEEP = KeepRequest(PREFIX, (3,), b"salt", 60, 0.25, ("naive",))


@pytest.mark.parametrize("wire", [(2, 10_000)], indirect=True)
def test_records_are_kept_on_every_rank(wire):
    assert [result.failure for result in wire.client.keep(KEEP)] == ["A rank has no store."] * 2
    wire.serve()
    assert wire.client.keep(KEEP) == [KeepResult({"naive": ""})] * 2
    assert [store.kept["naive"].size for store in wire.stores] == [
        1000 * (3 + len(PLAN.states))
    ] * 2


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_what_comes_after_its_caller_has_given_up_is_not_done(wire):
    """Other requests may have been promised the records since, or a reset may have come."""
    wire.serve()

    def late(verb, body):
        frames = [verb, msgspec.msgpack.encode(body), time.monotonic() - 1]
        return wire.client._transport.send_and_recv_all(frames)[0]

    assert msgspec.msgpack.decode(late("drop", DROP), type=DropResult) == DropResult(waits=True)
    assert wire.stores[0].records and not wire.dropped
    assert msgspec.msgpack.decode(late("keep", KEEP), type=KeepResult).failure
    assert not wire.stores[0].kept["naive"].size
    assert wire.client.clear(2) and not wire.client.clear(1) and wire.client.clear(2)
    assert wire.epochs == [2, 2]


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_a_keep_that_raises_is_a_failure(wire, lenient):
    wire.serve()
    wire.sizes.clear()
    (result,) = wire.client.keep(KEEP)
    assert "unexpected error" in result.failure
    assert wire.ledger.counts.caught_errors == lenient == {"keep_records": 1}
    assert wire.client.ask(QUESTION) == [HIT], "the server has died"


@pytest.mark.parametrize("wire", [(2, 200)], indirect=True)
def test_a_drop_that_a_rank_does_not_answer_has_no_result(wire):
    wire.serve()
    wire.servers[1]._running = False
    wire.servers[1]._thread.join()
    assert wire.client.drop(DROP) == []
    wire.client._pause = Backoff(1000.0, 1000.0)
    wire.client._pause.fail()
    assert wire.client.drop(DROP) == []


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_a_drop_that_raises_is_a_failure(wire, lenient):
    wire.serve()
    wire.stores[0].remove = None
    (result,) = wire.client.drop(DROP)
    assert "unexpected error" in result.failure
    assert wire.ledger.counts.caught_errors == lenient == {"drop_records": 1}
    assert wire.client.ask(QUESTION) == [HIT], "the server has died"


@pytest.mark.parametrize("wire", [(2, 200)], indirect=True)
def test_a_reset_that_a_rank_does_not_answer_is_no_success(wire):
    wire.serve()
    wire.servers[1]._running = False
    wire.servers[1]._thread.join()
    assert not wire.client.clear(1)


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_a_reset_before_there_is_a_store_empties_it_before_it_serves(wire):
    assert wire.client.clear(3), "nothing can be served by this rank"
    assert wire.epochs == [] and wire.stores[0].records
    wire.serve()
    assert wire.epochs == [3] and not wire.stores[0].records


@pytest.mark.parametrize("wire", [(1, 200)], indirect=True)
def test_a_reset_goes_through_while_lookups_pause(wire):
    wire.serve()
    wire.stores[0].go.clear()
    wire.client._pause = Backoff(1000.0, 1000.0)
    assert wire.client.ask(QUESTION) == []
    wire.stores[0].go.set()
    done = time.monotonic() + 20
    while not wire.client.clear(1):
        assert time.monotonic() < done
    assert wire.client.ask(QUESTION) == [], "lookups do not pause"


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
def test_a_lookup_that_raises_is_a_miss(wire, lenient, hybrid_log):
    """Each is counted, and the first one is logged with its traceback: a busy engine has many."""
    wire.serve()
    wire.stores[0].locate = None
    for _ in range(3):
        assert wire.client.ask(QUESTION) == [UNAVAILABLE]
    del wire.stores[0].locate
    assert wire.client.ask(QUESTION) == [HIT], "the server has died"
    assert wire.ledger.counts.caught_errors == lenient == {"answer_lookup": 3}
    (warning,) = [record for record in hybrid_log.records if record.levelname == "WARNING"]
    assert warning.exc_info and "only counted" in warning.getMessage()


@pytest.mark.parametrize("wire", [(1, 10_000)], indirect=True)
@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"] * 3,
        [b"\xa3ask", b"\xc4\x00", b"\x00", b"\x00"],
        [b"\xa3ask", b"\xc4\x00", b"\x00"],
        [b"\xa7adapter", b"\xc4\x00", b"\x00"],
        [b"\xa5clear", b"\xc4\x00", b"\x00"],
        [b"\xa4drop", b"\xc4\x00", b"\x00"],
        [b"\x90", b"\xc4\x00", b"\x00"],  # a list for a verb
        [b"\x91" * 10_000 + b"\x90", b"\xc4\x00", b"\x00"],  # lists in lists
    ],
    ids=["bytes", "four", "ask", "adapter", "clear", "drop", "list", "deep"],
)
def test_a_message_that_is_none_does_not_end_the_server(wire, hybrid_log, frames):
    wire.serve()
    (stranger,) = LookupClient(wire.config, 10_000)._transport.sockets
    stranger.send_multipart(frames)
    done = time.monotonic() + 20
    while "WARNING" not in {record.levelname for record in hybrid_log.records}:
        assert time.monotonic() < done
    assert wire.client.ask(QUESTION) == [HIT]
    stranger.close(linger=0)


@pytest.mark.parametrize("wire", [(2, 10_000)], indirect=True)
def test_a_store_that_is_slow_is_answered_for_in_time(wire):
    """Else one slow lookup pauses all others."""
    wire.serve()
    slow, locate = wire.stores[1], wire.stores[1].locate
    given = []

    def until_the_deadline(keys, deadline):
        given.append(deadline - time.monotonic())
        return {}

    slow.locate = until_the_deadline
    assert [answer.boundary for answer in wire.client.ask(QUESTION)] == [3, 0]
    (left,) = given
    assert 0 < left <= 8, "no time is left to answer in"
    slow.locate = locate
    assert wire.client.ask(QUESTION) == [HIT, HIT]


@pytest.mark.parametrize("wire", [(1, 50)], indirect=True)
def test_the_pause_grows_while_a_rank_does_not_answer(wire, monkeypatch, hybrid_log):
    now = time.monotonic()
    clock = [now]
    monkeypatch.setattr(rpc.time, "monotonic", lambda: clock[0])
    wire.client._pause = Backoff(1.0, 3.0)
    wire.serve()
    send, pauses = wire.client._transport.send_and_recv_all, []
    wire.client._transport.send_and_recv_all = lambda frames: []
    for _ in range(4):
        assert wire.client.ask(QUESTION) == []
        pauses.append(wire.client._pause.until - clock[0])
        clock[0] = wire.client._pause.until
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    wire.client._transport.send_and_recv_all = send
    while not wire.client.ask(QUESTION):  # a machine that is busy
        clock[0] = wire.client._pause.until
    wire.client._transport.send_and_recv_all = lambda frames: []
    assert wire.client.ask(QUESTION) == []
    assert wire.client._pause.until - clock[0] == 1.0


@pytest.mark.parametrize("wire", [(2, 200)], indirect=True)
@pytest.mark.parametrize("dropped", ["while it is answered", "before it is taken up"])
def test_a_late_answer_keeps_no_claim(wire, dropped):
    """One rank is too slow: the scheduler computes, and no pin outlives its drop."""
    wire.serve()
    slow, lookup = wire.stores[1], wire.lookups[1]
    slow.go.clear()
    if dropped == "before it is taken up":
        # Another request keeps the rank busy; ours waits behind it.
        assert wire.client.ask(LookupRequest("other", PREFIX, 3, 0)) == []
    assert wire.client.ask(QUESTION) == []
    assert slow.asked.wait(20)
    for each in wire.lookups:
        each.release("other")
        each.release("r")
    slow.go.set()
    done = time.monotonic() + 20
    while wire.client.ask(LookupRequest("next", PREFIX, 3, 0)) != [HIT, HIT]:
        assert time.monotonic() < done
    assert list(lookup._claims) == ["next"]
    lookup.release("next")
    assert slow.pins.total() == 0
