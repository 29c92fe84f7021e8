# SPDX-License-Identifier: Apache-2.0
"""Makes redis-py clients for any Redis URL: a server, a cluster, a primary behind sentinels."""

import os
import socket
import time
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from lmcache_hybrid.config.redis_credentials import (
    CA_FILE,
    PASSWORD_FILE,
    connection_options,
    split_url,
)
from lmcache_hybrid.storage.remote import sockets

CLUSTER, SENTINEL = "redis-cluster", "redis-sentinel"
SCHEMES = ("redis", "rediss", "unix", CLUSTER, SENTINEL)
# LMCache's names.
SERVICE_VARIABLE, SERVICE_DEFAULT = "REDIS_SERVICE_NAME", "redismaster"
# Connection settings that also apply to sentinels.
_OF_SENTINELS = ("socket_timeout", "socket_connect_timeout", "ssl", "ssl_ca_certs")

# Max seconds to ask why a server cannot be used, and errors that hide it.
CAUSE_SECONDS = 1.0
_CLOSED = (redis.ConnectionError, ConnectionError, RedisClusterException)
_NO_TLS = (*_CLOSED, redis.TimeoutError, OSError)

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
    options = connection_options(url) | {"retry": Retry(NoBackoff(), 0)} | options
    if scheme == CLUSTER:
        nodes = [ClusterNode(*host) for host in hosts_of(url)]
        return redis.RedisCluster(startup_nodes=nodes, **options)
    if scheme == SENTINEL:
        # They are asked one after the other, so do not retry.
        asking = {name: options[name] for name in _OF_SENTINELS if name in options}
        sentinels = redis.Sentinel(
            list(hosts_of(url)), sentinel_kwargs={"retry": Retry(NoBackoff(), 0), **asking}
        )
        service = os.environ.get(SERVICE_VARIABLE, SERVICE_DEFAULT)
        return sentinels.master_for(service, **options)
    split_url(url)
    return redis.Redis.from_url(url, **options)


def cause_of_failure(url: str, error: Exception) -> str:
    """Ask the first server of a URL, without login and TLS, why it cannot be used. Blocks.

    redis-py loses what a server in protected mode says before it closes the connection, and a
    handshake with one without TLS may only time out.

    Args:
        error: redis-py's. The server is not asked if it hides neither.

    Returns:
        The words and what to write, as a part of a sentence; "" where this shows nothing.
    """
    scheme = url.partition("://")[0].lower()
    several = scheme in (CLUSTER, SENTINEL)
    tls = scheme == "rediss" or (several and bool(os.environ.get(CA_FILE)))
    answered = isinstance(error, redis.AuthenticationError)
    words, hides = str(error), isinstance(error, _NO_TLS if tls else _CLOSED) and not answered
    if hides and scheme != "unix":
        words = _first_words(hosts_of(url)[0] if several else _place_of(url))
    if words.startswith("DENIED"):
        return (
            f"it says {words.partition('. ')[0]!r}; set a password there and put it into the file "
            f"that {PASSWORD_FILE} names, or set protected-mode to no there"
        )
    if tls and hides and words:
        instead = "redis:// in place of rediss://" if scheme == "rediss" else f"no {CA_FILE}"
        said = str(error).rstrip(".")
        return f"it speaks without TLS ({said}); write {instead}, or turn TLS on there"
    return ""


def _place_of(url: str) -> tuple[str, int]:
    parts = split_url(url)
    return parts.hostname or "localhost", parts.port or 6379


def _first_words(place: tuple[str, int]) -> str:
    """Return what a server answers to one who sends PING; "" if it does not speak as Redis does."""
    deadline = time.monotonic() + CAUSE_SECONDS
    try:
        with socket.create_connection(place, CAUSE_SECONDS) as sock:
            sockets.send(sock, sockets.command(b"PING"), deadline)
            (said,) = sockets.replies(sock, 1, deadline)
    except (OSError, ValueError):  # or no name of a host
        return ""
    return str(said).lstrip("-")
