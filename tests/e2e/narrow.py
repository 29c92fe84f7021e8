# SPDX-License-Identifier: Apache-2.0
"""A TCP port whose server is behind a slow link."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PIECE = 16 << 10


@contextmanager
def narrow_port(port: int, speed: float) -> Iterator[int]:
    """A TCP port behind which the server's replies, all together, come at ``speed``."""
    loop = asyncio.new_event_loop()
    free_at = 0.0

    async def forward(reader, writer, narrow: bool) -> None:
        nonlocal free_at
        try:
            while data := await reader.read(PIECE):
                if narrow:
                    now = time.monotonic()
                    free_at = max(now, free_at) + len(data) / speed
                    await asyncio.sleep(free_at - now)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def accept(reader, writer) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
        # A client that gives up must not find the rest of its values in a buffer.
        for each in (writer, ours):
            plug = each.get_extra_info("socket")
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
        await asyncio.gather(forward(reader, ours, False), forward(theirs, writer, True))

    server = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
