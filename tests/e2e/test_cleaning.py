# SPDX-License-Identifier: Apache-2.0
"""Engines whose folder is cleaned while they serve: what is hit stays, what goes is computed."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.engine import Answer, Engine
from tests.e2e.promql import Exported

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COLD = 12
# In prompts.
ROOM = 5


def hurry() -> None:
    """Have minutes pass in a moment: runs in the engine's process."""
    from lmcache_hybrid.storage.folder import cleaner, least_used

    least_used.MINUTE = cleaner.PAUSE_SECONDS = 0.05


def make_prompt(size: int) -> list[int]:
    return random.choices(range(32, 127), k=3 * size + 7)


def taken(folder: Path) -> int:
    """Bytes of files, some of which may go meanwhile."""
    sizes = []
    for file in folder.glob("*.data"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


def ask_hot(engine: Engine, hot: list[int], meant: Answer) -> None:
    engine.settle()
    engine.forget()
    answer = engine.ask(hot)
    assert answer.external == 3 * engine.info["block_size"] and answer.output == meant.output


def test_two_engines_hit_in_a_folder_that_one_of_them_cleans(lfm2: Path, tmp_path: Path) -> None:
    random.seed(19)
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path}"}
    with Engine(lfm2, config) as engine:
        size = engine.info["block_size"]
        hot = make_prompt(size)
        meant = engine.ask(hot)
        engine.settle()
    limit = ROOM * taken(tmp_path)
    setting = {"kv_connector_extra_config": {"lmcache.hybrid_fs_max_size_gb": limit / (1 << 30)}}
    with (
        Engine(lfm2, config, setting, prepare=hurry) as one,
        Engine(lfm2, config, setting, prepare=hurry) as other,
    ):
        cold = [make_prompt(size) for _ in range(COLD)]
        first: list[tuple] = []
        for prompt in cold:
            first.append(one.ask(prompt).output)
            ask_hot(one, hot, meant)
            ask_hot(other, hot, meant)
        wait_until(lambda: taken(tmp_path) <= limit)
        one.forget()
        # The oldest are gone, the newest is there.
        gone, kept = one.ask(cold[0]), one.ask(cold[-1])
        assert gone.external == 0 and gone.output == first[0]
        assert kept.external == 3 * size and kept.output == first[-1]
        counts = [engine.counts()["worker"] for engine in (one, other)]
        exported = [Exported(engine.exported()) for engine in (one, other)]
    records = sorted(each["cleaned_records"] for each in counts)
    assert records[0] == 0 and records[1] > COLD
    assert sum(each["cleaned_bytes"] for each in counts) > limit
    name = "vllm:lmcache_hybrid_cleaned_records_total"
    assert sum(each.value(name, limit="size") for each in exported) > COLD
    assert sum(each.value(name, limit="age") for each in exported) == 0


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it is not cleaned"
        time.sleep(0.05)
