# SPDX-License-Identifier: Apache-2.0
"""Names the folders of a configuration, for whoever checks, uses or cleans them."""

from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.backends import check_remote_url, kind_of
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


def folders_in(option: str, value: object) -> tuple[str, ...]:
    """Split folders that are separated by commas; spaces around one do not count.

    Args:
        option: the LMCache option that names them.

    Raises:
        ConfigError: one of them has no name.
    """
    folders = tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else ("",)
    if not all(folders):
        raise ConfigError(
            f"LMCache option {option}={value!r} has a folder without a name; write one path, or "
            "several with a comma between them."
        )
    return folders


def folders_of_url(url: str) -> tuple[str, ...]:
    """Folders of an ``fs://`` URL. Raises ConfigError where it cannot be used."""
    return folders_in("remote_url", check_remote_url(url).path)


def folders_of_plugin(plugin: str, extra: dict[str, Any] | None) -> tuple[str, tuple[str, ...]]:
    """Folders of one of LMCache's ``remote_storage_plugins``, and the option that names them.

    Args:
        plugin: its name, ``fs`` or ``fs.NAME``.
        extra: LMCache's ``extra_config``.

    Raises:
        ConfigError: none are named.
    """
    # As LMCache's own connector reads them.
    names = f"remote_storage_plugin.{plugin}.base_path", "fs_base_path"
    for name in names:
        if (value := (extra or {}).get(name)) is not None:
            option = f"extra_config.{name}"
            return option, folders_in(option, value)
    raise ConfigError(
        f"LMCache option remote_storage_plugins names {plugin!r} without a folder; set "
        f"extra_config.{names[0]} to its path."
    )


def shared_folders(config: "LMCacheEngineConfig") -> list[tuple[str, tuple[str, ...]]]:
    """(option, folders) of each store in folders that engines share: ``fs://`` and plugins.

    Raises:
        ConfigError: an option names a folder that has no name, or none.
    """
    url = config.remote_url or ""
    found = [("remote_url", folders_of_url(url))] if url.startswith("fs://") else []
    for plugin in config.remote_storage_plugins or ():
        if kind_of(plugin) == "fs":
            found.append(folders_of_plugin(plugin, config.extra_config))
    return found
