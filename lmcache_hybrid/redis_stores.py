# SPDX-License-Identifier: Apache-2.0
"""LMCache's connectors to Redis: one server, a cluster, a primary that sentinels name.

The three differ in their clients only, and get the same repairs: they look up in one
round trip, write without the GIL, and come back after a failure.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import redis
from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector
from lmcache.v1.storage_backend.connector.redis_connector import (
    Priorities,
    RedisClusterConnector,
    RedisConnector,
    RedisSentinelConnector,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lmcache_hybrid.stored.redis_source import METADATA, VALUE

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

WRITERS = 2
WRITE_SECONDS = 20.0

Writer: TypeAlias = redis.Redis | redis.RedisCluster


def repair(backend: "RemoteBackend") -> RemoteConnector | None:
    """Repair this backend's connector if it is one to Redis. Mutates ``backend``.

    Returns:
        The connector that does the work, None where LMCache could not make one.
    """
    connector = _unwrapped(backend.connection)
    seconds = backend.config.blocking_timeout_secs
    if isinstance(connector, RedisSentinelConnector):
        make_writer = _writer_behind_sentinels(connector)
        connector = _awaiting(connector, backend.loop, seconds)
        backend.connection = InstrumentedRemoteConnector(connector)
    elif isinstance(connector, RedisClusterConnector):
        make_writer = _writer_to_cluster(connector)
    elif isinstance(connector, RedisConnector):
        make_writer = _writer_to_server(backend)
    else:
        return connector
    _try_twice(connector)
    _look_up_at_once(connector, seconds)
    _write_on_threads(connector, make_writer)
    return connector


def delete(backend: "RemoteBackend", key: CacheEngineKey, seconds: float) -> None:
    """Delete a record, where this is a Redis: LMCache's connectors to it cannot.

    Raises:
        Exception: the server did not answer within ``seconds``, or refused.
    """
    connector = _unwrapped(backend.connection)
    if isinstance(connector, (RedisConnector, RedisClusterConnector)):
        name = key.to_string()
        job = _client(connector).delete(name + METADATA, name + VALUE)
        asyncio.run_coroutine_threadsafe(job, connector.loop).result(seconds)


def _unwrapped(connector: Any) -> Any:
    """The connector that does the work, without LMCache's instruments around it."""
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    return connector


def _client(connector: RedisConnector | RedisClusterConnector) -> Any:
    """The asyncio client that this connector's commands go to."""
    if isinstance(connector, RedisClusterConnector):
        return connector.cluster
    return connector.connection


def _awaiting(
    broken: RedisSentinelConnector, loop: asyncio.AbstractEventLoop, seconds: float
) -> RedisConnector:
    """A connector that awaits its commands, on the primary that the sentinels name.

    Bug: ``RedisSentinelConnector`` uses an asyncio client and never awaits it.
    Symptom: every lookup says that everything is there, no read finds anything, and
    nothing is ever written.
    Remove when: ``RedisSentinelConnector.exists`` awaits.

    Args:
        seconds: for one read, where REDIS_TIMEOUT is not set. Its default, 1 s, is short
            for a state of 150 MB.
    """
    connector = RedisConnector("redis://sentinel", loop, broken.local_cpu_backend)
    connector.connection = broken.master
    for sentinel in broken.sentinel.sentinels:
        sentinel.set_retry(Retry(NoBackoff(), 0))  # ask the next one instead
    if RedisSentinelConnector.ENV_REDIS_TIMEOUT not in os.environ:
        broken.master.connection_pool.connection_kwargs["socket_timeout"] = seconds
    return connector


def _try_twice(connector: RedisConnector | RedisClusterConnector) -> None:
    """A connection that the server closed is opened anew and asked once more, and no more.

    Bug: ``RedisConnector`` makes its pool of 150 connections without redis-py's retry;
    the cluster's client tries eleven times with a quarter of a second between.
    Symptom: after a restart of the server each idle connection fails one read or write
    when its turn comes, which may be hours later; lookups wait for seconds while a node
    of the cluster is away.
    Remove when: ``RedisConnector`` and ``RedisClusterConnector`` set a retry of their own.
    """
    client, retry = _client(connector), Retry(NoBackoff(), 1)
    if isinstance(connector, RedisClusterConnector):
        client.retry = retry
    else:
        client.set_retry(retry)


