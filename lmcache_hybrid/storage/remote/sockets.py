# SPDX-License-Identifier: Apache-2.0
"""Reads values of one Redis server from the socket into LMCache's pool, without a copy.

LMCache's connector reads a key with the value's size, then the value as a bytes object, on the
event loop with the GIL held, and copies it. A value says its length itself, so here one command
reads it to where it belongs. redis-py makes the connections: login, TLS, sockets in files.
"""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

# Bytes of the line before a value, at most; a longer one is no reply of Redis.
LONGEST_LINE = 512
# Connections that wait for the next read; each thread that reads needs one.
KEPT = 8

# Gives writable memory for so many bytes; None for no memory.
Reserve = Callable[[int], memoryview | None]


def options(seconds: float) -> dict[str, Any]:
    """Options of redis-py's connections, beside login and TLS, for a :class:`SocketReader`."""
    return {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # nothing comes that was not asked for
    }


class NoMemoryError(Exception):
    """Nobody has memory for a value of this size."""


class SocketReader:
    """Connections to one server. Any thread may call it; owns them until closed."""

    def __init__(self, pool: redis.ConnectionPool, seconds: float) -> None:
        """Connect when first asked.

        Args:
            pool: makes connections; it must have been made with :func:`options`.
            seconds: for one value, connecting included.
        """
        self._pool, self._seconds = pool, seconds
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._closed = False

    def read(self, name: str, reserve: Reserve, stale: str) -> bool:
        """Read a value into the memory that ``reserve`` gives for its size.

        Where the server has closed an idle connection, it is asked once more on a new one.

        Args:
            name: of the value.
            stale: name of a value to delete where this one is missing.

        Returns:
            False where the server has no such value.

        Raises:
            NoMemoryError: ``reserve`` gave none.
            redis.RedisError, OSError: the server did not answer in time, refused or failed. What
                is in the memory is then undefined.
        """
        deadline = time.monotonic() + self._seconds
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._read_on(connection, name, reserve, stale, deadline)
            except (redis.ConnectionError, ConnectionError):
                self._forget()  # the others were closed as well
        return self._read_on(self._pool.make_connection(), name, reserve, stale, deadline)

    def _read_on(
        self, connection: Any, name: str, reserve: Reserve, stale: str, deadline: float
    ) -> bool:
        try:
            connection.connect()
            connection.send_command("GET", name)
            found = receive(connection._sock, reserve, deadline)
            if not found:
                connection.send_command("DEL", stale)
                connection.read_response()
        except BaseException:
            connection.disconnect()  # it may be in the middle of a value
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) < KEPT
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.disconnect()
        return found

    def _forget(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        """Close what is idle now, and the rest when its read ends."""
        self._closed = True
        self._forget()


def receive(sock: socket.socket, reserve: Reserve, deadline: float) -> bool:
    """Receive the reply to one GET; see :meth:`SocketReader.read`.

    Args:
        deadline: ``time.monotonic``.
    """
    head = bytearray()
    while (end := head.find(b"\r\n")) < 0:
        if len(head) > LONGEST_LINE:
            raise ConnectionError("the server's reply is not one of Redis")
        head += _some(sock, 64, deadline)
    line, rest = bytes(head[:end]), head[end + 2 :]
    if line == b"$-1":
        return False
    if not line.startswith(b"$") or not line[1:].isdigit():
        raise redis.ResponseError(line.decode(errors="replace"))
    size = int(line[1:])
    memory = reserve(size)
    if memory is None:
        raise NoMemoryError(f"no memory for a value of {size} bytes")
    got = min(len(rest), size)
    memory[:got] = rest[:got]
    while got < size:
        sock.settimeout(_left(deadline))
        received = sock.recv_into(memory[got:])
        if not received:
            raise ConnectionError("the server closed the connection in the middle of a value")
        got += received
    rest = rest[size:]
    while len(rest) < 2:
        rest += _some(sock, 2 - len(rest), deadline)
    if rest != b"\r\n":
        raise ConnectionError("the server's reply does not end where it said")
    return True


def _some(sock: socket.socket, most: int, deadline: float) -> bytes:
    sock.settimeout(_left(deadline))
    received = sock.recv(most)
    if not received:
        raise ConnectionError("the server closed the connection")
    return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the server did not answer in time")
    return left
