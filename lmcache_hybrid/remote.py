# SPDX-License-Identifier: Apache-2.0
"""LMCache's Redis connector made to survive failed reads and restarts, and to close."""

import asyncio
import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import redis
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.redis_connector import Priorities, RedisConnector
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

# Writes still queued at shutdown get this long.
FLUSH_SECONDS = 8.0
WRITERS = 2
WRITE_SECONDS = 20.0


def exists(backend: "RemoteBackend", key: CacheEngineKey) -> bool:
    """Whether the store holds a value; ``RemoteBackend.contains`` waits for ever.

    Raises:
        Exception: the store did not answer within ``blocking_timeout_secs``, or failed.
    """
    question = asyncio.run_coroutine_threadsafe(backend.connection.exists(key), backend.loop)
    try:
        return question.result(backend.config.blocking_timeout_secs)
    finally:
        question.cancel()


def repair(backend: "RemoteBackend", failed: Callable[[int], None] = lambda records: None) -> None:
    """Repair this backend's connector and its job queue, now and after a reconnect.

    Mutates ``backend``. Connectors without such a queue (``fs://``) are left alone.

    Args:
        failed: told how many records were not written.
    """
    connect = backend.init_connection

    @functools.wraps(connect)
    def init_connection() -> None:
        connect()
        _repair(backend, failed)

    backend.init_connection = init_connection
    _repair(backend, failed)


def _repair(backend: "RemoteBackend", failed: Callable[[int], None]) -> None:
    connector = backend.connection
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    queue = getattr(connector, "pq_executor", None)
    if isinstance(queue, AsyncPQExecutor) and not hasattr(queue, "_hybrid_repaired"):
        queue._hybrid_repaired = True
        _keep_workers(queue, failed)
        _close_from_own_loop(queue)
    if isinstance(connector, RedisConnector):
        _reconnect(connector)
        _look_up_at_once(connector, backend.config.blocking_timeout_secs)
        _write_on_threads(connector, backend.config.remote_url)


def _reconnect(connector: RedisConnector) -> None:
    """A connection that the server closed is opened anew and asked once more.

    Bug: ``RedisConnector`` makes its pool of 150 connections without redis-py's retry.
    Symptom: after a restart of the server each idle connection fails one read or
    write when its turn comes, which may be hours later.
    Remove when: ``RedisConnector`` sets a retry of its own.
    """
    connector.connection.set_retry(Retry(NoBackoff(), 1))


def _look_up_at_once(connector: RedisConnector, seconds: float) -> None:
    """A lookup takes one round trip, not one for each key.

    Bug: ``RedisConnector`` has no ``batched_contains``, so ``RemoteBackend`` asks for
    key after key and waits for each.
    Symptom: a server that answers after 50 ms needs more than ``lookup_timeout_ms`` for
    40 blocks, and never hits.
    Remove when: ``RedisConnector.support_batched_contains`` is True.
    """

    async def leading(keys: Sequence[CacheEngineKey]) -> int:
        async with connector.sem, connector.connection.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(key.to_string() + "metadata")
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


def _write_on_threads(connector: RedisConnector, url: str) -> None:
    """Values go to the socket on threads, without a copy and without the GIL.

    Bug: asyncio copies a value of 50 MB several times before it is sent, with the GIL held.
    Symptom: saving to Redis at a third of the speed, and steps that wait for the GIL.
    Remove when: ``RedisConnector`` writes with a client of its own that does neither.
    """
    client = redis.Redis.from_url(
        url,
        socket_timeout=WRITE_SECONDS,
        retry=redis.retry.Retry(NoBackoff(), 1, (redis.ConnectionError,)),
    )
    threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="hybrid-redis")

    async def set_(name: str, value: bytes | memoryview) -> bool:
        return await connector.loop.run_in_executor(threads, client.set, name, value)

    async def close() -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        client.close()
        await closing()

    closing, connector.connection.close = connector.connection.close, close
    connector.connection.set = set_


def _keep_workers(queue: AsyncPQExecutor, failed: Callable[[int], None]) -> None:
    """A cancelled read must not end a worker of the queue.

    Bug: ``RemoteBackend`` cancels the other reads of a batch after one failed;
    the worker then sets the result of a cancelled future and dies of it.
    Symptom: after a few failed reads every lookup waits for ever.
    Remove when: ``AsyncPQExecutor._worker`` checks ``done.cancelled()``.
    """
    submit = queue.submit_job

    @functools.wraps(submit)
    async def submit_job(*args: Any, **kwargs: Any) -> Any:
        job = asyncio.ensure_future(submit(*args, **kwargs))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_release)
            raise
        except Exception as error:
            _release_from(error)
            # Only a write brings records; LMCache logs its error and drops it.
            if records := kwargs.get("memory_objs"):
                failed(len(records))
            raise

    queue.submit_job = submit_job


def _release(job: asyncio.Future) -> None:
    """Give back the buffer that a read filled after nobody waited for it any more."""
    if job.cancelled():
        return
    if (error := job.exception()) is not None:
        _release_from(error)
    elif isinstance(job.result(), MemoryObj):
        job.result().ref_count_down()


def _release_from(error: BaseException) -> None:
    """Give back the buffer of a read that failed, which LMCache leaves in the traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        memory = frame.f_locals.get("memory_obj")
        if frame.f_code.co_name == "_get" and isinstance(memory, MemoryObj):
            memory.ref_count_down()


def _close_from_own_loop(queue: AsyncPQExecutor) -> None:
    """Closing must not wait for the event loop on that very loop.

    Bug: ``RedisConnector.close`` awaits ``pq_executor.shutdown``, which blocks
    until the loop it runs on has ended the workers.
    Symptom: an engine with Redis never shuts down, queued writes are lost.
    Remove when: ``RedisConnector.close`` awaits ``shutdown_async``.
    """

    async def shutdown(wait: bool = True) -> None:
        if wait:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(queue._queue.join(), FLUSH_SECONDS)
        await queue.shutdown_async(False)

    queue.shutdown = shutdown
