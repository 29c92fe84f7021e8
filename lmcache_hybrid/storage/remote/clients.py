# SPDX-License-Identifier: Apache-2.0
"""Makes redis-py clients for any Redis URL: a server, a cluster, a primary behind sentinels."""

import os
from inspect import signature
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import AbstractConnection
from redis.retry import Retry

from lmcache_hybrid.config.redis_credentials import connection_options, split_url

CLUSTER, SENTINEL = "redis-cluster", "redis-sentinel"
# LMCache's names.
SERVICE_VARIABLE, SERVICE_DEFAULT = "REDIS_SERVICE_NAME", "redismaster"
# Connection settings that also apply to sentinels.
_OF_SENTINELS = ("socket_timeout", "socket_connect_timeout", "ssl", "ssl_ca_certs")

# Without these redis-py sends CLIENT SETINFO, at which a proxy like twemproxy ends the connection.
_NAMELESS: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}  # its earlier releases
)
# Nor does it send HELLO, as for protocol 3.
_QUIET: dict[str, Any] = {"protocol": 2, **_NAMELESS}

Client: TypeAlias = redis.Redis | redis.RedisCluster
Hosts: TypeAlias = tuple[tuple[str, int], ...]


def hosts_of(url: str) -> Hosts:
    """List (name, port) of a ``redis-cluster://`` or ``redis-sentinel://`` URL, as LMCache does.

    Raises:
        ValueError: a host without a name or port. The message has no part of the URL.
    """
    scheme, _, rest = url.partition("://")
    names = rest.rpartition("@")[2]
    return tuple(_host(f"{scheme}://{name}") for name in names.split(","))


def _host(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise ValueError("a host without a port, write host:port,host:port")
    return host, port


def make_client(url: str, options: dict[str, Any]) -> Client:
    """Make a client that logs in and speaks TLS as configured, and tries each command once.

    A cluster's client connects at once, any other at its first command.

    Args:
        options: of connections, as redis-py names them.

    Raises:
        ConfigError: a file that the environment names cannot be read.
        ValueError: the URL cannot be read.
        redis.RedisError, redis.exceptions.RedisClusterException: no node of a cluster answers.
    """
    scheme = url.partition("://")[0].lower()
    options = connection_options(url) | {"retry": Retry(NoBackoff(), 0), **_QUIET} | options
    if scheme == CLUSTER:
        nodes = [ClusterNode(*host) for host in hosts_of(url)]
        return redis.RedisCluster(startup_nodes=nodes, **options)
    if scheme == SENTINEL:
        return sentinels_at(url, options).master_for(service_name(), **options)
    split_url(url)
    return redis.Redis.from_url(url, **options)


def sentinels_at(url: str, options: dict[str, Any]) -> redis.Sentinel:
    """Make the clients of a URL's sentinels; connects to none.

    Args:
        options: of connections to the primary. Sentinels get those of time and TLS, no password.
    """
    asking = {name: options[name] for name in _OF_SENTINELS if name in options}
    # They are asked one after the other, so do not retry.
    once = {"retry": Retry(NoBackoff(), 0), **_NAMELESS}
    return redis.Sentinel(list(hosts_of(url)), sentinel_kwargs={**once, **asking})


def service_name() -> str:
    """Return the name by which sentinels know the primary."""
    return os.environ.get(SERVICE_VARIABLE, SERVICE_DEFAULT)
