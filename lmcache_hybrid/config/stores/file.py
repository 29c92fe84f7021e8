# SPDX-License-Identifier: Apache-2.0
"""``file:///``: folders that engines share, without the host and port of ``fs://``."""

from typing import TYPE_CHECKING

from lmcache_hybrid.config.redis_credentials import shown
from lmcache_hybrid.config.stores.base import Place, folders_in, parts_of
from lmcache_hybrid.config.stores.fs import Folders
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


class File(Folders):
    """The files are those of ``fs://``: engines that use either find each other's records."""

    schemes = tool_schemes = ("file",)
    plugin = ""

    def folders(self, place: Place, config: "LMCacheEngineConfig") -> tuple[str, tuple[str, ...]]:
        parts = parts_of(place.url)
        if parts.netloc or parts.query or parts.fragment or not parts.path.startswith("/"):
            raise ConfigError(
                f"LMCache option remote_url={shown(place.url)} is not an absolute path alone, "
                "without a host, ? and #; write file:///absolute/path."
            )
        return "remote_url", folders_in("remote_url", parts.path)
