# SPDX-License-Identifier: Apache-2.0
"""Connects to any Redis URL that LMCache takes, and explains failures."""

from collections.abc import Callable
from typing import Any, TypeAlias

import redis

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.core.errors import ConfigError, StoreError
from lmcache_hybrid.storage.key_names import printable
from lmcache_hybrid.storage.remote.clients import (
    CLUSTER,
    SENTINEL,
    SERVICE_VARIABLE,
    Client,
    make_client,
)
from lmcache_hybrid.storage.remote.redis_failures import cause_of_failure

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0

Greet: TypeAlias = Callable[[Any], None]
# RedisClusterException is not a RedisError.
ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException)


def _options(url: str, greet: Greet | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
    }
    if greet is not None:
        # Only a cluster's client logs in before it calls this.
        in_cluster = url.lower().startswith(CLUSTER)
        options["redis_connect_func"] = greet if in_cluster else _after_login(greet)
    return options


def _after_login(greet: Greet) -> Greet:
    def connected(connection: Any) -> None:
        connection.on_connect()
        greet(connection)

    return connected


def connect(url: str, greet: Greet | None = None) -> Client:
    """Connect to any URL of Redis: the server, or every primary of the cluster, has answered.

    Args:
        greet: called with every new connection after its login, on the thread that opened it.

    Raises:
        ConfigError: a file that the environment names cannot be read.
        StoreError: the store cannot be reached, or refuses us.
    """
    shown = printable(without_password(url))
    fix = "start the server, or correct host, port and password"
    if url.lower().startswith(CLUSTER):
        fix = "start all of the cluster's nodes, or correct hosts, ports and password"
    if url.lower().startswith(SENTINEL):
        fix = f"start the servers, or correct host, port, password and {SERVICE_VARIABLE}"
    try:
        client = make_client(url, _options(url, greet))
        if isinstance(client, redis.RedisCluster):
            # Without this only one node is asked.
            client.ping(target_nodes=redis.RedisCluster.PRIMARIES)
        else:
            client.ping()
    except ConfigError:
        raise
    except (*ERRORS, OSError, ValueError) as error:
        if cause := printable(cause_of_failure(url, error)):
            raise StoreError(f"{shown} cannot be used: {cause}.") from error
        raise StoreError(f"{shown} cannot be used ({printable(str(error))}); {fix}.") from error
    return client


def ping(url: str) -> None:
    """Raise StoreError or ConfigError if the server of ``url`` cannot be used."""
    connect(url).close()
