# SPDX-License-Identifier: Apache-2.0
"""Settings with which an engine hits never, or seldom, or that do nothing: it says so at start-up.

What an engine finds out only while it serves is in ``scheduler/store_watch.py``.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_hybrid.config.own_options import LOAD_LIMIT_KEY
from lmcache_hybrid.config.stores import all_places
from lmcache_hybrid.config.stores.base import folders_in

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


def without_hits(
    config: "LMCacheEngineConfig",
    role: str | None,
    longest: int,
    unit: int,
    finer: int,
    most: int = 0,
    generates: bool = True,
) -> Iterator[str]:
    """Yield a sentence for each setting that makes every store or hit impossible.

    Args:
        role: ``kv_role``.
        longest: ``max_model_len`` in tokens.
        unit: tokens between boundaries; prompts hit at its multiples. 0 where no model is known.
        finer: a ``--prefix-match-unit`` that allows more hits, 0 for none.
        most: ``lmcache.max_tokens_per_load``, 0 for no limit.
        generates: False for pooling, whose prompts may have ``longest`` tokens.
    """
    if skip := os.environ.get("LMCACHE_FORCE_SKIP_SAVE"):
        yield (
            f"LMCACHE_FORCE_SKIP_SAVE={skip} lets this engine store nothing, whatever its value "
            "is; unset it."
        )
    shared = config.remote_url or config.remote_storage_plugins
    if not (config.local_cpu or config.local_disk or shared):
        yield (
            "local_cpu, local_disk and remote_url are all off, so nothing is kept; set local_cpu "
            "to true, or name a disk or a remote store."
        )
    elif role == "kv_consumer" and not (shared or _has_files(config.local_disk)):
        yield (
            "kv_role='kv_consumer' stores nothing, and no other engine fills this one's RAM or "
            "local_disk; set kv_role to kv_both, or name a store that another engine fills."
        )
    written, read = config.store_location, config.retrieve_locations
    if written and read and written not in read:
        yield (
            f"store_location={written!r} is none of retrieve_locations={read!r}, so nothing that "
            "this engine stores is read; name it there, too, or remove one of them."
        )
    # A prompt leaves room for a token to generate, and a hit a token to compute.
    deepest = (longest - 1 - generates) // unit * unit if unit else 0
    if 0 < deepest < config.min_retrieve_tokens:
        yield (
            f"min_retrieve_tokens={config.min_retrieve_tokens} is above {deepest}, the longest hit "
            f"of a prompt with max_model_len={longest}, so none is long enough to be loaded; set "
            "it to less."
        )
    whole = most // unit * unit if unit else most  # loads end at multiples
    if most and whole < config.min_retrieve_tokens:
        yield (
            f"{LOAD_LIMIT_KEY}={most} allows loads of {whole} tokens at most, which is below "
            f"min_retrieve_tokens={config.min_retrieve_tokens}, so no load is as long as it must "
            "be; raise the one, or lower the other."
        )
    if unit and not deepest:
        fix = f"add --prefix-match-unit {finer}, or " if finer else ""
        yield (
            f"max_model_len={longest} lets no prompt be longer than {unit} tokens, at whose "
            f"multiples prompts hit, so none ever does; {fix}raise --max-model-len."
        )


def _has_files(folders: str | None) -> bool:
    """Whether the folders of ``local_disk`` hold anything, maybe of an engine that stored."""
    found = folders_in("local_disk", folders) if folders else ()
    return any(next(Path(folder).glob("*"), None) for folder in found)


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
