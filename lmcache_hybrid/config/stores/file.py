# SPDX-License-Identifier: Apache-2.0
"""``file:///``: folders that engines share, without the host and port of ``fs://``."""

import re
from typing import TYPE_CHECKING

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.config.stores.base import Place
from lmcache_hybrid.config.stores.fs import Folders
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


class File(Folders):
    """The files are those of ``fs://``: engines that use either find each other's records."""

    schemes = tool_schemes = ("file",)
    plugin = ""
    open_records = "lmcache_hybrid.tools.stored.folder_store:open_file_url"

    def folders(self, place: Place, config: "LMCacheEngineConfig") -> tuple[str, tuple[str, ...]]:
        return "remote_url", folders_of("LMCache option remote_url", place.url)


def folders_of(option: str, url: str) -> tuple[str, ...]:
    """Return the folders of a ``file:///`` URL, for the engine and operators' commands.

    Characters with a special meaning in URLs are refused: parsers differ in them, and a wrong
    folder would be created, filled or emptied.

    Args:
        option: the option or argument that gives the URL.

    Raises:
        ConfigError: it is not one absolute path, or several with commas between them.
    """
    paths = url.partition("://")[2]
    folders = tuple(path.strip() for path in paths.split(","))
    if re.search(r"[?#%\x00-\x1f]", paths) or not all(map(re.compile("/+[^/]").match, folders)):
        raise ConfigError(
            f"{option}={without_password(url)!r} is not an absolute path alone, without a host and "
            "the signs ? # %; write file:///absolute/path."
        )
    return folders
