# SPDX-License-Identifier: Apache-2.0
"""Finds the words for why a Redis cannot be used as configured, and what to write."""

import os
import socket
import ssl
import time
from typing import Any

import redis
from redis.exceptions import MovedError, RedisClusterException
from redis.sentinel import MasterNotFoundError

from lmcache_hybrid.config.redis_credentials import (
    CA_FILE,
    PASSWORD_FILE,
    connection_options,
    split_url,
)
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.remote import sockets
from lmcache_hybrid.storage.remote.clients import (
    CLUSTER,
    SENTINEL,
    SERVICE_VARIABLE,
    hosts_of,
    sentinels_at,
    service_name,
)

# Max seconds to ask one server, and errors that hide what it says.
CAUSE_SECONDS = 1.0
_CLOSED = (redis.ConnectionError, ConnectionError, RedisClusterException)
_NO_TLS = (*_CLOSED, redis.TimeoutError, OSError)
# What who sends no password is told, in the servers' words and in redis-py's.
_NO_LOGIN = ("NOAUTH", "Authentication required", "HELLO must be called")
# What OpenSSL says where a server got no certificate of its client, with TLS 1.3.
_NO_CERTIFICATE = "CERTIFICATE_REQUIRED"


# What helps a server that takes no writes because it cannot save its snapshot.
LET_IT_SAVE = "make room where it writes snapshots, or set stop-writes-on-bgsave-error to no there"


def as_cluster(scheme: str) -> str:
    """Return what to write where a URL with this scheme names a node of a cluster."""
    files = f", and name its certificates in {CA_FILE}" if scheme == "rediss" else ""
    return f"write redis-cluster://HOST:PORT in place of {scheme}://{files}"


def cause_of_failure(url: str, error: Exception) -> str:
    """Ask a server of a URL, without login and TLS, why it cannot be used. Blocks.

    redis-py loses what a server in protected mode says before it closes the connection, one that
    speaks TLS alone closes it without a word, and a handshake with one without TLS may only time
    out. Sentinels do not name a primary that refuses them, too: they take it for down.

    Args:
        error: redis-py's. No server is asked if it hides neither.

    Returns:
        The words and what to write, as a part of a sentence; "" where this shows nothing.
    """
    scheme, words = url.partition("://")[0].lower(), str(error).lstrip("-")
    if _NO_CERTIFICATE in words:
        return _give_certificate(scheme)
    if isinstance(error, MovedError) and scheme in ("redis", "rediss"):
        return f"it is a node of a cluster; {as_cluster(scheme)}"
    if isinstance(error, redis.BusyLoadingError):
        return f"it says {words!r}; wait until it has loaded"
    if words.startswith(_NO_LOGIN):
        return f"it asks for a password; put that into the file that {PASSWORD_FILE} names"
    tls = scheme == "rediss" or (scheme in (CLUSTER, SENTINEL) and bool(os.environ.get(CA_FILE)))
    hides = isinstance(error, _NO_TLS if tls else _CLOSED)
    if scheme == "unix" or isinstance(error, redis.AuthenticationError) or not hides:
        return _explained("it", words, "")
    instead = "redis:// in place of rediss://" if scheme == "rediss" else f"no {CA_FILE}"
    said = f" ({words.rstrip('.')})" if words else ""
    plain = f"speaks without TLS{said}; write {instead}, or" if tls else ""
    if scheme == SENTINEL:
        return _behind_sentinels(url, error, plain)
    place = hosts_of(url)[0] if scheme == CLUSTER else _place_of(url)
    words = _first_words(place)
    if tls and not words and "ssl_certfile" not in url and _asks_for_certificate(place):
        return _give_certificate(scheme)
    if not tls and not words and _speaks_tls(place):
        instead = f"set {CA_FILE} to its certificates"
        if scheme == "redis":
            instead = f"write rediss:// in place of redis://, and {instead} if they are your own"
        return f"it speaks TLS alone; {instead}"
    return _explained("it", words, plain)


