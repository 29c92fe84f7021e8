# SPDX-License-Identifier: Apache-2.0
"""Finds the stores that a configuration names, and refuses those that cannot hold records.

A record is as long as its block or state. Most of LMCache's connectors read every value into a
buffer of one attention chunk; those of :data:`KINDS` are replaced here by our own.
"""

from typing import TYPE_CHECKING

from lmcache_hybrid.config.redis_credentials import shown, without_password
from lmcache_hybrid.config.stores.base import Place, StoreKind
from lmcache_hybrid.config.stores.file import File
from lmcache_hybrid.config.stores.fs import Folders
from lmcache_hybrid.config.stores.local import Disk, Memory
from lmcache_hybrid.config.stores.redis import Redis
from lmcache_hybrid.config.stores.s3 import Bucket
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

MEMORY, LOCAL_DISK, REDIS = Memory(), Disk(), Redis()
# Every supported kind outside the engine.
KINDS: tuple[StoreKind, ...] = (Folders(), REDIS, Bucket(), File())
BY_SCHEME = {scheme: kind for kind in KINDS for scheme in kind.schemes}
BY_PLUGIN = {kind.plugin: kind for kind in KINDS if kind.plugin}

_ONE_SIZE = "LMCache reads every value of it into a buffer of one chunk's size"
_NO_SERVER = "no test here can reach such a store"
# Why a scheme or a plugin of LMCache 0.5.6 is refused.
REASONS = {
    "audit": "it only watches another store",
    "azure": _ONE_SIZE,
    "bigtable": _ONE_SIZE,
    "blackhole": "it keeps nothing",
    "eic": _NO_SERVER,
    "external": "its code is not known here",
    "hf3fs": "its values are whole tokens of attention",
    "hfbucket": _ONE_SIZE,
    "infinistore": "its values end at 40 MB, and " + _NO_SERVER,
    "lm": "its one socket blocks LMCache's event loop and is not opened again once it broke",
    "mock": "it keeps no bytes",
    # Seen with mooncake-transfer-engine-non-cuda 0.3.13.post1; docs/backends.md has the message.
    "mooncakestore": "one malformed message to a port that its client opens aborts the engine",
    "sagemaker-hyperpod": _NO_SERVER,
}


def all_places(config: "LMCacheEngineConfig") -> list[Place]:
    """List the places where records are kept, the nearest first."""
    local = [Place(MEMORY, "")] if config.local_cpu else []
    local += [Place(LOCAL_DISK, config.local_disk)] if config.local_disk else []
    return local + places(config)


def places(config: "LMCacheEngineConfig") -> list[Place]:
    """List the stores of :data:`KINDS`, in LMCache's lookup order."""
    found = []
    for name in config.remote_storage_plugins or ():
        if kind := BY_PLUGIN.get(_type_of(name)):
            found.append(kind.of_plugin(name, config))
    url = config.remote_url or ""
    if kind := BY_SCHEME.get(url.partition("://")[0]):
        found.append(Place(kind, url))
    return found


def check_places(config: "LMCacheEngineConfig") -> None:
    """Raise ConfigError if a named store cannot hold records, or cannot be used."""
    plugins = config.remote_storage_plugins or ()
    for name in plugins:
        if plugins.count(name) > 1:
            raise ConfigError(
                f"LMCache option remote_storage_plugins={shown(plugins)} names {name!r} twice; "
                "name it once."
            )
        if (kind := _type_of(name)) not in BY_PLUGIN:
            raise ConfigError(
                f"LMCache option remote_storage_plugins={shown(plugins)} names a store that cannot "
                f"hold states{_because(kind)}; use one of {', '.join(BY_PLUGIN)}."
            )
    if config.remote_url:
        _check_scheme(config.remote_url)
    for place in reversed(places(config)):
        place.kind.check(place, config)


def _check_scheme(url: str) -> None:
    """Raise ConfigError if no kind has the URL's scheme, letter for letter.

    Python also reads ``REDIS://host`` and ``redis:host``, but LMCache has no connector then and
    goes on without the store.
    """
    scheme, separator, _ = url.partition("://")
    schemes = ", ".join(f"{scheme}://" for scheme in BY_SCHEME)
    if not separator:
        raise ConfigError(
            f"LMCache option remote_url={without_password(url)!r} does not say which kind of store "
            f"it is; begin it with one of {schemes}."
        )
    if scheme not in BY_SCHEME:
        raise ConfigError(
            f"LMCache option remote_url={without_password(url)!r} names a store that cannot hold "
            f"states{_because(scheme)}; use one of {schemes}."
        )


def shared_folders(config: "LMCacheEngineConfig") -> list[tuple[str, tuple[str, ...]]]:
    """List (option, folders) of each store in folders that engines share.

    Raises:
        ConfigError: an option names no folder, or one without a name.
    """
    found = (place.kind.folders(place, config) for place in reversed(places(config)))
    return [each for each in found if each is not None]


def in_the_clear(config: "LMCacheEngineConfig") -> list[str]:
    """List the URLs, safe to show, of stores reached over a network without TLS."""
    found = (place.kind.unencrypted(place, config) for place in reversed(places(config)))
    return list(dict.fromkeys(url for url in found if url))


def _type_of(plugin: object) -> str:
    """Return the type of one of LMCache's ``remote_storage_plugins``, as in TYPE.NAME."""
    return str(plugin).partition(".")[0]


def _because(kind: str) -> str:
    return f": {REASONS[kind]}" if kind in REASONS else ""
