# SPDX-License-Identifier: Apache-2.0
"""The plainest programs that read values from RAM, from files or from a Redis.

Also run inside an engine (:func:`prepare`, :func:`read`), so it imports nothing of the package.
"""

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# The values that :func:`prepare` laid down, by kind: read all of them.
_reads: dict[str, Callable[[], None]] = {}


def prepare(kind: str, sizes: Sequence[int], folder: str, port: int) -> None:
    """Lay values of these sizes (bytes) down, and read them once.

    Args:
        kind: ram, disk or redis.
        folder: for files.
        port: of a Redis on this machine.
    """
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    targets = [np.ones(size, np.uint8) for size in sizes]
    if kind == "ram":
        _reads[kind] = lambda: copy(values, targets)
    elif kind == "disk":
        files = [Path(folder) / str(index) for index in range(len(sizes))]
        for file, value in zip(files, values, strict=True):
            file.write_bytes(value)
        _reads[kind] = lambda: read_files(files, targets)
    else:
        names = [b"plain/%d" % index for index in range(len(sizes))]
        connection = socket.create_connection(("127.0.0.1", port))
        for name, value in zip(names, values, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, value.nbytes)
            connection.sendall(head + value.tobytes() + b"\r\n")
            assert connection.recv(64) == b"+OK\r\n"
        _reads[kind] = lambda: get(connection, names, targets)
    _reads[kind]()
    assert all(map(np.array_equal, values, targets))


def read(kind: str) -> float:
    """Read what :func:`prepare` has laid down. Returns seconds."""
    started = time.perf_counter()
    _reads[kind]()
    return time.perf_counter() - started


def copy(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def read_files(files: Sequence[Path], targets: Sequence[np.ndarray]) -> None:
    for path, target in zip(files, targets, strict=True):
        with open(path, "rb", buffering=0) as file:
            file.readinto(target)


def get(connection: socket.socket, names: Sequence[bytes], targets: Sequence[np.ndarray]) -> None:
    """One GET after the other on a bare socket, each to the start of its target."""
    for name, target in zip(names, targets, strict=True):
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        head = connection.recv(64)
        line, _, rest = head.partition(b"\r\n")
        size, view = int(line[1:]), memoryview(target)
        view[: len(rest)] = rest
        have = len(rest)
        while have < size:
            have += connection.recv_into(view[have:], size - have)
        connection.recv(2, socket.MSG_WAITALL)
