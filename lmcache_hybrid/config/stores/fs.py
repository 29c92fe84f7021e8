# SPDX-License-Identifier: Apache-2.0
"""``fs://`` and the plugin ``fs``: folders that engines share."""

import os
import re
from typing import TYPE_CHECKING

from lmcache_hybrid.config.redis_credentials import shown
from lmcache_hybrid.config.stores.base import Place, StoreKind, folders_in, parts_of
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


# Parts of a path that a shell, or Kubernetes, would expand.
_EXPANDED = re.compile(r"^/~(/|$)|\$[\w{(]")


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
            return "remote_url", self.folders_of_url(place.url, "LMCache option remote_url")
        # As LMCache's own connector reads them.
        names = f"remote_storage_plugin.{place.plugin}.base_path", "fs_base_path"
        for name in names:
            if (value := (config.extra_config or {}).get(name)) is not None:
                option = f"extra_config.{name}"
                return option, absolute_folders(f"LMCache option {option}", value)
        raise ConfigError(
            f"LMCache option remote_storage_plugins names {place.plugin!r} without a folder; set "
            f"extra_config.{names[0]} to its path."
        )

    def folders_of_url(self, url: str, given_for: str) -> tuple[str, ...]:
        """The folders of a URL, as engine and operators' commands read it.

        Args:
            given_for: the setting or argument that it is, as messages begin with it.

        Raises:
            ConfigError: it does not name absolute paths alone.
        """
        parts = parts_of(url, given_for)
        if not re.fullmatch(r"[^:]+:\d+", parts.netloc):
            raise ConfigError(
                f"{given_for}={shown(url)} has no host and port, which LMCache needs to find the "
                "path; write fs://localhost:0/absolute/path."
            )
        return absolute_folders(given_for, parts.path)


def absolute_folders(given_for: str, value: object) -> tuple[str, ...]:
    """Split folders as :func:`folders_in` does.

    Raises:
        ConfigError: one has no name, or depends on where a process was started.
    """
    folders = folders_in(given_for, value)
    for folder in folders:
        if not folder.startswith("/"):
            raise ConfigError(
                f"{given_for}={value!r} has a folder {folder!r} that each process would look for "
                "where it was started; write absolute paths, with a comma between them."
            )
        if _EXPANDED.search(folder) and not os.path.isdir(folder):
            raise ConfigError(
                f"{given_for}={value!r} has a folder {folder!r} that is taken as it is written, "
                "without ~ and $VARIABLES; write the whole path."
            )
    return folders
