# SPDX-License-Identifier: Apache-2.0
"""LMCache's remote backends without our repairs: ``fs://``, and Redis on real servers."""

import asyncio
import gc
import inspect
import os
import threading

import pytest
import redis
from lmcache.v1.storage_backend.connector.redis_adapter import RedisClusterConnectorAdapter
from lmcache.v1.storage_backend.connector.redis_connector import (
    RedisClusterConnector,
    RedisSentinelConnector,
)
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
from servers import HalfCluster, Sentinels

from lmcache_hybrid.storage.remote import connectors as remote
from lmcache_hybrid.storage.remote import redis as redis_stores

from .raw import KEYS, SIZE, Raw, happens
from .repair import shows_bug_of

A, B = KEYS[:2]


@pytest.fixture
def make():
    """Make engines with LMCache's own remote backend for a URL."""
    made = []

    def engine(url: str, **settings) -> Raw:
        made.append(Raw("RemoteBackend", remote_url=url, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@shows_bug_of(remote._release_late_reads)
def test_a_read_that_timed_out_keeps_its_buffer(make, tmp_path):
    """A pipe in the place of the file gives its first bytes at once and the others later."""
    one = make(f"fs://localhost:0{tmp_path}", blocking_timeout_secs=0.5).write([A])
    (path,) = tmp_path.glob("*.data")
    stored = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    server = os.open(path, os.O_RDWR)
    first = len(stored) - SIZE
    os.write(server, stored[:first])
    gc.disable()
    try:
        assert one.backend.get_blocking(A) is None
        assert one.used() > one.start
        os.write(server, stored[first:])
        return not happens(lambda: one.used() == one.start)
    finally:
        os.close(server)
        gc.enable()


@shows_bug_of(remote._keep_workers)
def test_a_cancelled_read_ends_a_worker():
    async def workers_left() -> int:
        queue = AsyncPQExecutor(asyncio.get_running_loop())
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def read() -> None:
            begun.set()
            await go_on.wait()

        job = asyncio.ensure_future(queue.submit_job(read))
        await begun.wait()
        job.cancel()
        go_on.set()
        for _ in range(100):
            await asyncio.sleep(0)
        left = sum(not worker.done() for worker in queue._workers)
        await queue.shutdown_async(False)
        return left

    return asyncio.run(workers_left()) < AsyncPQExecutor.__init__.__defaults__[0]


@shows_bug_of(remote._close_from_own_loop)
def test_closing_redis_waits_for_ever(make, redis_url, monkeypatch):
    """LMCache's event loop waits for a job of its own, which this test cancels in the end."""
    one = make(redis_url).write([A])
    jobs = []
    submit = asyncio.run_coroutine_threadsafe

    def noted(*args):
        jobs.append(submit(*args))
        return jobs[-1]

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", noted)
    closing = threading.Thread(target=one.backend.close)
    closing.start()
    hangs = not happens(lambda: not closing.is_alive())
    for job in reversed(jobs):
        job.cancel()
    closing.join(20)
    assert not closing.is_alive()
    return hangs


@pytest.fixture
def sentinels(tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_SERVICE_NAME", Sentinels.service)
    servers = Sentinels(tmp_path)
    yield servers
    servers.close()


@pytest.mark.filterwarnings("ignore:coroutine 'Redis:RuntimeWarning")
@shows_bug_of(redis_stores._awaiting)
def test_behind_sentinels_everything_is_found_and_nothing_stored(make, sentinels):
    one = make(sentinels.url)
    one.put([A])
    finds_all = one.backend.contains(B)
    stored = finds_all or happens(lambda: one.backend.contains(A), 20)
    return finds_all or not stored or one.backend.get_blocking(A) is None


@pytest.fixture
def half_cluster(tmp_path):
    servers = HalfCluster(tmp_path)
    yield servers
    servers.close()


def fails_on_a_closed_connection(one: Raw, url: str) -> bool:
    """Whether a read of what is there fails after the server has closed what was idle."""
    one.write([A])
    redis.Redis.from_url(url).client_kill_filter(_type="normal", skipme=True)
    return one.backend.get_blocking(A) is None


def keeps_asking(one: Raw, servers: HalfCluster) -> bool:
    """Whether a lookup tries a lost node more than twice.

    A try asks it once, or twice where redis-py asks it for the slots, too.
    """
    key = next(key for key in KEYS if servers.has_lost(key.to_string() + redis_stores.METADATA))
    job = one.backend.connection.exists(key)
    lookup = asyncio.run_coroutine_threadsafe(job, one.manager.loop)
    assert happens(lambda: servers.asked > 4 or lookup.done(), 20)
    lookup.cancel()
    return servers.asked > 4


@shows_bug_of(redis_stores._try_twice)
def test_one_server_is_tried_once_and_a_lost_node_many_times(make, redis_url, half_cluster):
    """The repair can go when a connection that was closed costs a second try, and no more."""
    fails = fails_on_a_closed_connection(make(redis_url), redis_url)
    return keeps_asking(make(half_cluster.url), half_cluster) or fails


@shows_bug_of(redis_stores._reach_cluster, redis_stores._reach_through_sentinels)
def test_clusters_and_sentinels_know_no_tls():
    """A server with TLS would show that it is not spoken, and not how it could be asked for."""
    classes = (RedisClusterConnector, RedisSentinelConnector, RedisClusterConnectorAdapter)
    sources = [inspect.getsource(each).lower() for each in classes]
    return not any("ssl" in source or "tls" in source for source in sources)
