# SPDX-License-Identifier: Apache-2.0
"""Data parallel: engines that share a store, and do not share a disk."""

import random
import time
from pathlib import Path

import pytest
from api_server import Server

from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = [pytest.mark.engine, pytest.mark.two_cores]

N, BLOCKS = 128, 4


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(BLOCKS * N + 9)]


def records(folder: Path, kind: str) -> int:
    return len(list(folder.glob(f"lfm2@1@0@*{kind}")))


def wait_for(folder: Path, kind: str) -> None:
    """Wait until a prompt is stored: LMCache writes behind."""
    deadline, count = time.monotonic() + 60, 0
    while count < BLOCKS + 1 or count != records(folder, kind):
        assert time.monotonic() < deadline, list(folder.iterdir())
        count = records(folder, kind)
        time.sleep(1)


def check_hits(server: Server, expected: list[int]) -> None:
    """Tokens that the connector has brought so far, by engine; they are exported with a delay."""
    deadline = time.monotonic() + 30
    while server.external_hits() != expected:
        hits = server.external_hits(), expected
        assert time.monotonic() < deadline, (*hits, server.log.read_text()[-6000:])
        time.sleep(0.5)


def test_what_one_engine_stored_another_hits_and_each_has_a_disk_of_its_own(
    model_dir: Path, tmp_path: Path
) -> None:
    model = make_model("lfm2", model_dir / "lfm2")
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    config = {
        "local_cpu": False,
        "local_disk": str(disk),
        "max_local_disk_size": 1,
        "remote_url": f"fs://localhost:0{shared}",
    }
    with Server(model, config, tmp_path, "--data-parallel-size", "2") as server:
        first = server.ask(prompt(1), engine=0)
        wait_for(shared, ".data")
        check_hits(server, [0, 0])
        again = server.ask(prompt(1), engine=1)
        check_hits(server, [0, BLOCKS * N])
        assert again == first
        server.ask(prompt(2), engine=1)
        wait_for(disk / "dp1", ".pt")
        assert records(disk, ".pt") >= BLOCKS + 1
    # After a restart each engine finds what its own disk has.
    alone = {**config, "remote_url": None}
    with Server(model, alone, tmp_path, "--data-parallel-size", "2") as server:
        assert server.ask(prompt(1), engine=0) == first
        server.ask(prompt(2), engine=0)
        server.ask(prompt(2), engine=1)
        check_hits(server, [BLOCKS * N, BLOCKS * N])
