# SPDX-License-Identifier: Apache-2.0
"""Sends a record through every configured backend, by LMCache's own StorageManager."""

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from redis.exceptions import NoPermissionError

from lmcache_hybrid.config.lmcache_config import refusals, settle_lmcache_config
from lmcache_hybrid.config.stores import REDIS, all_places, places
from lmcache_hybrid.config.stores.base import Place, imported
from lmcache_hybrid.core.errors import LoadError, RecordError, StoreError
from lmcache_hybrid.core.keys import STATE, RecordKey
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.disk.full_disk import free_bytes
from lmcache_hybrid.storage.record_format import digests_of
from lmcache_hybrid.storage.remote.record_connector import RecordConnector, unwrapped
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, error, listen, ok, one_line, skipped
from lmcache_hybrid.tools.doctor.folders import stand_ins
from lmcache_hybrid.tools.doctor.redis_rights import refusal
from lmcache_hybrid.tools.doctor.written import stores_alone

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_hybrid.storage.lmcache_store import LMCacheStore

MODEL_NAME = "lmcache-hybrid-doctor"
# Bytes of the test record: without a model, and at most.
DEFAULT_BYTES, MOST_BYTES = 1 << 20, 256 << 20
WAIT_SECONDS = 20.0
# Max seconds for a write in flight to end before the test record is deleted.
SETTLE_SECONDS = 5.0
CLOSE_SECONDS = 10.0
NO_LIMIT_GB = 1 << 30
_names = itertools.count()


def check_backends(context: Context) -> Iterator[Finding]:
    """Write a test record, read it back and delete it, in RAM, on disk and in the remote store.

    Stores are also tried while other options are refused.
    """
    config = context.config or context.written
    if config is None:
        yield skipped("backends", "Stores are tried once the configuration can be read.")
        return
    with stand_ins(config) as made:
        yield from made.findings(_accepted(context, made.config))


def _accepted(context: Context, config: "LMCacheEngineConfig") -> Iterator[Finding]:
    """
    Args:
        config: a copy, mutated here.
    """
    if context.config is None or refusals(config, context.block_size):
        config, left_out = stores_alone(config)
        if left_out:
            yield skipped(
                "backends", f"Not tried until it is accepted: {', '.join(left_out)}; see above."
            )
    # Every backend gets the record and is read, whichever the engine will use.
    config.store_location = config.retrieve_locations = config.remote_config_url = None
    settle_lmcache_config(config, context.block_size or config.chunk_size)
    # The test record must evict none of an engine's, nor the files of other fingerprints.
    config.max_local_disk_size += NO_LIMIT_GB
    for place in places(config):
        if told := _unusable(place):
            yield told
            if place.plugin:
                names = [name for name in config.remote_storage_plugins if name != place.plugin]
                config.remote_storage_plugins = names
            else:
                config.remote_url = None
    size = DEFAULT_BYTES if context.model is None else context.model.largest or DEFAULT_BYTES
    try:
        yield from _through_all(config, min(size, MOST_BYTES))
    except StoreError as failure:
        yield error("backends", str(failure))


def _unusable(place: Place) -> Finding | None:
    """Return why no test record is sent to a server; None if one is, or the place has no server."""
    if place.kind is REDIS and (told := refusal(place)):
        return told
    if place.kind.ping and not place.plugin:
        try:
            imported(place.kind.ping)(place.url)
        except StoreError as failure:
            # An engine sends no PING.
            if not isinstance(failure.__cause__, NoPermissionError):
                return error("remote_url", str(failure))
    return None


def _through_all(config: "LMCacheEngineConfig", size: int) -> Iterator[Finding]:
    with _opened(config, size) as store, listen("lmcache", "vllm.lmcache_hybrid") as heard:
        # Without local_cpu, RAM is only a buffer for copies and keeps nothing.
        kept_in = {place.backend for place in all_places(config)}
        tried = [name for name in store.manager.storage_backends if name in kept_in]
        if not tried:
            return
        key = RecordKey(STATE, 0, os.urandom(32), config.chunk_size)
        expected = torch.randint(0, 256, (size,), dtype=torch.uint8)
        buffer = store.reserve(size)
        if buffer is None:
            yield error(
                "backends",
                f"LMCache has no memory for a record of {size:,} bytes, so nothing is saved.",
                "Raise max_local_cpu_size.",
            )
            return
        for name in list(tried):
            if away := _away(store, name, key):
                tried.remove(name)
                option, shown = _label(config, name)
                yield error(
                    option,
                    f"{shown} cannot be used: {away}.",
                    "See that it runs, and that host, port and credentials are right.",
                )
            elif _is_full(store.tiers[name].backend, size):
                tried.remove(name)
                option, shown = _label(config, name)
                yield skipped(
                    option,
                    f"{shown} has no room for a test record, and records that it holds are not "
                    "removed for one.",
                )
        buffer.payload.copy_(expected)
        buffer.digests = digests_of(memoryview(expected.numpy()))
        try:
            store.put([(key, buffer)])
            for name in tried:
                yield _through(store, name, key, expected, _label(config, name), heard)
        finally:  # even if a check fails, or is interrupted
            left = _delete(store, tried, key)
        for name in left:
            option, shown = _label(config, name)
            yield error(
                option,
                f"{shown} still holds the test record of {MODEL_NAME}.",
                f"Delete it: lmcache-hybrid purge STORE --model {MODEL_NAME}.",
            )


