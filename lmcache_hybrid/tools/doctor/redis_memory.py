# SPDX-License-Identifier: Apache-2.0
"""Checks what happens when a Redis is full: its maxmemory and maxmemory-policy."""

from collections.abc import Iterator

import redis

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.config.stores import REDIS, places
from lmcache_hybrid.config.tiers import Tier
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.sizes import size_text
from lmcache_hybrid.storage.key_names import printable
from lmcache_hybrid.storage.remote.clients import Client, make_client
from lmcache_hybrid.tools.doctor.capacity import FULL_BYTES, prompts_that_fit
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, error, ok, one_line, skipped, warning
from lmcache_hybrid.tools.doctor.redis_rights import SECONDS
from lmcache_hybrid.tools.stored.redis_client import ERRORS

EVICTING = ("allkeys-lru", "allkeys-lfu", "allkeys-random", "allkeys-lrm")


def check_redis(context: Context) -> Iterator[Finding]:
    """Check what happens when a Redis of ``remote_url`` or a plugin is full."""
    named = reversed(places(context.config)) if context.config else ()
    servers = list(dict.fromkeys(place.url for place in named if place.kind is REDIS))
    for url in servers:
        yield from _server(context, url, f"{without_password(url)}: " if servers[1:] else "")


def _server(context: Context, url: str, name: str) -> Iterator[Finding]:
    """
    Args:
        name: of one of several servers, put in front of its findings.
    """
    try:
        client = make_client(url, SECONDS)
        try:
            memories = list(_memories(client))
        finally:
            client.close()
    except (redis.ResponseError, redis.AuthenticationError) as failure:
        yield skipped(
            "Redis memory",
            f"{name}INFO is refused; the server says: {printable(one_line(failure))}.",
            "Allow INFO for this user, or correct user and password.",
        )
        return
    except (*ERRORS, ConfigError, OSError, ValueError):
        yield skipped("Redis memory", f"{without_password(url)} cannot be used.")
        return
    if limit := sum(int(memory.get("maxmemory", 0)) for _, memory in memories):
        tier = Tier(f"{name}Redis", "maxmemory (in GB)", limit, shared=True)
        yield from prompts_that_fit(context, tier)
    for where, memory in memories:
        yield _room(
            name + where,
            int(memory.get("used_memory", 0)),
            int(memory.get("maxmemory", 0)),
            str(memory.get("maxmemory_policy", "unknown")),
        )


def _memories(client: Client) -> Iterator[tuple[str, dict]]:
    """Yield (name, memory info) of each server that takes writes."""
    if not isinstance(client, redis.RedisCluster):
        yield "", client.info("memory")
        return
    for node in client.get_primaries():
        yield f"{node.name}: ", client.info("memory", target_nodes=node)


def _room(where: str, used: int, limit: int, policy: str) -> Finding:
    fix = "Set maxmemory to what the server may take, and maxmemory-policy to allkeys-lru."
    if not limit:
        return warning(
            "Redis memory",
            f"{where}maxmemory is not set: the store grows ({size_text(used)} now) until the host "
            "has no memory.",
            fix,
        )
    taken = f"{size_text(used)} of maxmemory {size_text(limit)} used"
    room = f"{where}{taken}, maxmemory-policy {policy}"
    if policy in EVICTING:
        return ok("Redis memory", f"{room}: it evicts when it is full.")
    why = (
        "LMCache's values have no time to live, so nothing can be evicted and writes fail when it "
        "is full"
        if policy.startswith("volatile")
        else "writes fail when it is full"
    )
    full = used + FULL_BYTES > limit
    return (error if full else warning)("Redis memory", f"{room}: {why}.", fix)
