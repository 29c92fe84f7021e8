# SPDX-License-Identifier: Apache-2.0
"""What records need of LMCache's remote backends: questions and removals that end in time.

Every backend's connector is one of this package's own, see :mod:`.adapters`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey

from lmcache_hybrid.storage.folder.record_io import Fate
from lmcache_hybrid.storage.remote.record_connector import RecordConnector

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

# To wait for the removal of a damaged record; the server has just answered.
REMOVAL_SECONDS = 1.0


def exists(backend: "RemoteBackend", key: CacheEngineKey) -> bool:
    """Whether the store holds a value; ``RemoteBackend.contains`` waits for ever.

    Raises:
        Exception: the store did not answer within ``blocking_timeout_secs``, or failed.
    """
    return existing(backend, [key], backend.config.blocking_timeout_secs)[0]


def existing(
    backend: "RemoteBackend", keys: Sequence[CacheEngineKey], seconds: float
) -> Sequence[bool]:
    """Whether the store holds each value.

    Raises:
        Exception: no answer within ``seconds`` and ``blocking_timeout_secs``, or a failure.
    """
    if backend.connection is None:
        return [False] * len(keys)
    if backend._mla_worker_id_as0_mode:
        keys = [key.with_new_worker_id(0) for key in keys]
    seconds = min(seconds, backend.config.blocking_timeout_secs)
    return _connector(backend).existing(keys, seconds)


def fate(backend: "RemoteBackend", key: CacheEngineKey, largest: int) -> Fate:
    """Find out why a value that was promised could not be read.

    Args:
        largest: bytes of the largest record.

    Raises:
        Exception: the store did not answer within ``blocking_timeout_secs``, or failed.
    """
    return _connector(backend).fate(key, largest, backend.config.blocking_timeout_secs)


def remove(backend: "RemoteBackend", key: CacheEngineKey) -> None:
    """Delete a value.

    Raises:
        Exception: the store did not delete it in time.
    """
    _connector(backend).delete(key, REMOVAL_SECONDS)


def used(backend: "RemoteBackend", keys: Sequence[CacheEngineKey]) -> None:
    """Values were hit; does not wait, and never raises."""
    if backend.connection is not None:
        _connector(backend).used(keys)


def unwrapped(connector: Any) -> Any:
    """The connector that does the work, without LMCache's instruments around it."""
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    return connector


def _connector(backend: "RemoteBackend") -> RecordConnector:
    connector = unwrapped(backend.connection)
    if not isinstance(connector, RecordConnector):
        raise TypeError(f"{type(connector).__name__} is no connector of this package")
    return connector


def watch(
    backend: "RemoteBackend",
    failed: Callable[[int], None],
    written: Callable[[CacheEngineKey], None],
) -> None:
    """Be told how writes end, now and after a reconnect. Mutates ``backend``.

    Args:
        failed: called with the number of records that were not written, by any thread.
        written: called with the key of each that was, by any thread.
    """
    connect = backend.init_connection

    def tell() -> None:
        if backend.connection is not None:
            connector = _connector(backend)
            connector.failed, connector.written = failed, written

    @functools.wraps(connect)
    def init_connection() -> None:
        connect()
        tell()

    backend.init_connection = init_connection
    tell()


def remove_what_checks_leave(backend: "RemoteBackend") -> None:
    """Delete the value of LMCache's health check once it was read. Mutates ``backend``.

    The check writes memory of the pool under a name of its own, and leaves it in the store.
    """
    get = backend.get_blocking

    @functools.wraps(get)
    def get_blocking(key: CacheEngineKey) -> "MemoryObj | None":
        memory = get(key)
        if key.dtype is not torch.uint8:  # that of every record
            with contextlib.suppress(Exception):  # the next check replaces it
                remove(backend, key)
        return memory

    backend.get_blocking = get_blocking
