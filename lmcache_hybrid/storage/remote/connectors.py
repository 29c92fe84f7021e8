# SPDX-License-Identifier: Apache-2.0
"""What records need of LMCache's remote backends: questions and removals that end in time."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

from lmcache_hybrid.storage.remote.record_connector import RecordConnector

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

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
        damaged: False where it could not be read: it may be whole, so a store that other engines
            share keeps it.

    Raises:
        Exception: the store did not delete it in time.
    """
    connector = unwrapped(backend.connection)
    if not isinstance(connector, RecordConnector):
        # Past RemoteBackend.remove, which logs a traceback where the connector has none.
        connector.remove_sync(key)
    elif damaged:
        connector.delete(key, REMOVAL_SECONDS)


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
    connector = unwrapped(backend.connection)
    seconds = min(seconds, backend.config.blocking_timeout_secs)
    if isinstance(connector, RecordConnector):
        return connector.existing(keys, seconds)
    job = _existing_side_by_side(backend.connection, keys)
    answer = asyncio.run_coroutine_threadsafe(job, backend.loop)
    try:
        return answer.result(seconds)
    finally:
        answer.cancel()


async def _existing_side_by_side(connection: Any, keys: Sequence[CacheEngineKey]) -> list[bool]:
    turns = asyncio.Semaphore(SIDE_BY_SIDE)

    async def exists(key: CacheEngineKey) -> bool:
        async with turns:
            return await connection.exists(key)

    return await asyncio.gather(*map(exists, keys))


def unwrapped(connector: Any) -> Any:
    """The connector that does the work, without LMCache's instruments around it."""
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    return connector


def watch(backend: "RemoteBackend", failed: Callable[[int], None]) -> None:
    """Count failed writes, and repair a connector of LMCache's, now and after a reconnect.

    Mutates ``backend``.

    Args:
        failed: called with the number of records that were not written.
    """
    connect = backend.init_connection

    @functools.wraps(connect)
    def init_connection() -> None:
        connect()
        _watch(backend, failed)

    backend.init_connection = init_connection
    _watch(backend, failed)


def _watch(backend: "RemoteBackend", failed: Callable[[int], None]) -> None:
    connector = unwrapped(backend.connection)
    if isinstance(connector, RecordConnector):
        connector.failed = failed
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


def _release(job: asyncio.Future) -> None:
    """Release the buffer of a read that ended after nobody waited for it."""
    if not job.cancelled() and job.exception() is None and isinstance(job.result(), MemoryObj):
        job.result().ref_count_down()
