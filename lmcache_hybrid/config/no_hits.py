# SPDX-License-Identifier: Apache-2.0
"""Settings with which an engine hits never, or seldom, or that do nothing: it says so at start-up.

What an engine finds out only while it serves is in ``scheduler/store_watch.py``.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


def without_hits(
    config: "LMCacheEngineConfig", role: str | None, longest: int, unit: int, finer: int
) -> Iterator[str]:
    """Yield a sentence for each setting that makes every store or hit impossible.

    Args:
        role: ``kv_role``.
        longest: ``max_model_len`` in tokens.
        unit: tokens between boundaries; prompts hit at its multiples. 0 where no model is known.
        finer: a ``--prefix-match-unit`` that allows more hits, 0 for none.
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
    if longest <= unit:
        fix = f"add --prefix-match-unit {finer}, or " if finer else ""
        yield (
            f"max_model_len={longest} is not above {unit} tokens, at whose multiples prompts hit, "
            f"so none ever does; {fix}raise --max-model-len."
        )


# Keys of LMCache's ``extra_config`` that only its own readers and writers of files read.
_OF_FILES = ("use_odirect", "fs_connector_use_odirect", "fs_connector_read_ahead_size")


def with_few_hits(config: "LMCacheEngineConfig") -> Iterator[str]:
    """Yield a sentence for each setting with which less is stored, or done, than meant."""
    for name in _OF_FILES:
        if value := (config.extra_config or {}).get(name):
            yield (
                f"extra_config.{name}={value!r} does nothing: records are no multiples of disk "
                "blocks, so their files go through the page cache; remove it."
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