def _away(store: "LMCacheStore", name: str, key: RecordKey) -> str:
    """Return why a remote store does not answer; empty if it does."""
    tier = store.tiers[name]
    if not tier.indexed and tier.backend.connection is not None:
        try:
            tier.held([store.engine_key(key)], math.inf)
        except Exception as failure:  # whatever its client raises
            late = f"no answer within {tier.backend.config.blocking_timeout_secs} s"
            said = late if isinstance(failure, TimeoutError) else one_line(failure)
            return unwrapped(tier.backend.connection).cause(failure) or said
    return ""


def _is_full(backend: Any, size: int) -> bool:
    """Whether a disk has records and no room: an engine would evict some for a new one."""
    if not isinstance(backend, LocalDisk) or free_bytes(backend.path) >= size:
        return False
    return bool(backend.dict or backend.others.strangers)


def _through(
    store: "LMCacheStore",
    name: str,
    key: RecordKey,
    expected: torch.Tensor,
    label: tuple[str, str],
    heard: list[str],
) -> Finding:
    """Wait until the record is there, read it and compare."""
    option, shown = label
    if not until(lambda: _holds(store, name, key)):
        return error(
            option,
            f"{shown} did not take a record of {expected.numel():,} bytes within "
            f"{WAIT_SECONDS:.0f} seconds{_reason(heard)}, so nothing hits there.",
            "Make room, or allow values of this size.",
        )
    claim = store.claim({key: name})
    if claim is None:
        return error(
            option,
            f"{shown} lost a record as soon as it was written{_reason(heard)}, so nothing hits "
            "there.",
            "Make room, or see what else deletes records there.",
        )
    started = time.perf_counter()
    try:
        (buffer,) = store.fetch(claim, [key])
        same = torch.equal(buffer.payload, expected)
        buffer.release()
    except (LoadError, RecordError) as failure:
        return error(
            option,
            f"{shown} did not give a record back: {one_line(failure)}{_reason(heard)}.",
            "Look at the disk's or server's own log.",
        )
    finally:
        claim.release()
    if not same:
        return error(
            option,
            f"{shown} returned other bytes than were written; to engines such a record is a miss.",
            "Replace the disk or server.",
        )
    milliseconds = 1e3 * (time.perf_counter() - started)
    return ok(
        option,
        f"{shown} takes and returns a record of {expected.numel():,} bytes (read in "
        f"{milliseconds:.1f} ms).",
    )


def _reason(heard: list[str]) -> str:
    """Return LMCache's last warning, in parentheses."""
    return f" ({heard[-1]})" if heard else ""


def _delete(store: "LMCacheStore", names: list[str], key: RecordKey) -> list[str]:
    """Delete the test record; returns the backends that still hold it."""
    for name in names:
        # Wait for the write: a record deleted before it would stay.
        until(partial(_holds, store, name, key), min(SETTLE_SECONDS, WAIT_SECONDS))
    store.discard(key)
    return [name for name in names if not _deleted(store, name, key)]


def _deleted(store: "LMCacheStore", name: str, key: RecordKey) -> bool:
    backend, engine_key = store.manager.storage_backends[name], store.engine_key(key)
    connector = unwrapped(getattr(backend, "connection", None))
    if isinstance(connector, RecordConnector):
        try:
            connector.delete(engine_key, WAIT_SECONDS)
        except Exception:  # whatever its client raises
            return _gone(store, name, key)  # a write that was refused left nothing
    return until(partial(_gone, store, name, key))


def _gone(store: "LMCacheStore", name: str, key: RecordKey) -> bool:
    backend = store.manager.storage_backends[name]
    if isinstance(backend, LocalDisk):
        # It leaves the index first; another thread deletes the file, under another name.
        file = Path(backend.path_of(store.engine_key(key)))
        return not any(each.name.startswith(file.name) for each in file.parent.iterdir())
    return not _holds(store, name, key)


def _holds(store: "LMCacheStore", name: str, key: RecordKey) -> bool:
    try:
        return store.tiers[name].held([store.engine_key(key)], math.inf)[0]
    except Exception:  # whatever its client raises: not there for us
        return False


def until(condition: Callable[[], bool], seconds: float | None = None) -> bool:
    """Wait until ``condition`` holds; returns whether it did. LMCache writes asynchronously."""
    deadline = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _label(config: "LMCacheEngineConfig", name: str) -> tuple[str, str]:
    """Return the option, and its value without passwords."""
    place = _place(config, name)
    return place.option, place.shown


def _place(config: "LMCacheEngineConfig", name: str) -> Place:
    return next(place for place in all_places(config) if place.backend == name)


@contextmanager
def _opened(config: "LMCacheEngineConfig", size: int) -> Iterator["LMCacheStore"]:
    """Open an LMCache engine of our own with a small pool, without vLLM."""
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore
    from lmcache_hybrid.tools.standalone import make_engine

    # Writing holds one buffer, reading two.
    config.max_local_cpu_size = (4 * size + (16 << 20)) / (1 << 30)
    name = f"{MODEL_NAME}-{os.getpid()}-{next(_names)}"
    try:
        engine = make_engine(name, config, MODEL_NAME)
        engine.post_init()
    except Exception as failure:  # whatever LMCache, or the system, says
        _destroy(name)
        raise StoreError(
            f"LMCache opens no store with these options ({one_line(failure).rstrip('.')}), so "
            "nothing hits; correct what it names."
        ) from failure
    try:
        # A fingerprint of its own, so that no other record is ever read or deleted.
        yield LMCacheStore(engine, MODEL_NAME, os.urandom(16), size, visit=True)
    finally:
        _destroy(name)


def _destroy(name: str) -> None:
    """End an LMCache engine. Its shutdown may wait for ever for a backend; this does not."""
    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

    closing = threading.Thread(target=LMCacheEngineBuilder.destroy, args=(name,), daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)