def _give_certificate(scheme: str) -> str:
    """Return what :func:`cause_of_failure` does, where a server asks for a client's certificate."""
    given = "add ?ssl_certfile=FILE&ssl_keyfile=FILE to its URL, or " if scheme == "rediss" else ""
    return f"it asks for a client's certificate; {given}set tls-auth-clients to no there"


def _explained(who: str, words: str, plain: str) -> str:
    """Return what :func:`cause_of_failure` does, of the words of one server.

    Args:
        plain: what to say if it answers without TLS; "" where it may.
    """
    if words.startswith("DENIED"):
        return (
            f"{who} says {words.partition('. ')[0]!r}; set a password there and put it into the "
            f"file that {PASSWORD_FILE} names, or set protected-mode to no there"
        )
    if words.startswith("MISCONF"):
        return f"{who} says {words.partition('. ')[0]!r}; {LET_IT_SAVE}"
    if words.startswith("ERR max number of clients"):
        return f"{who} says {words!r}; raise maxclients there, or end clients that it serves"
    if words.startswith("ERR Protocol error: invalid bulk length"):
        return f"{who} says {words!r} to a long record; raise proto-max-bulk-len there"
    return f"{who} {plain} turn TLS on there" if plain and words else ""


def _behind_sentinels(url: str, error: Exception, plain: str) -> str:
    """See :func:`cause_of_failure`; asks the first sentinel, and the primary that they name."""
    words = _first_words(hosts_of(url)[0])
    if words.startswith(("DENIED", *_NO_LOGIN)):
        return (
            f"a sentinel says {words.partition('. ')[0]!r}, and sentinels are asked without a "
            "password; remove requirepass there, or set protected-mode to no"
        )
    if plain and words:
        return _explained("a sentinel", words, plain)
    if plain and _asks_for_certificate(hosts_of(url)[0]):
        return _give_certificate(SENTINEL)
    try:
        options = connection_options(url)
    except ConfigError:  # its file was there when the engine started
        return ""
    masters, service = _masters(url, options), service_name()
    if not masters:
        return ""
    if service not in masters:
        return (
            f"its sentinels know no service {service!r}; set {SERVICE_VARIABLE} to one of theirs "
            f"({', '.join(masters)})"
        )
    place = masters[service]["ip"], masters[service]["port"]
    who, words = f"the primary {place[0]}:{place[1]}", _first_words(place)
    if words.startswith(_NO_LOGIN) and isinstance(error, MasterNotFoundError):
        ours = "" if "password" in options else f", and into the file that {PASSWORD_FILE} names"
        return (
            f"its sentinels take {who} for down, which asks for a password; write it there as "
            f"sentinel auth-pass{ours}"
        )
    return _explained(who, words, plain)


def _masters(url: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the first sentinel that answers says of its primaries, by service."""
    seconds = CAUSE_SECONDS / len(hosts_of(url))  # silent ones together have the time of one server
    wait = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    for sentinel in sentinels_at(url, options | wait).sentinels:
        try:
            found: dict[str, dict[str, Any]] = sentinel.sentinel_masters()
            return found
        except (redis.RedisError, OSError):
            continue
        finally:
            sentinel.close()
    return {}


def _place_of(url: str) -> tuple[str, int]:
    parts = split_url(url)
    return parts.hostname or "localhost", parts.port or 6379


def _speaks_tls(place: tuple[str, int]) -> bool:
    """Whether a server takes a TLS handshake, whoever has signed its certificate."""
    try:
        return bool(ssl.get_server_certificate(place, timeout=CAUSE_SECONDS))
    except (OSError, ValueError):  # ssl's errors, too
        return False


def _asks_for_certificate(place: tuple[str, int]) -> bool:
    """Whether a server ends TLS because its client has no certificate.

    A client that sends a command at once may only see that the connection is closed.
    """
    context = ssl._create_unverified_context()  # nothing is sent
    try:
        with socket.create_connection(place, CAUSE_SECONDS) as sock:
            with context.wrap_socket(sock) as secure:
                secure.recv(1)
    except ssl.SSLError as error:
        return _NO_CERTIFICATE in str(error)
    except (OSError, ValueError):  # it waits for a command; or no name of a host
        pass
    return False


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
