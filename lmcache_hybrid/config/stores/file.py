# SPDX-License-Identifier: Apache-2.0
"""``file:///``: folders that engines share, without the host and port of ``fs://``."""

from typing import TYPE_CHECKING

from lmcache_hybrid.config.redis_credentials import shown
from lmcache_hybrid.config.stores.base import Place, folders_in
from lmcache_hybrid.config.stores.fs import Folders
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


class File(Folders):
    """The files are those of ``fs://``: engines that use either find each other's records."""

    schemes = looked = ("file",)
    plugin = ""

    def folders(self, place: Place, config: "LMCacheEngineConfig") -> tuple[str, tuple[str, ...]]:
        path = place.url.removeprefix("file://")
        if not path.startswith("/"):
            raise ConfigError(
                f"LMCache option remote_url={shown(place.url)} names a host, or no absolute path; "
                "write file:///absolute/path."
            )
        return "remote_url", folders_in("remote_url", path)
