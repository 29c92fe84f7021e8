# SPDX-License-Identifier: Apache-2.0
"""``fs://`` and the plugin ``fs``: folders that engines share."""

import re
from typing import TYPE_CHECKING

from lmcache_hybrid.config.redis_credentials import shown
from lmcache_hybrid.config.stores.base import Place, StoreKind, folders_in, parts_of
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


class Folders(StoreKind):
    """One file for each record."""

    schemes = tool_schemes = ("fs",)
    plugin = "fs"
    make_connector = "lmcache_hybrid.storage.remote.fs:connect"
    open_records = "lmcache_hybrid.tools.stored.folder_store:open_url"

    def check(self, place: Place, config: "LMCacheEngineConfig") -> None:
        self.folders(place, config)

    def folders(self, place: Place, config: "LMCacheEngineConfig") -> tuple[str, tuple[str, ...]]:
        if not place.plugin:
            return "remote_url", _folders_of(place.url)
        # As LMCache's own connector reads them.
        names = f"remote_storage_plugin.{place.plugin}.base_path", "fs_base_path"
        for name in names:
            if (value := (config.extra_config or {}).get(name)) is not None:
                option = f"extra_config.{name}"
                return option, folders_in(option, value)
        raise ConfigError(
            f"LMCache option remote_storage_plugins names {place.plugin!r} without a folder; set "
            f"extra_config.{names[0]} to its path."
        )


def _folders_of(url: str) -> tuple[str, ...]:
    parts = parts_of(url)
    if not re.fullmatch(r"[^:]+:\d+", parts.netloc):
        raise ConfigError(
            f"LMCache option remote_url={shown(url)} has no host and port, which LMCache needs to "
            "find the path; write fs://localhost:0/absolute/path."
        )
    folders = folders_in("remote_url", parts.path)
    for folder in folders:
        if not folder.startswith("/"):
            raise ConfigError(
                f"LMCache option remote_url={shown(url)} has a folder {folder!r} that would be "
                "sought where the engine was started; write fs://localhost:0/absolute/path, and "
                "behind each comma another absolute path."
            )
    return folders
