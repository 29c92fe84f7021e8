# SPDX-License-Identifier: Apache-2.0
"""A router foresees each hit by events alone, over a real ZMQ socket.

After a restart it does so once a prompt has shown what lies on the disk.

The engine core runs in a process of its own, as under ``vllm serve``: it makes steps while it is
idle, so that the end of its last writes is published.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.router import Asks, publishing, room_for
from tests.e2e.subscriber import Subscriber
from tests.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("qwen3_next", model_dir / "qwen3_next")


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture
def router(ports) -> Iterator[Subscriber]:
    one = Subscriber(*ports)
    yield one
    one.close()


def test_every_hit_of_a_pool_that_evicts_is_foreseen(ports, router, model) -> None:
    asks = Asks(router, model, seed=1)
    with publishing(ports, model, {"max_local_cpu_size": room_for(model, 5)}) as engine:
        for _ in range(30):
            asks.ask(engine)
        index = router.settled()
        assert asks.wrong == [] and asks.hits >= 5
        assert sum(isinstance(event, BlockRemoved) for event in index.seen) > 20, "none evicted"
        assert index.media().keys() == {"CPU"}
        # Each of those was a new boundary once: pages alone would have promised too much.
        assert any(pages > foreseen for foreseen, _, pages in asks.outcomes)
        # vLLM's own resets withdraw nothing of the store's; a reset of all caches does.
        assert sum(isinstance(event, AllBlocksCleared) for event in index.seen) > 30
        assert engine.call("forget_all")
        assert router.settled().media() in ({}, {"CPU": 0})
        assert asks.ask(engine, asks.trunks[0]) == (0, 0)
        assert asks.ask(engine, asks.trunks[0]) == (4 * asks.size, 4 * asks.size)


def test_disk_takes_over_what_ram_evicts_and_a_restart_announces_it_once_it_is_asked_for(
    ports, router, model, tmp_path
) -> None:
    config = {"local_cpu": True, "max_local_cpu_size": room_for(model, 4)}
    config |= {"local_disk": str(tmp_path / "d"), "max_local_disk_size": room_for(model, 8)}
    asks = Asks(router, model, seed=2)
    with publishing(ports, model, config) as engine:
        engine.rewrites = True  # what the disk has left of a prompt that it evicted in part
        for _ in range(25):
            asks.ask(engine)
        assert asks.wrong == [] and asks.hits >= 8
        assert router.settled().media()["STORAGE"] > 0 < router.settled().media()["CPU"]
        asks.ask(engine, asks.trunks[0][: 2 * asks.size + 7])
        asks.ask(engine, asks.trunks[0])
    before = router.settled()
    with publishing(ports, model, config) as engine:
        engine.rewrites = True
        # An idle engine says that all that was known of it is void, and nothing more.
        deadline = time.monotonic() + 20
        while router.index is before:
            assert time.monotonic() < deadline, "it says nothing"
            time.sleep(0.05)
        index = router.settled()
        assert isinstance(index.seen[0], AllBlocksCleared) and not index.media()
        # The first prompt shows what it loads, and what else lies there at boundaries in it.
        assert asks.ask(engine, asks.trunks[0]) == (0, 4 * asks.size)
        assert router.settled().media().keys() == {"CPU", "STORAGE"}
        for end in (len(asks.trunks[0]), 3 * asks.size + 1, 2 * asks.size + 7):
            foreseen, hit = asks.ask(engine, asks.trunks[0][:end])
            assert foreseen == hit
        asks.outcomes.clear()
        for _ in range(10):
            asks.ask(engine)
        assert all(foreseen <= hit for foreseen, hit, _ in asks.outcomes)


def test_a_shared_store_is_announced_once_it_holds_the_records(
    ports, router, model, redis_url
) -> None:
    config = {"local_cpu": False, "remote_url": redis_url}
    asks = Asks(router, model, seed=3, trunks=3)
    with publishing(ports, model, config) as engine:
        for _ in range(10):
            asks.ask(engine)
        assert asks.wrong == [] and asks.hits >= 3
        index = router.settled()
        places = {p for groups in index.held.values() for held in groups.values() for p in held}
        assert places == {("STORAGE", "REMOTE", "RemoteBackend")}
        import redis

        redis.Redis.from_url(redis_url).flushall()
        # Nobody is told of that; the first to ask finds it gone, and the next is right.
        foreseen, hit = asks.ask(engine, asks.trunks[0][: asks.size * 2 + 7])
        assert hit == 0
        assert asks.ask(engine, asks.trunks[0][: asks.size * 2 + 7]) == (2 * asks.size,) * 2


def test_lost_messages_are_asked_for_again(ports, router, model) -> None:
    asks = Asks(router, model, seed=4, trunks=3)
    router.lose = lambda number: number % 3 == 1
    with publishing(ports, model, {}) as engine:
        for _ in range(12):
            asks.ask(engine)
        router.lose = lambda number: False
        asks.ask(engine)  # a message that arrives shows what is missing
        asks.outcomes.clear()
        for _ in range(6):
            asks.ask(engine)
    assert router.replayed > 3 and asks.wrong == [] and asks.hits == 6


@pytest.mark.two_cores
def test_two_ranks_with_pools_of_their_own(ports, router, model) -> None:
    asks = Asks(router, model, seed=5)
    options = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with publishing(
        ports, model, {"max_local_cpu_size": room_for(model, 5) / 2}, **options
    ) as engine:
        for _ in range(25):
            asks.ask(engine)
    assert asks.wrong == [] and asks.hits >= 5
