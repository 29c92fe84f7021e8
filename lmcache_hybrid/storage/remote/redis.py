# SPDX-License-Identifier: Apache-2.0
"""LMCache's connectors to Redis: one server, a cluster, a primary that sentinels name.

The three differ only in their clients and get the same repairs: one round trip for each lookup,
writes without the GIL, and a new connection after a failure.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import redis
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector
from lmcache.v1.storage_backend.connector.redis_connector import (
    Priorities,
    RedisClusterConnector,
    RedisConnector,
    RedisSentinelConnector,
)
from redis.asyncio import Sentinel as AsyncSentinel
from redis.asyncio.cluster import ClusterNode as AsyncNode
from redis.asyncio.cluster import RedisCluster as AsyncCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lmcache_hybrid.config.redis_credentials import PLUGIN_URLS, connection_options
from lmcache_hybrid.storage.disk.backend import record_shape
from lmcache_hybrid.storage.key_names import METADATA, VALUE
from lmcache_hybrid.storage.remote import sockets
from lmcache_hybrid.storage.remote.sockets import SocketReader

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

# Threads that read and write, and the timeout of one write.
READERS = 4
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
    if not isinstance(connector, (RedisSentinelConnector, RedisClusterConnector, RedisConnector)):
        return connector
    url = _url_of(backend)
    options = connection_options(url)
    if isinstance(connector, RedisSentinelConnector):
        _reach_through_sentinels(connector, options)
        make_writer = _writer_behind_sentinels(connector, options)
        pool = _pool_behind_sentinels(connector, options | sockets.options(seconds))
        connector = _awaiting(connector, backend.loop, seconds)
        _read_from_sockets(connector, SocketReader(pool, seconds))
        backend.connection = InstrumentedRemoteConnector(connector)
    elif isinstance(connector, RedisClusterConnector):
        _reach_cluster(connector, options)
        make_writer = _writer_to_cluster(connector, options)
    else:
        # Its connections are made when they are needed, with what is here then.
        connector.pool.connection_kwargs.update(options)
        make_writer = functools.partial(redis.Redis.from_url, url, **(options | _options()))
        pool = redis.ConnectionPool.from_url(url, **(options | sockets.options(seconds)))
        _read_from_sockets(connector, SocketReader(pool, seconds))
    _try_twice(connector)
    _write_on_threads(connector, make_writer)
    return connector


def delete(backend: "RemoteBackend", key: CacheEngineKey, seconds: float) -> bool:
    """Delete a record from a Redis, which LMCache's own connectors cannot.

    Returns:
        Whether this is a Redis; False: nothing was done.

    Raises:
        Exception: the server did not answer within ``seconds``, or refused.
    """
    connector = _unwrapped(backend.connection)
    if not isinstance(connector, (RedisConnector, RedisClusterConnector)):
        return False
    name = key.to_string()
    job = _client(connector).delete(name + METADATA, name + VALUE)
    asyncio.run_coroutine_threadsafe(job, connector.loop).result(seconds)
    return True


def existing(
    connection: RemoteConnector, keys: Sequence[CacheEngineKey]
) -> Coroutine[Any, Any, list[bool]] | None:
    """Ask which keys exist, in one round trip to all nodes of a cluster at once.

    Returns:
        A coroutine to await on the connector's loop; None where this is no Redis.
    """
    connector = _unwrapped(connection)
    if not isinstance(connector, (RedisConnector, RedisClusterConnector)):
        return None

    async def ask(keys: Sequence[CacheEngineKey]) -> list[bool]:
        async with connector.sem:
            pipeline = _client(connector).pipeline(transaction=False)
            for key in keys:
                pipeline.exists(key.to_string() + METADATA)
            return list(map(bool, await pipeline.execute()))

    return connector.pq_executor.submit_job(ask, keys=keys, priority=Priorities.PEEK)


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
    """Make a connector that awaits its commands, to the primary that the sentinels name.

    Bug: ``RedisSentinelConnector`` uses an asyncio client and never awaits it.
    Symptom: every lookup says that everything is there, no read finds anything, and
    nothing is ever written.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``RedisSentinelConnector`` awaits each command of its client.

    Args:
        seconds: timeout of one read where REDIS_TIMEOUT is not set. LMCache's default, 1 s, is
            too short for a state of 150 MB.
    """
    connector = RedisConnector("redis://sentinel", loop, broken.local_cpu_backend)
    connector.connection = broken.master
    for sentinel in broken.sentinel.sentinels:
        sentinel.set_retry(Retry(NoBackoff(), 0))  # ask the next one instead
    if RedisSentinelConnector.ENV_REDIS_TIMEOUT not in os.environ:
        broken.master.connection_pool.connection_kwargs["socket_timeout"] = seconds
    return connector


def _try_twice(connector: RedisConnector | RedisClusterConnector) -> None:
    """Open a connection that the server closed anew, and ask exactly once more.

    Bug: ``RedisConnector`` makes its pool of 150 connections without redis-py's retry;
    ``RedisClusterConnector`` leaves redis-py's eleven tries, a quarter of a second apart.
    Symptom: after a restart of the server each idle connection fails one read or write
    when its turn comes, which may be hours later; lookups wait for seconds while a node
    of the cluster is away.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``RedisConnector`` and ``RedisClusterConnector`` set a retry of their own.
    """
    client, retry = _client(connector), Retry(NoBackoff(), 1)
    if isinstance(connector, RedisClusterConnector):
        client.retry = retry
    else:
        client.set_retry(retry)


def _write_on_threads(
    connector: RedisConnector | RedisClusterConnector, make_writer: Callable[[], Writer]
) -> None:
    """Send values on threads, without a copy and without the GIL.

    No bug: LMCache writes the same bytes, and has asyncio send them. With Python 3.11 that
    copies each value, to 2.5 times its size at the peak, on the event loop with the GIL held.
    Gain: faster saves to Redis, and steps that do not wait for the GIL.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: the connectors send values without copies, off the event loop.
    """
    client = _client(connector)
    threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="hybrid-redis")
    lock = threading.Lock()
    made: list[Writer] = []

    def write(name: str, value: bytes | memoryview) -> bool:
        with lock:
            # A cluster's client asks its nodes when it is made; they may be away now.
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


def _read_from_sockets(connector: RedisConnector, reader: SocketReader) -> None:
    """Read values from the socket into the pool's memory; closed with the connector.

    No bug: LMCache reads the same bytes, on the event loop with the GIL held, and copies them.
    Gain: restores from one Redis are several times as fast, see :mod:`.sockets`.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``RedisConnector`` reads values into the pool's memory.
    """
    client, closing = _client(connector), _client(connector).close
    threads = ThreadPoolExecutor(READERS, thread_name_prefix="hybrid-redis-read")

    async def get(key: CacheEngineKey) -> MemoryObj | None:
        job = connector.loop.run_in_executor(threads, read, key)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_release)
            raise

    def read(key: CacheEngineKey) -> MemoryObj | None:
        name, taken = key.to_string(), list[MemoryObj]()

        def reserve(size: int) -> memoryview | None:
            while taken:  # asked for again, on a new connection
                taken.pop().ref_count_down()
            memory = connector.local_cpu_backend.allocate(
                record_shape(size), torch.uint8, MemoryFormat.KV_2LTD
            )
            if memory is None:
                return None
            taken.append(memory)
            return memoryview(memory.byte_array).cast("B")[:size]

        found = False
        try:
            found = reader.read(name + VALUE, reserve, stale=name + METADATA)
        finally:
            if not found and taken:
                taken.pop().ref_count_down()
        return taken[0] if found else None

    async def close() -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        reader.close()
        await closing()

    connector.get, client.close = get, close


def _release(job: asyncio.Future[MemoryObj | None]) -> None:
    """Give back the memory of a value that nobody waited for."""
    if not job.cancelled() and job.exception() is None and (memory := job.result()) is not None:
        memory.ref_count_down()


def _options() -> dict:
    retry = redis.retry.Retry(NoBackoff(), 1, (redis.ConnectionError,))
    return {"socket_timeout": WRITE_SECONDS, "retry": retry}


def _url_of(backend: "RemoteBackend") -> str:
    config, url = backend.config, backend.config.remote_url
    if backend.plugin_name is not None:
        # As RedisConnectorAdapter does.
        extra = config.extra_config or {}
        url = next((extra[name] for name in PLUGIN_URLS if extra.get(name)), url)
    return url or "redis://localhost:6379"


def _reach_cluster(connector: RedisClusterConnector, options: dict[str, Any]) -> None:
    """Replace LMCache's client by one that logs in and speaks TLS as configured.

    Bug: ``RedisClusterConnector`` takes a login from its URL only, and knows no TLS.
    Symptom: the password is in LMCache's log, and a cluster with TLS cannot be used.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``RedisClusterConnector`` passes on TLS settings.
    """
    nodes = connector.cluster.nodes_manager.startup_nodes.values()
    connector.cluster = AsyncCluster(
        startup_nodes=[AsyncNode(node.host, node.port) for node in nodes],
        max_connections=connector.max_connections,
        **options,
    )


def _writer_to_cluster(
    connector: RedisClusterConnector, options: dict[str, Any]
) -> Callable[[], Writer]:
    nodes = [(n.host, n.port) for n in connector.cluster.nodes_manager.startup_nodes.values()]

    def make() -> Writer:
        startup = [redis.cluster.ClusterNode(*node) for node in nodes]
        return redis.RedisCluster(startup_nodes=startup, **(options | _options()))

    return make


def _reach_through_sentinels(broken: RedisSentinelConnector, options: dict[str, Any]) -> None:
    """Reach sentinels with our TLS, and the primary with our login and TLS.

    Bug: ``RedisSentinelConnector`` takes a login from its URL only, and knows no TLS.
    Symptom: the password is in LMCache's log, and sentinels with TLS cannot be used.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``RedisSentinelConnector`` passes on TLS settings.
    """
    asked = [client.connection_pool.connection_kwargs for client in broken.sentinel.sentinels]
    timeout = broken.sentinel.connection_kwargs["socket_timeout"]
    service = broken.master.connection_pool.service_name
    broken.sentinel = AsyncSentinel(
        [(each["host"], each["port"]) for each in asked],
        sentinel_kwargs={"socket_timeout": timeout, **_tls_of(options)},
        socket_timeout=timeout,
    )
    broken.master = broken.sentinel.master_for(service, socket_timeout=timeout, **options)


def _writer_behind_sentinels(
    broken: RedisSentinelConnector, options: dict[str, Any]
) -> Callable[[], Writer]:
    sentinels, service = _sentinels(broken, options), broken.master.connection_pool.service_name
    return lambda: sentinels.master_for(service, **(options | _options()))


def _pool_behind_sentinels(
    broken: RedisSentinelConnector, options: dict[str, Any]
) -> redis.ConnectionPool:
    """Makes connections to whichever server the sentinels call primary then."""
    service = broken.master.connection_pool.service_name
    return _sentinels(broken, options).master_for(service, **options).connection_pool


def _sentinels(broken: RedisSentinelConnector, options: dict[str, Any]) -> redis.Sentinel:
    asked = [client.connection_pool.connection_kwargs for client in broken.sentinel.sentinels]
    return redis.Sentinel(
        [(each["host"], each["port"]) for each in asked],
        sentinel_kwargs={
            "socket_timeout": broken.sentinel.connection_kwargs["socket_timeout"],
            "retry": redis.retry.Retry(NoBackoff(), 0),
            **_tls_of(options),
        },
    )


def _tls_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("ssl")}
