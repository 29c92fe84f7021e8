# SPDX-License-Identifier: Apache-2.0
"""Settings with which an engine hits never, or seldom, or that do nothing: it says so at start-up.

What an engine finds out only while it serves is in ``scheduler/store_watch.py``.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcache_hybrid.config.own_options import LOAD_LIMIT_KEY
from lmcache_hybrid.config.stores import all_places

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


def without_hits(
    config: "LMCacheEngineConfig",
    role: str | None,
    longest: int,
    unit: int,
    finer: int,
    most: int = 0,
) -> Iterator[str]:
    """Yield a sentence for each setting that makes every store or hit impossible.

    Args:
        role: ``kv_role``.
        longest: ``max_model_len`` in tokens.
        unit: tokens between boundaries; prompts hit at its multiples. 0 where no model is known.
        finer: a ``--prefix-match-unit`` that allows more hits, 0 for none.
        most: ``lmcache.max_tokens_per_load``, 0 for no limit.
    """
    if skip := os.environ.get("LMCACHE_FORCE_SKIP_SAVE"):
        yield (
            f"LMCACHE_FORCE_SKIP_SAVE={skip} lets this engine store nothing, whatever its value "
            "is; unset it."
        )
    lasting = any((config.local_disk, config.remote_url, config.remote_storage_plugins))
    if not (config.local_cpu or lasting):
        yield (
            "local_cpu, local_disk and remote_url are all off, so nothing is kept; set local_cpu "
            "to true, or name a disk or a remote store."
        )
    elif role == "kv_consumer" and not lasting:
        yield (
            "kv_role='kv_consumer' stores nothing, and no other engine fills this one's RAM; set "
            "kv_role to kv_both, or name a store that another engine fills."
        )
    written, read = config.store_location, config.retrieve_locations
    if written and read and written not in read:
        yield (
            f"store_location={written!r} is none of retrieve_locations={read!r}, so nothing that "
            "this engine stores is read; name it there, too, or remove one of them."
        )
    if unit and config.min_retrieve_tokens >= longest:
        yield (
            f"min_retrieve_tokens={config.min_retrieve_tokens} is not below max_model_len="
            f"{longest}, so no hit is long enough to be loaded; set it to less."
        )
    whole = most // unit * unit if unit else most  # loads end at multiples
    if most and whole < config.min_retrieve_tokens:
        yield (
            f"{LOAD_LIMIT_KEY}={most} allows loads of {whole} tokens at most, which is below "
            f"min_retrieve_tokens={config.min_retrieve_tokens}, so no load is as long as it must "
            "be; raise the one, or lower the other."
        )
    if longest <= unit:
        fix = f"add --prefix-match-unit {finer}, or " if finer else ""
        yield (
            f"max_model_len={longest} is not above {unit} tokens, at whose multiples prompts hit, "
            f"so none ever does; {fix}raise --max-model-len."
        )


_FILES = "records are no multiples of disk blocks, so their files go through the page cache"
_POOL = "states are each rank's own, so each rank takes max_local_cpu_size"
_REPLICAS = "pages that are equal on all ranks are stored once in a shared store as it is"
# Options of LMCache that do nothing here, and why.
_MOOT = {
    "reserve_local_cpu_size": _POOL,
    "use_gpu_connector_v3": "pages are copied by this package",
}
# The same of keys of its ``extra_config``.
_MOOT_EXTRA = {
    "use_odirect": _FILES,
    "fs_connector_use_odirect": _FILES,
    "fs_connector_read_ahead_size": _FILES,
    "first_rank_max_local_cpu_size": _POOL,
    "save_only_first_rank": _REPLICAS,
    "remote_enable_mla_worker_id_as0": _REPLICAS,
    "force_store_wait": "no step waits for memory, and what finds none is not stored",
    "use_exists_sync": "many records are looked up at once",
}


def with_few_hits(config: "LMCacheEngineConfig") -> Iterator[str]:
    """Yield a sentence for each setting with which less is stored, or done, than meant."""
    for name, why in _MOOT.items():
        if value := getattr(config, name, None):
            yield f"{name}={value!r} does nothing: {why}; remove it."
    for name, why in _MOOT_EXTRA.items():
        if value := (config.extra_config or {}).get(name):
            yield f"extra_config.{name}={value!r} does nothing: {why}; remove it."
    read = config.retrieve_locations
    # What is stored in one place alone is read there, see without_hits.
    for place in all_places(config) if read and not config.store_location else ():
        if place.backend not in read:
            yield (
                f"retrieve_locations={read!r} leaves out {place.backend!r}, so nothing is ever "
                "read there; name it, too, or remove retrieve_locations."
            )
    if not config.local_disk and (config.max_local_disk_size or 0) > 0:
        yield (
            f"max_local_disk_size={config.max_local_disk_size} does nothing without local_disk, so "
            "no record is kept on a disk; name a folder there, or remove it."
        )
    if config.priority_limit is not None and config.priority_limit < 0:
        yield (
            f"priority_limit={config.priority_limit} is below 0, the priority of each request that "
            f"names none, so only requests that name {config.priority_limit} or less are stored; "
            "set it to 0 or more for the others."
        )


def relative(option: str, folder: str) -> str:
    """Return what a relative folder means; "" for a whole path."""
    if os.path.isabs(folder):
        return ""
    return (
        f"{option}={folder!r} is relative, so an engine that starts in {os.getcwd()} keeps its "
        f"records in {os.path.abspath(folder)}, and finds them only if it starts there again"
    )
