# SPDX-License-Identifier: Apache-2.0
"""Removes the records of a prompt from one rank's tiers, a few blocks with each call."""

import time
from collections import Counter

from vllm.logger import init_logger

from lmcache_hybrid.core.errors import RemovalError
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.hit_records import block_keys
from lmcache_hybrid.storage.store import Store

logger = init_logger("vllm.lmcache_hybrid.storage.drops")

# Blocks whose records are removed with one call of each backend.
BLOCKS = 16
# Seconds after which a call ends, so that lookups of other requests get their turn.
CALL_SECONDS = 0.02

IN_USE = (
    "another request loads records of this prompt, or waits for its turn to load them. Nothing was "
    "removed: repeat it later."
)
CLOSED = (
    "LMCache's freeze mode or its health monitor keeps a rank's store as it is. Nothing was "
    "removed: repeat it later."
)


def drop(plan: GroupPlan, store: Store, request: DropRequest) -> DropResult:
    """Remove records, the first blocks first.

    Without the first block's pages no lookup finds the blocks behind it. Only where another
    request stores these pages again between two calls may a third one claim what is left; its load
    then fails, and it is computed.
    """
    first = request.start // plan.block_size
    if not store.writable():
        return DropResult(first, refusal=CLOSED)
    if request.block is None:
        hashes = {*request.prefix.hashes[first:], *request.prefix.inner.values()}
        used = store.in_use(hashes, request.prefix.tags)
        return DropResult(first, refusal=IN_USE if used else "")
    removed: Counter[str] = Counter()
    block, ends = request.block, time.monotonic() + CALL_SECONDS
    while block < request.end:
        last = min(block + BLOCKS, request.end)
        keys = [
            key
            for at in range(block, last)
            for key in block_keys(request.prefix, at, plan)
            if key.boundary > request.start
        ]
        try:
            if store.is_writing(keys, _left(request)):
                return DropResult(block, dict(removed), waits=True)
            removed.update(store.remove(keys, _left(request)))
        except RemovalError as error:
            logger.warning_once("A request's drop has failed: %s", error)
            failure = f"{error.backend} could not remove records. Some may be gone: repeat it."
            return DropResult(block, dict(removed), failure=failure)
        block = last
        if time.monotonic() >= ends:
            break
    return DropResult(block, dict(removed))


def _left(request: DropRequest) -> float:
    return max(0.0, request.deadline - time.monotonic())
