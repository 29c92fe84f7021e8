# SPDX-License-Identifier: Apache-2.0
"""``file:///``: folders that engines share, without the host and port of ``fs://``."""

import re

from lmcache_hybrid.config.redis_credentials import shown
from lmcache_hybrid.config.stores.fs import Folders, absolute_folders
from lmcache_hybrid.core.errors import ConfigError


class File(Folders):
    """The files are those of ``fs://``: engines that use either find each other's records.

    Signs that URLs give another meaning are refused: readers of URLs differ in them, and a folder
    that one of them does not mean would be made, filled or emptied.
    """

    schemes = tool_schemes = ("file",)
    plugin = ""

    def folders_of_url(self, url: str, given_for: str) -> tuple[str, ...]:
        paths = url.partition("://")[2]
        if re.search(r"[?#%\x00-\x1f]", paths) or not re.match("/+[^/]", paths):
            raise ConfigError(
                f"{given_for}={shown(url)} is not an absolute path alone, without a host and the "
                "signs ? # %; write file:///absolute/path."
            )
        return absolute_folders(given_for, paths)
