# SPDX-License-Identifier: Apache-2.0
"""Keeps the records of a prompt in one rank's tiers."""

from collections.abc import Mapping

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.protocol.hit_records import block_keys, record_keys, used_keys
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.storage.store import Store


def keep(
    plan: GroupPlan, store: Store, sizes: Mapping[int, int], request: KeepRequest
) -> KeepResult:
    """Answer one call. Thread-safe; nothing is read or written.

    Args:
        sizes: bytes of a record, by group.
    """
    prefix = request.prefix
    if not request.seconds:
        for kept in store.kept.values():
            kept.end(map(store.engine_key, _ending(plan, request)), request.number)
        return KeepResult(dict.fromkeys(store.kept, ""))
    wanted = used_keys(prefix, request.boundaries, plan, prefix.inner)
    records = {store.engine_key(key): sizes[key.group] for key in wanted}
    if request.backends is None:
        return KeepResult(
            {
                name: kept.why_full(records, request.salt, request.share)
                for name, kept in store.kept.items()
            }
        )
    for name in request.backends:
        store.kept[name].keep(records, request.salt, request.seconds, request.number)
    return KeepResult(dict.fromkeys(request.backends, ""))


def _ending(plan: GroupPlan, request: KeepRequest) -> list[RecordKey]:
    """List what a call of 0 seconds keeps no longer."""
    prefix = request.prefix
    if not request.number:
        blocks = range(len(prefix.hashes) + bool(prefix.inner))
        return [key for block in blocks for key in block_keys(prefix, block, plan)]
    pages, boundary = request.stays
    stay = set(used_keys(prefix, (boundary,), plan))
    for block in range(pages):
        stay.update(record_keys(prefix, block, plan.block_size, ATTENTION, plan.attention))
    return [key for key in used_keys(prefix, request.boundaries, plan) if key not in stay]
