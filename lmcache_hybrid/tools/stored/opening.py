# SPDX-License-Identifier: Apache-2.0
"""Opens the stores that a command line or an LMCache configuration names."""

import os
from pathlib import Path

from lmcache_hybrid.config.other_names import RESP, VALKEY, name_as_redis
from lmcache_hybrid.config.stores import BY_SCHEME, KINDS, places
from lmcache_hybrid.config.stores.base import folders_in, imported
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.stored import folder_store
from lmcache_hybrid.tools.stored.record_store import RecordStore


def open_store(store: str) -> RecordStore:
    """Open the store that ``store`` names: a folder, or a URL of a supported kind.

    Raises:
        ConfigError: it does not name a supported store.
        StoreError: it cannot be reached.
    """
    scheme = store.partition("://")[0].lower() if "://" in store else ""
    if not scheme:
        # LMCache splits at commas, so a folder with one in its name cannot be configured.
        return folder_store.open_folders(folders_in("STORE", store))
    kind = BY_SCHEME.get(scheme)
    if kind is not None and kind.tool_advice:
        raise ConfigError(f"STORE {store!r} cannot be looked into here; {kind.tool_advice}.")
    if scheme in (RESP, VALKEY):
        raise ConfigError(
            f"STORE {scheme}:// names a Redis, whose own name is needed here; write redis:// (a "
            "cluster: redis-cluster://), or give the engine's file with --lmcache-config."
        )
    if kind is None or scheme not in kind.tool_schemes:
        schemes = ", ".join(f"{name}://" for kind in KINDS for name in kind.tool_schemes)
        raise ConfigError(
            f"STORE {scheme}:// cannot be looked into; give a folder, or a URL of one of {schemes}."
        )
    opened: RecordStore = imported(kind.open_records)(store)
    return opened


def stores_of(path: Path) -> list[str]:
    """List the folders and URLs that an LMCache file names, local ones first. Imports LMCache.

    Includes those of LMCache's ``remote_storage_plugins``.

    Raises:
        ConfigError: the file cannot be read, or names RAM only.
    """
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from lmcache.v1.config import LMCacheEngineConfig
    from yaml import YAMLError

    try:
        config = LMCacheEngineConfig.from_file(str(path))
        config.update_config_from_env()
    except (OSError, YAMLError, ValueError, TypeError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--lmcache-config {str(path)!r} cannot be read ({reason}); give an LMCache YAML file."
        ) from error
    name_as_redis(config)
    stores = [part.strip() for part in (config.local_disk or "").split(",") if part.strip()]
    if config.remote_url:
        stores.append(config.remote_url)
    for place in places(config):
        if place.plugin:
            found = place.kind.folders(place, config)
            stores += found[1] if found else [place.url]
    stores = list(dict.fromkeys(stores))
    if not stores:
        raise ConfigError(
            f"--lmcache-config {str(path)!r} names no disk and no remote store: records in "
            "RAM can only be seen by their engine, in its log and metrics."
        )
    return stores
