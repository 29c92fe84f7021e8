# SPDX-License-Identifier: Apache-2.0
"""Clients for every Redis URL that LMCache takes: a server, a cluster, what sentinels name."""

import os
from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmcache_hybrid.config.redis_credentials import connection_options, split_url, without_password
from lmcache_hybrid.core.errors import ConfigError, StoreError
from lmcache_hybrid.storage.key_names import printable

CLUSTER, SENTINEL = "redis-cluster", "redis-sentinel"
SCHEMES = ("redis", "rediss", "unix", CLUSTER, SENTINEL)
# LMCache's names.
SERVICE_VARIABLE, SERVICE_DEFAULT = "REDIS_SERVICE_NAME", "redismaster"
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0

Client: TypeAlias = redis.Redis | redis.RedisCluster
Hosts: TypeAlias = tuple[tuple[str, int], ...]
Greet: TypeAlias = Callable[[Any], None]
# RedisClusterException is no RedisError.
ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException)


def hosts_of(url: str) -> Hosts:
    """(name, port) pairs of a ``redis-cluster://`` or ``redis-sentinel://`` URL, as LMCache's.

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


def _client(url: str, greet: Greet | None) -> Client:
    """Make a client. One server is connected to at the first command, a cluster at once."""
    scheme = url.partition("://")[0].lower()
    options = connection_options(url) | {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }
    if scheme == CLUSTER:
        if greet is not None:
            options["redis_connect_func"] = greet
        return redis.RedisCluster(
            startup_nodes=[redis.cluster.ClusterNode(*host) for host in hosts_of(url)], **options
        )
    if greet is not None:
        options["redis_connect_func"] = _after_login(greet)
    if scheme == SENTINEL:
        return _behind_sentinels(hosts_of(url), options)
    split_url(url)
    return redis.Redis.from_url(url, **options)


def _after_login(greet: Greet) -> Greet:
    # Only a cluster's client logs in before it calls this.
    def connected(connection: Any) -> None:
        connection.on_connect()
        greet(connection)

    return connected


def _behind_sentinels(hosts: Hosts, options: dict[str, Any]) -> redis.Redis:
    # Asked one after the other, so none is asked twice.
    asking: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
    for name in ("socket_timeout", "socket_connect_timeout", "ssl", "ssl_ca_certs"):
        if name in options:
            asking[name] = options[name]
    sentinels = redis.Sentinel(list(hosts), sentinel_kwargs=asking)
    service = os.environ.get(SERVICE_VARIABLE, SERVICE_DEFAULT)
    return sentinels.master_for(service, **options)


def connect(url: str, greet: Greet | None = None) -> Client:
    """Connect to any URL of SCHEMES: the server, or every primary of the cluster, has answered.

    Args:
        greet: called with every new connection after its login, on the thread that opened it.

    Raises:
        ConfigError: a file that the environment names cannot be read.
        StoreError: the store cannot be reached, or refuses us.
    """
    shown = printable(without_password(url))
    fix = "start the server, or correct host, port and password"
    if url.lower().startswith(SENTINEL):
        fix = f"start the servers, or correct host, port, password and {SERVICE_VARIABLE}"
    try:
        client = _client(url, greet)
        if isinstance(client, redis.RedisCluster):
            # Asked without this, any one node answers.
            client.ping(target_nodes=redis.RedisCluster.PRIMARIES)
        else:
            client.ping()
    except ConfigError:
        raise
    except (*ERRORS, OSError, ValueError) as error:
        raise StoreError(f"{shown} cannot be used ({printable(str(error))}); {fix}.") from error
    return client
