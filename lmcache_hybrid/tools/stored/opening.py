# SPDX-License-Identifier: Apache-2.0
"""Which stores a command line or an LMCache configuration names."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from lmcache_hybrid.config.backends import redis_urls
from lmcache_hybrid.config.other_names import name_as_redis
from lmcache_hybrid.config.s3 import SCHEME as S3
from lmcache_hybrid.config.shared_folders import shared_folders
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.remote.clients import SCHEMES
from lmcache_hybrid.tools.stored.folder_store import FolderStore
from lmcache_hybrid.tools.stored.record_store import RecordStore
from lmcache_hybrid.tools.stored.redis_store import RedisStore


def open_store(store: str) -> RecordStore:
    """Open the store that ``store`` names: a folder, ``fs://`` or a Redis URL.

    Raises:
        ConfigError: it names no store that can be looked into.
        StoreError: it cannot be reached.
    """
    scheme = store.partition("://")[0].lower() if "://" in store else ""
    if scheme in SCHEMES:
        return RedisStore(store)
    if scheme == S3:
        raise ConfigError(
            f"STORE {store!r} cannot be looked into here; list and delete objects with the AWS "
            "command line, and have a lifecycle rule of the bucket delete old ones."
        )
    if scheme not in ("", "fs", "file"):
        raise ConfigError(
            f"STORE {scheme}:// cannot be looked into; give a folder, fs://HOST:PORT/PATH, or one "
            f"of {', '.join(name + '://' for name in SCHEMES)}."
        )
    # LMCache splits at commas, so a folder with one in its name cannot be configured.
    parts = (_path_of(store) if scheme else store).split(",")
    paths = [Path(part.strip()) for part in parts if part.strip()]
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"STORE {str(path)!r} is not a folder; name the one with the records."
            )
    if not paths:
        raise ConfigError(f"STORE {store!r} has no path; write fs://localhost:0/absolute/path.")
    return FolderStore(paths)


def _path_of(url: str) -> str:
    """As LMCache reads it."""
    try:
        return urlsplit(url).path
    except ValueError as error:
        raise ConfigError(
            f"STORE {url!r} is no URL ({error}); write fs://localhost:0/absolute/path."
        ) from error


def stores_of(path: Path) -> list[str]:
    """List the folders and URLs that an LMCache file names, local ones first. Imports LMCache.

    Those of LMCache's ``remote_storage_plugins``, too.

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
    for option, folders in shared_folders(config):
        if option != "remote_url":
            stores += folders
    stores += [url for url in redis_urls(config) if url != config.remote_url]
    if not stores:
        raise ConfigError(
            f"--lmcache-config {str(path)!r} names no disk and no remote store: records in "
            "RAM can only be seen by their engine, in its log and metrics."
        )
    return stores
