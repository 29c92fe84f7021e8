# SPDX-License-Identifier: Apache-2.0
"""Lookups between hosts over real TCP sockets, through a network that listens and interferes."""

import contextlib
import dataclasses
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from vllm.config import KVTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.backoff import Backoff
from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.protocol.drop import DropRequest
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata, LoadSpec
from lmcache_hybrid.storage import hosts, rpc
from lmcache_hybrid.storage.drops import drop
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.rpc import LookupClient, LookupServer
from tests.naive_store import NaiveStore

from .helpers import PLAN, fill, make_prefix
from .lmcache_settings import assert_one_sentence

PREFIX = make_prefix(3)
QUESTION = LookupRequest("a-request", PREFIX, 3, 0)
HIT = LookupResult(3, 3, (("naive", 3),))
HOSTS = ("127.0.0.2", "127.0.0.3")
RANKS = len(HOSTS)
FAR = 1e6  # seconds between the clocks of scheduler and ranks


class Network:
    """Passes a rank's connections on, and keeps what the scheduler sends.

    Attributes:
        sent: bytes of each connection to the rank.
        holds: nothing passes; what was sent meanwhile is lost, as are the connections.
        tears: this many bytes of each further connection pass, then it breaks.
        flips: likewise, but the next byte arrives changed.
    """

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._rank = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.sent: list[bytearray] = []
        self.holds = False
        self.tears = self.flips = math.inf
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._rank)
                self._open += near, far
                self.sent.append(bytearray())
                for ends in ((near, far, self.sent[-1]), (far, near, None)):
                    self._start(self._pass, *ends)

    def _pass(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.holds:
                    continue
                if kept is not None:
                    data = self._damage(len(kept), data)
                    kept += data
                sink.sendall(data)
                if kept is not None and len(kept) >= self.tears:
                    break
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _damage(self, before: int, data: bytes) -> bytes:
        at = self.flips - before
        if 0 <= at < len(data):
            at = int(at)
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        left = self.tears - before
        return data if left == math.inf else data[: int(left)]

    def replay(self, data: bytes) -> None:
        """Send a rank what somebody else had sent, on a connection of our own."""
        with socket.create_connection(self._rank) as stranger:
            stranger.sendall(data)
            stranger.settimeout(2.0)
            with contextlib.suppress(OSError):
                while stranger.recv(1 << 16):
                    pass

    def close(self) -> None:
        for each in (self._server, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that uses it
        for thread in self._threads:
            thread.join(timeout=10)
        for each in (self._server, *self._open):
            each.close()


class Gather:
    """In place of ``torch.distributed.all_gather_object``, for ranks that are threads."""

    def __init__(self) -> None:
        self.world_size, self.cpu_group, self._said = RANKS, None, {}
        self._all = threading.Barrier(RANKS)

    def gather(self, ranks: list, own: object, group: object) -> None:
        self._said[threading.current_thread().name] = own
        self._all.wait(20)
        ranks[:] = [self._said[str(rank)] for rank in range(RANKS)]


class Engine:
    """Two ranks on addresses of their own, and their scheduler."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, timeout_ms: int, addresses: Sequence[str] = HOSTS
    ) -> None:
        self.transfer = KVTransferConfig(
            kv_connector="LMCacheConnectorV1", kv_role="kv_both", engine_id=str(uuid.uuid4())
        )
        self.stores, self.lookups, self.servers = [], [], []
        for rank, host in enumerate(addresses):
            monkeypatch.setenv("VLLM_HOST_IP", host)
            self.servers.append(LookupServer(self.config(rank)))
            self.stores.append(NaiveStore())
            fill(self.stores[-1], PREFIX, 3, [3])
            self.lookups.append(RankLookup(PLAN, self.stores[-1]))
        gather = Gather()
        monkeypatch.setattr(parallel_state, "get_world_group", lambda: gather)
        monkeypatch.setattr(hosts.torch.distributed, "all_gather_object", gather.gather)
        self.ledger = Ledger("worker", WorkerCounts())
        self.client = LookupClient(self.config(0), timeout_ms)
        self.client._pause = Backoff(0.0, 0.0)
        self.networks: list[Network] = []

    def config(self, rank: int) -> SimpleNamespace:
        parallel = SimpleNamespace(world_size=RANKS, rank=rank, nnodes_within_dp=2)
        return SimpleNamespace(kv_transfer_config=self.transfer, parallel_config=parallel)

    def introduce(self) -> hosts.Introduction:
        found = {}

        def meet(rank: int) -> None:
            found[rank] = self.servers[rank].introduce()

        threads = [
            threading.Thread(target=meet, args=(rank,), name=str(rank)) for rank in range(RANKS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found[1] is None
        return found[0]

    def connect(self) -> hosts.Introduction:
        """Introduce all, with a network before each rank."""
        known = self.introduce()
        self.networks = [Network(address) for address in known.addresses]
        addresses = tuple(network.address for network in self.networks)
        self.client.connect(dataclasses.replace(known, addresses=addresses))
        self.serve()
        return known

    def serve(self) -> None:
        for server, lookup, store in zip(self.servers, self.lookups, self.stores):
            server.serve(
                lookup, store.clear, self.ledger, lambda each, store=store: drop(PLAN, store, each)
            )

    def eventually(self) -> None:
        """A good lookup is answered, at the latest after a few that time out."""
        done = time.monotonic() + 20
        while self.client.ask(QUESTION) != [HIT, HIT]:
            assert time.monotonic() < done

    def close(self) -> None:
        self.client.close()
        for each in (*self.networks, *self.servers):
            each.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch) -> Iterator[Engine]:
    made = Engine(monkeypatch, request.param)
    yield made
    made.close()


slow = pytest.mark.parametrize("engine", [10_000], indirect=True)
quick = pytest.mark.parametrize("engine", [300], indirect=True)


@slow
def test_ranks_on_two_hosts_answer_and_nothing_of_it_can_be_read(engine):
    known = engine.connect()
    assert [each.split(":")[1] for each in known.addresses] == [f"//{host}" for host in HOSTS]
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    assert [len(lookup._claims) for lookup in engine.lookups] == [1, 1]
    (result, _) = engine.client.drop(DropRequest(PREFIX, 0, 3, 0, 0))
    assert result.removed == {"naive": 3 + len(PLAN.states)}
    assert engine.client.clear(7)
    for network in engine.networks:
        assert network.sent[0].startswith(b"\xff") and b"CURVE" in network.sent[0]
        assert msgspec.msgpack.encode(PREFIX) not in network.sent[0]
        assert b"a-request" not in network.sent[0] and known.secret_key not in network.sent[0]
    assert str(known.secret_key) not in repr(known)


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
def test_ranks_with_ipv6_addresses_answer(monkeypatch):
    with contextlib.closing(Engine(monkeypatch, 10_000, ("::1", "::1"))) as engine:
        known = engine.introduce()
        assert all(each.startswith("tcp://[::1]:") for each in known.addresses)
        engine.client.connect(known)
        engine.serve()
        assert engine.client.ask(QUESTION) == [HIT, HIT]


def stranger(known: hosts.Introduction, rank: int, kind: str) -> zmq.Socket:
    made = zmq.Context.instance().socket(zmq.REQ)
    made.setsockopt(zmq.RCVTIMEO, 1000)
    made.setsockopt(zmq.SNDTIMEO, 1000)  # there is nobody to send to once it was turned away
    made.setsockopt(zmq.LINGER, 0)
    if kind != "no key":
        public, secret = zmq.curve_keypair()
        made.setsockopt(zmq.CURVE_SERVERKEY, known.rank_keys[rank])
        made.setsockopt(zmq.CURVE_PUBLICKEY, known.public_key if kind == "copied key" else public)
        made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    made.connect(known.addresses[rank])
    return made


@slow
@pytest.mark.parametrize("kind", ["no key", "own key", "copied key"])
def test_a_forged_message_reaches_no_rank(engine, kind, hybrid_log):
    """Whoever listens on the network knows all public keys, and no secret one."""
    known = engine.connect()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    for _ in range(2):
        with contextlib.closing(stranger(known, 1, kind)) as other:
            pack = msgspec.msgpack.encode
            with pytest.raises(zmq.Again):
                other.send_multipart([pack("clear"), pack(pack(9)), pack(0.0)])
                other.recv()
    assert engine.stores[1].records, "a stranger has emptied the store"
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    # The other two do not get so far as to name a key.
    assert hybrid_log.text.count("was turned away at tcp://127.0.0.3:") == (kind == "own key")


@quick
def test_nobody_is_let_in_before_the_ranks_know_the_scheduler(engine):
    engine.serve()
    address, key = engine.servers[0]._transport.address, engine.servers[0]._transport._public_key
    public, secret = zmq.curve_keypair()
    known = hosts.Introduction((address,), (key,), public, secret)
    client = LookupClient(engine.config(0), 1000)
    client.connect(known)
    assert not client.clear(9)
    client.close()
    assert engine.stores[0].records


@slow
def test_replayed_messages_reach_no_rank(engine):
    engine.connect()
    assert engine.client.clear(1)
    fill(engine.stores[1], PREFIX, 3, [3])
    for _ in range(3):
        engine.networks[1].replay(bytes(engine.networks[1].sent[0]))
    assert engine.stores[1].records, "an old reset was obeyed again"
    fill(engine.stores[0], PREFIX, 3, [3])
    assert engine.client.ask(QUESTION) == [HIT, HIT]


@quick
@pytest.mark.parametrize("harm", ["tears", "flips"])
def test_a_torn_or_changed_message_is_a_miss_and_the_next_lookup_hits(engine, harm):
    engine.connect()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    network, before = engine.networks[1], len(engine.networks[1].sent[0])
    asked = engine.lookups[1]._answering
    # Within the lookup, past the header of its first frame.
    setattr(network, harm, before + 40)
    assert engine.client.ask(msgspec.structs.replace(QUESTION, number=5)) == []
    setattr(network, harm, math.inf)
    engine.eventually()
    assert engine.lookups[1]._answering[1] == asked[1], "a part of a message was obeyed"
    assert len(network.sent) > 1, "its connection was kept"


@quick
def test_a_host_that_is_lost_is_a_miss_and_is_asked_again_once_it_is_back(engine):
    engine.connect()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    engine.networks[1].holds = True
    before = time.monotonic()
    assert engine.client.ask(QUESTION) == []
    assert time.monotonic() - before < 5
    assert not engine.client.clear(1), "a reset that a host did not confirm"
    engine.networks[1].holds = False
    fill(engine.stores[0], PREFIX, 3, [3])
    engine.eventually()


@quick
def test_a_rank_that_died_is_a_miss(engine):
    engine.connect()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    engine.servers[1].close()
    assert engine.client.ask(QUESTION) == []
    assert not engine.client.clear(1)


class Clocks:
    """Clocks of two hosts: ranks answer on threads of this name, and the scheduler on others."""

    def __init__(self) -> None:
        self.apart, self.sleep = FAR, time.sleep

    def monotonic(self) -> float:
        there = threading.current_thread().name == "hybrid-lookup"
        return time.monotonic() + (self.apart if there else 0.0)


@slow
def test_a_deadline_is_in_the_time_of_the_rank_and_never_late(engine, monkeypatch):
    clocks, deadlines = Clocks(), []
    monkeypatch.setattr(hosts, "time", clocks)
    engine.connect()
    for lookup in engine.lookups:
        lookup.answer = lambda request: deadlines.append(request.deadline) or HIT
    for apart in (FAR, -FAR):
        clocks.apart = apart
        monkeypatch.setattr(hosts, "CLOCK_SECONDS", 0.0)  # their clocks may have run apart
        deadlines.clear()
        before = time.monotonic()
        assert engine.client.ask(QUESTION) == [HIT, HIT]
        after = time.monotonic()
        for deadline in deadlines:
            assert before + 8 - (after - before) <= deadline - apart <= after + 8
        monkeypatch.setattr(hosts, "CLOCK_SECONDS", 60.0)
        deadlines.clear()
        sent = time.monotonic()
        assert engine.client.ask(QUESTION) == [HIT, HIT]
        assert all(sent + 7 <= deadline - apart <= sent + 8.001 for deadline in deadlines)


@slow
def test_a_clock_that_has_lost_time_is_noticed_with_the_next_answer(engine, monkeypatch):
    clocks, deadlines = Clocks(), []
    monkeypatch.setattr(hosts, "time", clocks)
    engine.connect()
    for lookup in engine.lookups:
        lookup.answer = lambda request: deadlines.append(request.deadline) or HIT
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    clocks.apart -= 100.0  # the host was paused
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    deadlines.clear()
    sent = time.monotonic()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    assert all(sent + 7 <= deadline - clocks.apart <= sent + 8.001 for deadline in deadlines)


@slow
def test_asking_for_the_clocks_takes_no_time_from_the_lookup(engine, monkeypatch):
    deadlines, busy = [], 0.5
    engine.connect()
    for server in engine.servers:
        server._verbs[hosts.CLOCK] = lambda body, deadline: time.sleep(busy) or True
    for lookup in engine.lookups:
        lookup.answer = lambda request: deadlines.append(request.deadline) or HIT
    monkeypatch.setattr(hosts, "CLOCK_SECONDS", 0.0)
    before = time.monotonic()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    assert all(deadline >= before + 8 + busy / 2 for deadline in deadlines)


@quick
def test_a_lookup_that_waited_too_long_makes_no_claim_whatever_the_clocks(engine, monkeypatch):
    """A drop that comes before its lookup is not remembered: only the deadline ends that lookup."""
    monkeypatch.setattr(hosts, "time", Clocks())
    monkeypatch.setattr(
        "lmcache_hybrid.storage.rank_lookup.time",
        SimpleNamespace(monotonic=hosts.time.monotonic, perf_counter=time.perf_counter),
    )
    engine.connect()
    assert engine.client.ask(QUESTION) == [HIT, HIT]
    go, lookup = threading.Event(), engine.lookups[1]
    locate, asked = engine.stores[1].locate, threading.Event()

    def slowly(keys, deadline=math.inf):
        asked.set()
        assert go.wait(20)
        return locate(keys, deadline)

    engine.stores[1].locate = slowly
    assert engine.client.ask(LookupRequest("other", PREFIX, 3, 0)) == []
    assert asked.wait(20)
    engine.client._transport._learned = math.inf  # else the clocks are asked first, in vain
    assert engine.client.ask(LookupRequest("late", PREFIX, 3, 0)) == []
    for each in engine.lookups:
        for name in ("a-request", "other", "late"):
            each.release(name)
    engine.stores[1].locate = locate
    go.set()
    engine.eventually()
    assert list(lookup._claims) == ["a-request"]


@pytest.mark.parametrize(
    "address, reason",
    [("0.0.0.0", "finds no address of this host"), ("192.0.2.7", "can listen at 192.0.2.7")],
)
def test_a_host_without_an_address_of_its_own_is_refused(address, reason, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", address)
    with pytest.raises(ConfigError) as error:
        hosts.ServerTransport(0, 200)
    assert reason in str(error.value) and "set VLLM_HOST_IP" in str(error.value)
    assert_one_sentence(str(error.value))


@slow
def test_a_scheduler_that_was_told_nothing_asks_nobody(engine):
    assert engine.client.ask(QUESTION) == []
    assert engine.client.contents(None) == ()
    assert engine.client.clear(1), "ranks that nobody can ask serve nothing"


def test_loads_get_deadlines_of_the_rank_they_run_on(monkeypatch):
    load = LoadSpec("r", PREFIX, 0, 3, (), (), deadline=105.0)
    for now in (1e7, 3.0):
        monkeypatch.setattr("lmcache_hybrid.protocol.metadata.time.monotonic", lambda now=now: now)
        metadata = ConnectorMetadata((load,), step=4, sent=100.0)
        (moved,) = metadata.on_this_clock().loads
        assert moved == dataclasses.replace(load, deadline=now + 5.0)
        assert metadata.on_this_clock().step == 4
    assert NOTHING.on_this_clock() is NOTHING


def test_ranks_on_one_host_have_no_introduction(monkeypatch):
    parallel = SimpleNamespace(world_size=1, rank=0, nnodes_within_dp=1)
    transfer = KVTransferConfig(
        kv_connector="LMCacheConnectorV1", kv_role="kv_both", engine_id=str(uuid.uuid4())
    )
    server = LookupServer(SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel))
    try:
        assert server.introduce() is None and "/" in server._transport.socket_path
        assert isinstance(server._transport, rpc.ZmqRouterServerTransport)
        assert not isinstance(server._transport, hosts.ServerTransport)
    finally:
        server.close()


class Side(HybridConnector):
    """A connector that was not started."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def test_rank_0_hands_the_scheduler_what_it_needs():
    known = hosts.Introduction(("tcp://127.0.0.2:1",), (b"key",), b"public", b"secret")
    connected: list[hosts.Introduction] = []
    scheduler = Side(_client=SimpleNamespace(connect=connected.append))
    told = {
        rank: Side(_introduction=each).get_handshake_metadata()
        for rank, each in enumerate((known, None))
    }
    scheduler.set_xfer_handshake_metadata({rank: each for rank, each in told.items() if each})
    assert connected == [known]
    scheduler.set_xfer_handshake_metadata(
        {0: KVConnectorHandshakeMetadata()}
    )  # another connector's
    assert connected == [known]
    Side(_client=None).set_xfer_handshake_metadata({0: known})  # a scheduler that is off


def test_a_scheduler_that_cannot_connect_goes_on_without_the_cache(lenient, hybrid_log):
    def connect(introduction):
        raise OSError("too many open files")

    known = hosts.Introduction(("tcp://a:1",), (b"key",), b"public", b"secret")
    scheduler = Side(_client=SimpleNamespace(connect=connect), scheduler="one", worker=None)
    scheduler.set_xfer_handshake_metadata({0: known})
    assert scheduler.scheduler is None and lenient == {"start": 1}
    assert "LMCache is off" in hybrid_log.text and "too many open files" in hybrid_log.text


@pytest.mark.parametrize("spans", [False, True])
def test_a_rank_loads_by_its_own_clock_only_where_the_scheduler_has_another(spans):
    begun: list[ConnectorMetadata] = []
    worker = SimpleNamespace(start_loads=begun.append, ledger=None)
    load = LoadSpec("r", PREFIX, 0, 3, (), (), deadline=105.0)
    metadata = ConnectorMetadata((load,), sent=100.0)
    Side(_hosts=spans, worker=worker, scheduler=None).bind_connector_metadata(metadata)
    ((moved,),) = (each.loads for each in begun)
    assert moved.deadline == (pytest.approx(time.monotonic() + 5, abs=5) if spans else 105.0)
