# SPDX-License-Identifier: Apache-2.0
"""Describes a kind of store for the engine, the doctor, accept and operators' commands.

Each kind is a subclass in a file of its own, and a line in ``KINDS`` of
:mod:`lmcache_hybrid.config.stores`. Operators' commands import all of these files, so they import
neither LMCache nor torch: code that needs them is named as text, "module:function".
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from lmcache_hybrid.config.redis_credentials import split_url, without_password
from lmcache_hybrid.core.backends import REMOTE
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


@dataclass(frozen=True)
class Place:
    """One store that a configuration names.

    Attributes:
        kind: of store.
        url: where it is; only the scheme for a plugin with folders, empty for RAM.
        plugin: its name among LMCache's ``remote_storage_plugins``; empty for ``remote_url``.
    """

    kind: "StoreKind"
    url: str
    plugin: str = ""

    @property
    def backend(self) -> str:
        """LMCache's name of the backend that reaches it."""
        return f"{self.kind.backend}-{self.plugin}" if self.plugin else self.kind.backend

    @property
    def option(self) -> str:
        """The option that names it."""
        return "remote_storage_plugins" if self.plugin else self.kind.option

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def title(self) -> str:
        """What it is, for people."""
        if not self.plugin:
            return self.kind.title or f"{self.scheme}://"
        # A plugin's URL may be invalid, and contain a password.
        scheme = self.scheme if self.scheme in self.kind.schemes else self.kind.plugin
        return f"{scheme}:// (plugin {self.plugin})"

    @property
    def shown(self) -> str:
        """Where it is, without a password."""
        return self.kind.shown(self)


class StoreKind:
    """A kind of store: how to reach, check and inspect it.

    Attributes:
        backend: LMCache's name of the backend that reaches it, without a plugin's.
        option: the option that names it, without a plugin.
        title: what it is, for people; empty where its scheme says so.
        survives: whether a restart of the engine finds its records again.
        schemes: of ``remote_url``.
        tool_schemes: those that operators' commands take.
        plugin: type of ``remote_storage_plugins``; empty where there is none.
        make_connector: "module:function" that makes the engine's connector of a place and
            LMCache's ``ConnectorContext``; see ``storage/remote/record_connector.py``.
        open_records: "module:function" that opens a URL for operators' commands, see
            ``tools/stored/record_store.py``; empty where they do not support it.
        tool_advice: what to do instead, where they do not support it.
        ping: "module:function" that raises ConfigError or StoreError if the server of a URL
            does not answer; empty where only a record shows it.
        own_options: keys of LMCache's ``extra_config`` that it reads itself, though they are
            refused elsewhere.
    """

    backend: str = REMOTE
    option: str = "remote_url"
    title: str = ""
    survives: bool = True
    schemes: tuple[str, ...] = ()
    tool_schemes: tuple[str, ...] = ()
    plugin: str = ""
    make_connector: str = ""
    open_records: str = ""
    tool_advice: str = ""
    ping: str = ""
    own_options: tuple[str, ...] = ()

    def of_plugin(self, name: str, config: "LMCacheEngineConfig") -> Place:
        """Make the place of a plugin of this kind."""
        return Place(self, f"{self.plugin}://", name)

    def check(self, place: Place, config: "LMCacheEngineConfig") -> None:
        """Raise ConfigError if LMCache or this package could not use it."""

    def folders(
        self, place: Place, config: "LMCacheEngineConfig"
    ) -> tuple[str, tuple[str, ...]] | None:
        """Return the option that names its folders, and these; None if it has none.

        Raises:
            ConfigError: the option names no folder, or one without a name.
        """
        return None

    def shown(self, place: Place) -> str:
        """Return where a place is, without a password."""
        return without_password(place.url) if place.url.partition("://")[2] else place.title

    def unencrypted(self, place: Place, config: "LMCacheEngineConfig") -> str | None:
        """Return its URL, safe to show, if records leave this machine without TLS; else None."""
        return None


def imported(function: str) -> Any:
    """Import "module:function"."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def parts_of(url: str, given_for: str = "LMCache option remote_url") -> SplitResult:
    """Take a URL apart.

    Raises:
        ConfigError: it is none; says for what it was given.
    """
    try:
        return split_url(url)
    except ValueError as error:
        raise ConfigError(
            f"{given_for}={without_password(url)!r} cannot be read: {error}."
        ) from None


def folders_in(given_for: str, value: object) -> tuple[str, ...]:
    """Split folders that are separated by commas; spaces around one do not count.

    Args:
        given_for: the setting that names them, as messages begin with it.

    Raises:
        ConfigError: one of them has no name.
    """
    folders = tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else ("",)
    if not all(folders):
        raise ConfigError(
            f"{given_for}={value!r} has a folder without a name; write one path, or several with "
            "a comma between them."
        )
    return folders
