# SPDX-License-Identifier: Apache-2.0
"""Opens the store that a name on the command line means."""

from pathlib import Path
from urllib.parse import urlsplit

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.stored.folder import FolderSource
from lmcache_hybrid.tools.stored.redis_client import SCHEMES
from lmcache_hybrid.tools.stored.redis_source import RedisSource
from lmcache_hybrid.tools.stored.source import Source


def open_source(store: str) -> Source:
    """The source that ``store`` names: a folder, ``fs://`` or a Redis URL.

    Raises:
        ConfigError: it names no store that can be looked into.
        StoreError: it cannot be reached.
    """

    scheme = store.partition("://")[0].lower() if "://" in store else ""
    if scheme in SCHEMES:
        return RedisSource(store)
    if scheme in ("fs", "file"):
        folders = _path_of(store)
    elif scheme:
        raise ConfigError(
            f"STORE {scheme}:// cannot be looked into; give a folder, fs://HOST:PORT/PATH, or one "
            f"of {', '.join(name + '://' for name in SCHEMES)}."
        )
    else:
        folders = store
    # LMCache splits at commas, so a folder with one in its name cannot be configured.
    paths = [Path(part.strip()) for part in folders.split(",") if part.strip()]
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"STORE {str(path)!r} is not a folder; name the one with the records."
            )
    if not paths:
        raise ConfigError(f"STORE {store!r} has no path; write fs://localhost:0/absolute/path.")
    return FolderSource(paths)


def _path_of(url: str) -> str:
    """As LMCache reads it."""
    try:
        return urlsplit(url).path
    except ValueError as error:
        raise ConfigError(
            f"STORE {url!r} is no URL ({error}); write fs://localhost:0/absolute/path."
        ) from error
