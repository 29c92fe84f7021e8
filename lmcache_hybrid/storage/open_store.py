# SPDX-License-Identifier: Apache-2.0
"""Opens a rank's backends, and its store under the names of its model, and logs them."""

import logging
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.storage.key_names import readable_name
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.residency import Residency

if TYPE_CHECKING:
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore
    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine, LMCacheManager

logger = init_logger("vllm.lmcache_hybrid.storage.open_store")


# LMCache's name of its event loop's thread, and max seconds to wait for its end.
LOOP_THREAD, LOOP_SECONDS = "storage-manager-event-loop", 5.0


def open_backends(manager: "LMCacheManager") -> "LMCacheEngine | None":
    """Open LMCache's backends.

    Returns:
        The engine; None where they do not open, which is logged with LMCache's reason.
    """
    before = threading.enumerate()
    logging.getLogger("lmcache.v1.memory_management").addFilter(_is_no_full_pool)
    manager.post_init()
    engine = manager.lmcache_engine
    if engine is not None and engine.storage_manager is not None:
        return engine
    _end_lost_loop(before)
    # A traceback, whose last line is the error.
    reason = getattr(manager, "_init_failed_reason", "").strip().splitlines()
    logger.error(
        "LMCache could not open its store (%s): this rank computes every prompt. Correct what "
        "that names, an option or the store itself, and restart the engine.",
        reason[-1] if reason else "see above",
    )
    return None


def _is_no_full_pool(record: logging.LogRecord) -> bool:
    """Keep LMCache from warning of each record for which it then evicts others.

    A pool that is full is as it should be. What finds no room even so, this package reports.
    """
    return not str(record.msg).startswith("Failed to allocate memory block")


def close_engine(manager: "LMCacheManager") -> None:
    """Close the engine if LMCache could not start its own thread for that."""
    engine = manager.lmcache_engine
    if engine and engine.storage_manager and engine.storage_manager.thread.is_alive():
        engine.close()


def _end_lost_loop(before: Collection[threading.Thread]) -> None:
    """End the event loop that LMCache leaves behind where its backends do not open.

    Only its thread still holds it, as an argument. Python waits for that thread when the process
    ends.

    Args:
        before: the threads that ran before LMCache was asked to open them.
    """
    for thread in set(threading.enumerate()) - set(before):
        if thread.name == LOOP_THREAD:
            # CPython deletes the arguments where the thread has ended since.
            for loop in getattr(thread, "_args", ()):
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(loop.stop)
            thread.join(LOOP_SECONDS)


def open_store(
    engine: "LMCacheEngine",
    model: str,
    fingerprint: bytes,
    replicas: Replicas | None,
    max_payload: int,
    digester: Digester,
    residency: Residency | None,
) -> "LMCacheStore":
    """Open the store of an engine after its ``post_init``.

    Args:
        model: name or folder.
        fingerprint: of this rank, before it is renamed for the digester's key.
        replicas: groups that other ranks also hold, likewise.

    For the others see :class:`LMCacheStore`.
    """
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore

    fingerprint = digester.name(fingerprint)
    logger.info(
        "Records of this rank have the fingerprint %s%s.",
        fingerprint[:8].hex(),
        f", sealed with the key {digester.key_id.hex()}" if digester.key_id else "",
    )
    if replicas is not None:
        replicas = replicas.sealed_with(digester)
        logger.info(
            "Pages of KV cache groups %s are equal on all tensor-parallel ranks: rank %d "
            "writes them to stores that ranks share, with the fingerprint %s.",
            tuple(sorted(replicas.groups)),
            replicas.owner,
            replicas.fingerprint[:8].hex(),
        )
    return LMCacheStore(
        engine, readable_name(model), fingerprint, max_payload, digester, replicas, residency
    )
