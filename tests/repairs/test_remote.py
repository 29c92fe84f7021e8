# SPDX-License-Identifier: Apache-2.0
"""LMCache's remote backends without our repairs: ``fs://``, and what Redis needs no server for."""

import asyncio
import gc
import inspect
import os

import pytest
from lmcache.v1.storage_backend.connector.redis_adapter import RedisClusterConnectorAdapter
from lmcache.v1.storage_backend.connector.redis_connector import (
    RedisClusterConnector,
    RedisSentinelConnector,
)
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor

from lmcache_hybrid import redis_stores, remote

from .raw import KEYS, SIZE, Raw, happens
from .repair import shows_bug_of

A = KEYS[0]


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


@shows_bug_of(redis_stores._reach_cluster, redis_stores._reach_through_sentinels)
def test_clusters_and_sentinels_know_no_tls():
    """A server with TLS would show that it is not spoken, and not how it could be asked for."""
    classes = (RedisClusterConnector, RedisSentinelConnector, RedisClusterConnectorAdapter)
    sources = [inspect.getsource(each).lower() for each in classes]
    return not any("ssl" in source or "tls" in source for source in sources)
