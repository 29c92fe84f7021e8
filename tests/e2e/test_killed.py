# SPDX-License-Identifier: Apache-2.0
"""Killed in the middle of a save, an engine leaves a store that serves whole prompts only."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e import records
from tests.e2e.broken_store import CUTS, POOL, REDIS, Prompt, Site, new_prompt, redis_behind_proxy
from tests.e2e.engine import Engine, EngineDied
from tests.marks import slow

pytestmark = pytest.mark.engine


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def killed_in_a_write(kind: str, model: Path, folder: Path) -> Iterator[tuple]:
    """A store where one prompt is whole and a second one's records are cut off.

    Yields (shelf, configuration for the restart, both prompts, the first one's answer).
    """
    good, torn = new_prompt(), new_prompt()
    with ExitStack() as stack:
        if kind == "disk":
            shelf = records.DiskShelf(folder)
            config = {**POOL, "local_disk": str(folder), "max_local_disk_size": 0.05}
        else:
            server, proxy = redis_behind_proxy(stack)
            shelf = records.RedisShelf(server.client())
            config = {**REDIS, "remote_url": f"redis://127.0.0.1:{proxy.port}"}
        with Engine(model, config, **CUTS) as engine:
            cold = engine.ask(good).output
            engine.settle()
            whole = shelf.names()
            if kind == "disk":
                engine.call("fault", name="die_in_write", after=2)
                with pytest.raises(EngineDied):
                    engine.ask(torn)
                    engine.settle()
            else:
                proxy.pause_after(sum(len(shelf.read(name)) for name in whole) // 2)
                engine.ask(torn)
                wait_for(lambda: proxy.paused)
                engine.kill()
                proxy.cut()
                proxy.restore()
        assert len(shelf.names() - whole) < len(whole), "everything was written"
        yield shelf, config, good, torn, cold


@pytest.mark.parametrize("kind", ["disk", *slow("redis")])
def test_killed_in_the_middle_of_a_save_and_restarted(kind: str, lfm2: Path, tmp_path) -> None:
    with (
        killed_in_a_write(kind, lfm2, tmp_path) as (shelf, config, good, torn, cold),
        Engine(lfm2, config, **CUTS) as engine,
    ):
        site = Site(kind, engine, shelf)
        site.serves(Prompt(good, cold))
        engine.forget()
        computed = engine.ask(torn)
        assert computed.external == 0
        engine.settle()
        site.serves(Prompt(torn, computed.output))
        counts = engine.counts()
        assert counts["worker"]["failed_loads"] == 0
        assert not any(counts["live"][name] for name in counts["live"].keys() - {"used_blocks"})
