# SPDX-License-Identifier: Apache-2.0
"""Data parallel: engines that share a store, and do not share a disk."""

import time
from pathlib import Path

import pytest
from redis import Redis

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.api_server import Server
from tests.e2e.blocks import block_size
from tests.e2e.prompts import prompt
from tests.e2e.records import RedisShelf

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCKS = 4
# Attention pages of all blocks, and a state of each of two groups.
RECORDS = BLOCKS + 2


def count(folder: Path, kind: str) -> int:
    return len(list(folder.glob(f"lfm2@1@0@*{kind}")))


def check_hits(server: Server, expected: list[int]) -> None:
    """Tokens that the connector has brought so far, by engine; they are exported with a delay."""
    deadline = time.monotonic() + 60
    while server.external_hits() != expected:
        hits = server.external_hits(), expected
        assert time.monotonic() < deadline, (*hits, server.log.read_text()[-6000:])
        time.sleep(0.5)


def test_what_one_engine_stored_another_hits_and_each_has_a_disk_of_its_own(
    model_dir: Path, tmp_path: Path, redis_url: str
) -> None:
    model = make_model("lfm2", model_dir / "lfm2")
    tokens = BLOCKS * block_size(model)
    prompts = [prompt(seed, tokens + 9) for seed in range(3)]
    disk, folder = tmp_path / "disk", tmp_path / "shared"
    shelf = RedisShelf(Redis.from_url(redis_url))
    config = {"local_cpu": False, "local_disk": str(disk), "max_local_disk_size": 1}
    shared = {**config, "remote_url": f"fs://localhost:0{folder}"}
    with Server(model, shared, tmp_path, "--data-parallel-size", "2") as server:
        first = server.ask(prompts[0], engine=0)
        server.wait_for(lambda: count(folder, ".data") == RECORDS)
        again = server.ask(prompts[0], engine=1)
        check_hits(server, [0, tokens])
        assert again == first
        second = server.ask(prompts[1], engine=1)
        server.wait_for(lambda: count(folder, ".data") == 2 * RECORDS)
    assert count(disk, ".pt") == RECORDS
    assert count(disk / "dp1", ".pt") == RECORDS
    shared = {**config, "remote_url": redis_url}
    with Server(model, shared, tmp_path, "--data-parallel-size", "2") as server:
        # After a restart each engine finds what its own disk has, and not what the other's has.
        assert server.ask(prompts[0], engine=0) == first
        assert server.ask(prompts[1], engine=1) == second
        check_hits(server, [tokens, tokens])
        assert not shelf.names()
        third = server.ask(prompts[2], engine=0)
        server.wait_for(lambda: len(shelf.names()) == RECORDS)
        assert server.ask(prompts[2], engine=1) == third
        check_hits(server, [tokens, 2 * tokens])
        assert server.ask(prompts[1], engine=0) == second
        check_hits(server, [tokens, 2 * tokens])
