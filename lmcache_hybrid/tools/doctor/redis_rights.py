# SPDX-License-Identifier: Apache-2.0
"""Asks a Redis for each command that an engine sends, without writing."""

import os
from contextlib import suppress

import redis
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
)

from lmcache_hybrid.config.redis_credentials import connection_options, without_password
from lmcache_hybrid.config.stores.base import Place
from lmcache_hybrid.storage.key_names import VALUE, printable
from lmcache_hybrid.storage.remote.clients import make_client
from lmcache_hybrid.storage.remote.redis_failures import LET_IT_SAVE, as_cluster
from lmcache_hybrid.tools.doctor.finding import Finding, error, one_line
from lmcache_hybrid.tools.stored.redis_client import ANSWER_SECONDS, CONNECT_SECONDS, ERRORS
from lmcache_hybrid.tools.stored.redis_store import PATTERN

# All that an engine sends. With XX nothing is written: no record has this name.
COMMANDS = (("EXISTS",), ("GET",), ("SET", "x", "XX"), ("DEL",))
# So many names lie on one node of a cluster, though it has others, once in a million if it owns
# four fifths of the slots.
NAMES = 64
SECONDS = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": ANSWER_SECONDS}


def refusal(place: Place) -> Finding | None:
    """Return what a server that answers refuses to an engine, for some records or for all.

    None if it refuses nothing, or if another check says it better: it is away, or full, or does
    not know the user.

    Raises:
        ConfigError: a file that the environment names cannot be read.
    """
    try:
        client = make_client(place.url, SECONDS)
    except (*ERRORS, OSError, ValueError):
        return None
    name = f"lmcache-hybrid-doctor@1@0@{os.urandom(16).hex()}@uint8@hybrid%{VALUE}"
    refused: dict[str, redis.ResponseError] = {}
    try:
        for command, *rest in COMMANDS:
            try:
                client.execute_command(command, name, *rest)
            except redis.ResponseError as failure:
                refused[command] = failure
        if not refused and isinstance(client, redis.Redis):
            many = client.pipeline(transaction=False)
            for number in range(NAMES):
                many.execute_command("EXISTS", name.replace("@uint8", f"{number:02x}@uint8"))
            many.execute()
    except redis.ResponseError as failure:
        refused["EXISTS"] = failure
    except (*ERRORS, OSError):
        return None
    finally:
        with suppress(*ERRORS, OSError):
            client.close()
    return _told(place, refused)


def _told(place: Place, refused: dict[str, redis.ResponseError]) -> Finding | None:
    shown = printable(without_password(place.url))
    denied = {
        command: failure
        for command, failure in refused.items()
        if isinstance(failure, NoPermissionError)
    }
    for failure in refused.values():
        words = printable(one_line(failure))
        if "DB index" in words:
            return error(
                place.option,
                f"{shown} names a database that the server does not have; it says: {words}.",
                "Name one that it has (CONFIG GET databases; by default 0 to 15), or leave the "
                "number out.",
            )
        if isinstance(failure, MovedError):
            return error(
                place.option,
                f"{shown} is a node of a cluster, and takes the records of its own slots alone.",
                _sentence(as_cluster(place.url.partition("://")[0])),
            )
        if help := _help(failure):
            return error(place.option, f"{shown} takes no records; it says: {words}.", help)
    return _denied(place, shown, denied) if denied else None


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _help(failure: redis.ResponseError) -> str:
    """Return what helps where a server takes no records from anybody; "" if unknown."""
    if isinstance(failure, (ReadOnlyError, MasterDownError)):
        return "Name the primary, or the sentinels that know it (redis-sentinel://)."
    if isinstance(failure, ClusterDownError):
        return "Start the cluster's nodes that are away; redis-cli --cluster check names its gaps."
    if str(failure).startswith("MISCONF"):
        return _sentence(LET_IT_SAVE)
    if str(failure).startswith("NOREPLICAS"):
        return "Start its replicas, or lower min-replicas-to-write on the server."
    return ""


def _denied(place: Place, shown: str, denied: dict[str, NoPermissionError]) -> Finding:
    """Tell what an ACL refuses, and the rule that allows it."""
    words = [printable(one_line(failure)) for failure in denied.values()]
    user = printable(connection_options(place.url).get("username") or "default")
    keys = any("access a key" in each for each in words)
    rule = ["+select"] if any("'select'" in each for each in words) else []
    rule += [f"+{command.lower()}" for command in denied]
    # Beside ~* a server refuses the pattern, and a refused command does not show which keys are
    # allowed.
    rule += [f"~{PATTERN}"] if keys else []
    unknown = "" if keys or len(denied) < len(COMMANDS) else f", and allow the keys {PATTERN}"
    return error(
        place.option,
        f"{shown} refuses {', '.join(denied)} to user {user}, so no record can be kept there; it "
        f"says: {words[0]}.",
        f"On the server run ACL SETUSER {user} {' '.join(rule)}{unknown}.",
    )
