# SPDX-License-Identifier: Apache-2.0
"""Says which of LMCache's backends can hold records, and why the others cannot.

A record is a buffer of bytes as long as its block or state. Most of LMCache's connectors read
everything into buffers of one chunk of attention; some are replaced here by our own, see
:mod:`lmcache_hybrid.storage.remote.adapters`.
"""

import re
from typing import TYPE_CHECKING
from urllib.parse import SplitResult

from lmcache_hybrid.config import s3
from lmcache_hybrid.config.redis_credentials import (
    SEVERAL_HOSTS,
    plugin_url,
    shown,
    split_url,
    unencrypted,
    without_password,
)
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

# Schemes of LMCache's remote_url and types of its remote_storage_plugins that are tested.
REMOTE_SCHEMES = (
    *("fs", "redis", "rediss", "unix", "redis-cluster", "redis-sentinel", "resp", "valkey", "s3"),
)
REMOTE_PLUGINS = ("fs", "redis")

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


def kind_of(plugin: str) -> str:
    """The type of one of LMCache's ``remote_storage_plugins``, which may have a name of its own."""
    return plugin.split(".")[0]


def check_plugins(plugins: list[str] | None) -> None:
    """Raises ConfigError when one of LMCache's ``remote_storage_plugins`` cannot hold records."""
    for plugin in plugins or ():
        kind = kind_of(plugin)
        if kind not in REMOTE_PLUGINS:
            raise ConfigError(
                f"LMCache option remote_storage_plugins={shown(plugins)} names a store that cannot "
                f"hold states{_because(kind)}; use one of {', '.join(REMOTE_PLUGINS)}."
            )


def check_remote_url(url: str) -> SplitResult:
    """Take LMCache's ``remote_url`` apart.

    Raises:
        ConfigError: it names a store that cannot hold records, or no host and port.
    """
    try:
        parts = split_url(url)
    except ValueError as error:
        raise ConfigError(
            f"LMCache option remote_url={without_password(url)!r} cannot be read: {error}."
        ) from None
    if parts.scheme == "fs" and not re.fullmatch(r"[^:]+:\d+", parts.netloc):
        raise ConfigError(
            f"LMCache option remote_url={shown(url)} has no host and port, which LMCache needs to "
            "find the path; write fs://localhost:0/absolute/path."
        )
    # As it is written: Python reads REDIS://host and redis:host, but LMCache has no connector then
    # and goes on without the store.
    scheme = url.partition("://")[0]
    if scheme not in REMOTE_SCHEMES:
        raise ConfigError(
            f"LMCache option remote_url={without_password(url)!r} names a store that cannot hold "
            f"states{_because(scheme)}; use one of "
            f"{', '.join(scheme + '://' for scheme in REMOTE_SCHEMES)}."
        )
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if parts.scheme in SEVERAL_HOSTS and not all(re.fullmatch(r"[^:]+:\d+", h) for h in hosts):
        raise ConfigError(
            f"LMCache option remote_url={without_password(url)!r} has a host without a port, "
            f"and LMCache would do without the store; write {parts.scheme}://host:port,host:port."
        )
    return parts


def remote_backends(config: "LMCacheEngineConfig") -> dict[str, str]:
    """Name the stores outside, by the names that LMCache gives their backends, in its order."""
    found = {
        f"RemoteBackend-{plugin}": f"{kind_of(plugin)}:// (plugin {plugin})"
        for plugin in config.remote_storage_plugins or ()
    }
    if config.remote_url:
        found["RemoteBackend"] = f"{config.remote_url.partition('://')[0]}://"
    return found


def in_the_clear(config: "LMCacheEngineConfig") -> list[str]:
    """URLs, fit to be shown, of the stores that records reach over a network without TLS."""
    found = [unencrypted(url) for url in redis_urls(config)]
    return list(dict.fromkeys(url for url in (*found, s3.unencrypted(config)) if url))


def redis_urls(config: "LMCacheEngineConfig") -> list[str]:
    """URLs of Redis: ``remote_url``, if it is one, and that of a plugin."""
    url = config.remote_url or ""
    urls = [] if not url or url.startswith(("fs://", f"{s3.SCHEME}://")) else [url]
    if "redis" in map(kind_of, config.remote_storage_plugins or ()):
        urls.append(plugin_url(config))
    return urls


def _because(kind: str) -> str:
    return f": {REASONS[kind]}" if kind in REASONS else ""
