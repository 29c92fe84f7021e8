# SPDX-License-Identifier: Apache-2.0
"""Repairs LMCache's remote connectors: failed reads, reconnects, shutdown."""

import asyncio
import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor

from lmcache_hybrid.storage.remote import redis as redis_stores

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

# At shutdown, wait so long for queued writes.
FLUSH_SECONDS = 8.0
# Calls in flight at once to a store that takes one key at a time.
SIDE_BY_SIDE = 64
# To wait for the removal of a damaged record; the server has just answered.
REMOVAL_SECONDS = 1.0


def exists(backend: "RemoteBackend", key: CacheEngineKey) -> bool:
    """Whether the store holds a value; ``RemoteBackend.contains`` waits for ever.

    Raises:
        Exception: the store did not answer within ``blocking_timeout_secs``, or failed.
    """
    answer = asyncio.run_coroutine_threadsafe(backend.connection.exists(key), backend.loop)
    try:
        return answer.result(backend.config.blocking_timeout_secs)
    finally:
        answer.cancel()


def remove(backend: "RemoteBackend", key: CacheEngineKey, damaged: bool) -> None:
    """Delete a value.

    Args:
        damaged: False where it could not be read: it may be whole, so a Redis, which other
            engines share, keeps it.

    Raises:
        Exception: the store did not delete it in time.
    """
    if damaged and redis_stores.delete(backend, key, REMOVAL_SECONDS):
        return
    # Past RemoteBackend.remove, which logs a traceback where the connector has none (Redis).
    backend.connection.remove_sync(key)


def existing(
    backend: "RemoteBackend", keys: Sequence[CacheEngineKey], seconds: float
) -> Sequence[bool]:
    """Whether the store holds each value: one round trip to Redis, else side by side.

    Raises:
        Exception: no answer within ``seconds`` and ``blocking_timeout_secs``, or a failure.
    """
    if backend.connection is None:
        return [False] * len(keys)
    if backend._mla_worker_id_as0_mode:
        keys = [key.with_new_worker_id(0) for key in keys]
    job = redis_stores.existing(backend.connection, keys)
    if job is None:
        job = _existing_side_by_side(backend.connection, keys)
    answer = asyncio.run_coroutine_threadsafe(job, backend.loop)
    try:
        return answer.result(min(seconds, backend.config.blocking_timeout_secs))
    finally:
        answer.cancel()


async def _existing_side_by_side(connection: Any, keys: Sequence[CacheEngineKey]) -> list[bool]:
    turns = asyncio.Semaphore(SIDE_BY_SIDE)

    async def exists(key: CacheEngineKey) -> bool:
        async with turns:
            return await connection.exists(key)

    return await asyncio.gather(*map(exists, keys))


def repair(backend: "RemoteBackend", failed: Callable[[int], None] = lambda records: None) -> None:
    """Repair this backend's connector and its job queue, now and after a reconnect.

    Mutates ``backend``.

    Args:
        failed: called with the number of records that were not written.
    """
    connect = backend.init_connection

    @functools.wraps(connect)
    def init_connection() -> None:
        connect()
        _repair(backend, failed)

    backend.init_connection = init_connection
    _repair(backend, failed)


def _repair(backend: "RemoteBackend", failed: Callable[[int], None]) -> None:
    connector = redis_stores.repair(backend)
    queue = getattr(connector, "pq_executor", None)
    if isinstance(queue, AsyncPQExecutor) and not hasattr(queue, "_hybrid_repaired"):
        queue._hybrid_repaired = True
        _keep_workers(queue, failed)
        _close_from_own_loop(queue)
    elif isinstance(connector, FSConnector) and not hasattr(connector, "_hybrid_repaired"):
        connector._hybrid_repaired = True
        _release_late_reads(connector)


def _release_late_reads(connector: FSConnector) -> None:
    """Have a read that nobody waits for give its buffer back when it ends.

    Bug: ``RemoteBackend`` cancels a read that timed out, and ``FSConnector.get`` loses its
    buffer then.
    Symptom: memory is missing until Python's collector finds the buffer. Where that is inside
    LMCache's allocator, freeing it waits for the lock that the same thread holds, for ever.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``FSConnector.get`` releases its buffer when it is cancelled.
    """
    get = connector.get

    @functools.wraps(get)
    async def get_(key: CacheEngineKey) -> MemoryObj | None:
        job = asyncio.ensure_future(get(key))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_release)
            raise

    connector.get = get_


def _keep_workers(queue: AsyncPQExecutor, failed: Callable[[int], None]) -> None:
    """Keep the queue's workers alive when a read is cancelled.

    Bug: ``RemoteBackend`` cancels the other reads of a batch after one failed;
    the worker then sets the result of a cancelled future and dies of it.
    Symptom: after a few failed reads every lookup waits for ever.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
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
    """Release the buffer of a read that ended after nobody waited for it."""
    if job.cancelled():
        return
    if (error := job.exception()) is not None:
        _release_from(error)
    elif isinstance(job.result(), MemoryObj):
        job.result().ref_count_down()


def _release_from(error: BaseException) -> None:
    """Release the buffer of a failed read, which LMCache leaves in the traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        memory = frame.f_locals.get("memory_obj")
        if frame.f_code.co_name == "_get" and isinstance(memory, MemoryObj):
            memory.ref_count_down()


def _close_from_own_loop(queue: AsyncPQExecutor) -> None:
    """Close without waiting for the event loop on that very loop.

    Bug: ``RedisConnector.close`` awaits ``pq_executor.shutdown``, which blocks
    until the loop it runs on has ended the workers.
    Symptom: an engine with Redis never shuts down, queued writes are lost.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``RedisConnector.close`` and ``RedisClusterConnector.close`` await
    ``shutdown_async``.
    """

    async def shutdown(wait: bool = True) -> None:
        if wait:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(queue._queue.join(), FLUSH_SECONDS)
        await queue.shutdown_async(False)

    queue.shutdown = shutdown
