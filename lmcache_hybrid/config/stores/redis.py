# SPDX-License-Identifier: Apache-2.0
"""Redis and Valkey, by each name that LMCache has for them, and the plugin ``redis``."""

import math
import os
import re
from typing import TYPE_CHECKING

from lmcache_hybrid.config.lmcache_options import SOCKET_MS
from lmcache_hybrid.config.redis_credentials import (
    PLUGIN_URLS,
    SEVERAL_HOSTS,
    connection_options,
    plugin_url,
    unencrypted,
    without_password,
)
from lmcache_hybrid.config.stores.base import Place, StoreKind, parts_of
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


_SENTINELS = "redis-sentinel"
_SCHEMES = "redis", "rediss", "unix", "redis-cluster", _SENTINELS
SENTINEL_TIMEOUT = "REDIS_TIMEOUT"
# As Kubernetes and shells write them; no password.
_VARIABLE = re.compile(r"\$(\(\w+\)|\{\w+\})(:\d+)?$")


def sentinel_seconds(default: float) -> float:
    """Return the seconds for one command behind sentinels, by LMCache's variable.

    Raises:
        ConfigError: it is not a number above 0 that a socket takes.
    """
    written = os.environ.get(SENTINEL_TIMEOUT)
    try:
        seconds = float(written) if written else default
    except ValueError:
        seconds = math.nan
    if written and not 0 < seconds <= SOCKET_MS // 1000:
        raise ConfigError(
            f"{SENTINEL_TIMEOUT}={written!r} is not a number of seconds that a socket can wait; "
            "write one above 0 without a unit, or unset it."
        )
    return seconds


class Redis(StoreKind):
    """One value for each record: on one server, a cluster, a primary behind sentinels."""

    tool_schemes = _SCHEMES
    schemes = (*_SCHEMES, "resp", "valkey")  # see other_names.py
    plugin = "redis"
    make_connector = "lmcache_hybrid.storage.remote.redis:connect"
    open_records = "lmcache_hybrid.tools.stored.redis_store:RedisStore"
    ping = "lmcache_hybrid.tools.stored.redis_client:ping"

    def of_plugin(self, name: str, config: "LMCacheEngineConfig") -> Place:
        return Place(self, plugin_url(config)[1], name)

    def check(self, place: Place, config: "LMCacheEngineConfig") -> None:
        url, given_for = place.url, "LMCache option remote_url"
        if place.plugin:
            given_for = f"LMCache option {plugin_url(config)[0]}"
            if place.scheme not in _SCHEMES:
                raise ConfigError(
                    f"{given_for}={without_password(url)!r} names no Redis for the "
                    f"plugin {place.plugin!r}; set extra_config.{PLUGIN_URLS[-1]} to "
                    "redis://host:port."
                )
        parts = parts_of(url, given_for)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        whole = all(re.fullmatch(r"(\[[^\]]+\]|[^:]+):\d+", host) for host in hosts)
        if parts.scheme in SEVERAL_HOSTS and not whole:
            raise ConfigError(
                f"{given_for}={without_password(url)!r} has a host without a port, "
                "and LMCache would do without the store; write "
                f"{parts.scheme}://host:port,host:port."
            )
        login = connection_options(url)
        for what in (*hosts, login.get("username"), login.get("password")):
            if what and _VARIABLE.match(what):
                raise ConfigError(
                    f"{given_for}={without_password(url)!r}, or the login for it, has {what} in "
                    "it, which is taken as it is written; write its value, or see why it was not "
                    "put there: Kubernetes puts in variables that are defined above, in `env` "
                    "alone."
                )
        if parts.scheme == _SENTINELS:
            sentinel_seconds(0)

    def unencrypted(self, place: Place, config: "LMCacheEngineConfig") -> str | None:
        return unencrypted(place.url)