def _look_up_at_once(connector: RedisConnector | RedisClusterConnector, seconds: float) -> None:
    """A lookup takes one round trip, to all nodes at once, not one for each key.

    Bug: the connectors have no ``batched_contains``, so ``RemoteBackend`` asks for
    key after key and waits for each.
    Symptom: a server that answers after 50 ms needs more than ``lookup_timeout_ms`` for
    40 blocks, and never hits.
    Remove when: their ``support_batched_contains`` is True.
    """
    client = _client(connector)

    async def leading(keys: Sequence[CacheEngineKey]) -> int:
        async with connector.sem:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(key.to_string() + METADATA)
            return len(list(takewhile(bool, await pipeline.execute())))

    def batched_contains(keys: Sequence[CacheEngineKey]) -> int:
        if not keys:
            return 0
        job = connector.pq_executor.submit_job(leading, keys=keys, priority=Priorities.PEEK)
        question = asyncio.run_coroutine_threadsafe(job, connector.loop)
        try:
            return question.result(seconds)
        finally:
            question.cancel()

    connector.support_batched_contains = lambda: True
    connector.batched_contains = batched_contains


def _write_on_threads(
    connector: RedisConnector | RedisClusterConnector, make_writer: Callable[[], Writer]
) -> None:
    """Values go to the socket on threads, without a copy and without the GIL.

    Bug: asyncio copies a value of 50 MB several times before it is sent, with the GIL held.
    Symptom: saving to Redis at a third of the speed, and steps that wait for the GIL.
    Remove when: the connectors write with a client of their own that does neither.
    """
    client = _client(connector)
    threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="hybrid-redis")
    lock = threading.Lock()
    made: list[Writer] = []

    def write(name: str, value: bytes | memoryview) -> bool:
        with lock:
            # A cluster's client asks its nodes at once, which may be away now.
            if not made:
                made.append(make_writer())
        return made[0].set(name, value)

    async def set_(name: str, value: bytes | memoryview) -> bool:
        return await connector.loop.run_in_executor(threads, write, name, value)

    async def close() -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        for writer in made:
            writer.close()
        await closing()

    closing, client.close = client.close, close
    client.set = set_


def _options() -> dict:
    retry = redis.retry.Retry(NoBackoff(), 1, (redis.ConnectionError,))
    return {"socket_timeout": WRITE_SECONDS, "retry": retry}


def _writer_to_server(backend: "RemoteBackend") -> Callable[[], Writer]:
    config, url = backend.config, backend.config.remote_url
    if backend.plugin_name is not None:
        # As RedisConnectorAdapter does.
        extra = config.extra_config or {}
        url = extra.get("remote_storage_plugin.redis.redis_url") or extra.get("redis_url") or url
    return lambda: redis.Redis.from_url(url or "redis://localhost:6379", **_options())


def _writer_to_cluster(connector: RedisClusterConnector) -> Callable[[], Writer]:
    kwargs = connector.cluster.connection_kwargs
    login = {name: kwargs[name] for name in ("username", "password")}
    nodes = [(n.host, n.port) for n in connector.cluster.nodes_manager.startup_nodes.values()]

    def make() -> Writer:
        startup = [redis.cluster.ClusterNode(*node) for node in nodes]
        return redis.RedisCluster(startup_nodes=startup, **login, **_options())

    return make


def _writer_behind_sentinels(broken: RedisSentinelConnector) -> Callable[[], Writer]:
    pool = broken.master.connection_pool
    login = {name: pool.connection_kwargs[name] for name in ("username", "password")}
    asked = [client.connection_pool.connection_kwargs for client in broken.sentinel.sentinels]
    sentinels = redis.Sentinel(
        [(each["host"], each["port"]) for each in asked],
        sentinel_kwargs={
            "socket_timeout": broken.sentinel.connection_kwargs["socket_timeout"],
            "retry": redis.retry.Retry(NoBackoff(), 0),
        },
    )
    return lambda: sentinels.master_for(pool.service_name, **login, **_options())
