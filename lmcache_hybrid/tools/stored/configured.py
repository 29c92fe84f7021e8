# SPDX-License-Identifier: Apache-2.0
"""Which stores an LMCache configuration names. Imports LMCache, which reads it."""

import os
from pathlib import Path

from lmcache_hybrid.core.errors import ConfigError


def stores_of(path: Path) -> list[str]:
    """Folders and URLs, local ones first.

    Raises:
        ConfigError: the file cannot be read, or names RAM only.
    """
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from lmcache.v1.config import LMCacheEngineConfig
    from yaml import YAMLError

    try:
        config = LMCacheEngineConfig.from_file(str(path))
        config.update_config_from_env()
    except (OSError, YAMLError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--lmcache-config {str(path)!r} cannot be read ({reason}); give an LMCache YAML file."
        ) from error
    stores = [part.strip() for part in (config.local_disk or "").split(",") if part.strip()]
    if config.remote_url:
        stores.append(config.remote_url)
    if not stores:
        raise ConfigError(
            f"--lmcache-config {str(path)!r} names neither local_disk nor remote_url: records in "
            "RAM can only be seen by their engine, in its log and metrics."
        )
    return stores
