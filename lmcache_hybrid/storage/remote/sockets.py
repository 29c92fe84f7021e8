# SPDX-License-Identifier: Apache-2.0
"""Speaks Redis' protocol on a connected socket, without copying values.

A reply begins with its value's length, so it is received right into its memory. Python receives
and sends with the GIL released.
"""

import socket
import time
from collections.abc import Callable

import redis
from redis.exceptions import AskError, MovedError, ReadOnlyError

# Max bytes of the line before a value; a longer one is not from Redis.
LONGEST_LINE = 512
# Bytes to receive at once of replies that are short lines.
LINES_BYTES = 1 << 16

# Returns writable memory of a size in bytes; None if there is none.
Reserve = Callable[[int], memoryview | None]

_ERRORS = {b"MOVED": MovedError, b"ASK": AskError, b"READONLY": ReadOnlyError}


class NoMemoryError(Exception):
    """There is no memory for a value of this size."""


def command(*words: bytes) -> bytes:
    """Encode a command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def send(sock: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    """Send all of ``data``.

    Args:
        deadline: ``time.monotonic``.
    """
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def send_value(sock: socket.socket, name: bytes, value: memoryview, deadline: float) -> None:
    """Send a SET without copying the value."""
    for part in (_head_of_set(name, value.nbytes), value, b"\r\n"):
        send(sock, part, deadline)


def refused_size(
    sock: socket.socket, name: bytes, size: int, deadline: float
) -> redis.ResponseError | None:
    """Ask whether the server refuses a value because of its size; None if it waits for it.

    It closes the connection of a client that sends such a value, and its words are lost then. The
    connection is of no use after this.
    """
    send(sock, _head_of_set(name, size), deadline)
    try:
        (answer,) = replies(sock, 1, deadline)
    except TimeoutError:
        return None
    return answer if isinstance(answer, redis.ResponseError) else None


def _head_of_set(name: bytes, size: int) -> bytes:
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, size)


def replies(sock: socket.socket, count: int, deadline: float) -> list[bytes | redis.ResponseError]:
    """Receive ``count`` replies of one line each: ``:1``, ``+OK`` or an error.

    Raises:
        ConnectionError: other replies came, or more than ``count``.
        OSError: the server did not answer in time, or closed the connection.
    """
    got = bytearray()
    lines = 0
    while lines < count or not got.endswith(b"\r\n"):
        if len(got) > LONGEST_LINE * count:
            raise ConnectionError("the server's replies are not those of Redis")
        some = _some(sock, LINES_BYTES, deadline)
        lines += some.count(b"\n")
        got += some
    found = [_reply(line) for line in bytes(got).split(b"\r\n")[:-1]]
    if len(found) != count:
        raise ConnectionError(f"the server gave {len(found)} replies instead of {count}")
    return found


def _reply(line: bytes) -> bytes | redis.ResponseError:
    if line[:1] == b"-":
        return _error(line)
    if line[:1] not in (b":", b"+"):
        raise ConnectionError("the server's reply is not one of Redis")
    return line[1:]


def _error(line: bytes) -> redis.ResponseError:
    kind, _, rest = line[1:].partition(b" ")
    try:
        return _ERRORS[kind](rest.decode(errors="replace"))
    except (KeyError, ValueError):
        return redis.ResponseError(line.decode(errors="replace"))


def receive(
    sock: socket.socket,
    reserve: Reserve,
    deadline: float,
    got: Callable[[int], object] = lambda size: None,
) -> bool:
    """Receive the reply to one GET into the memory that ``reserve`` gives for its size.

    Args:
        deadline: ``time.monotonic``.
        got: called with the number of bytes as they arrive; raises to end the read.

    Returns:
        False where the server has no such value.

    Raises:
        NoMemoryError: ``reserve`` gave none.
        redis.RedisError, OSError: the server did not answer in time, refused or failed. The
            memory's content is then undefined.
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
        raise _error(line)
    size = int(line[1:])
    memory = reserve(size)
    if memory is None:
        raise NoMemoryError(f"no memory for a value of {size} bytes")
    have = min(len(rest), size)
    memory[:have] = rest[:have]
    while have < size:
        sock.settimeout(_left(deadline))
        received = sock.recv_into(memory[have:])
        if not received:
            raise ConnectionError("the server closed the connection in the middle of a value")
        have += received
        got(received)
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
