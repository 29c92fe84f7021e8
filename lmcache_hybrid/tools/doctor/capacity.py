# SPDX-License-Identifier: Apache-2.0
"""Whether RAM, disks and Redis have the room that the configuration counts on."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import redis
from lmcache import device_ops
from rich.filesize import decimal

from lmcache_hybrid.config.shared_folders import shared_folders
from lmcache_hybrid.core.errors import ConfigError, StoreError
from lmcache_hybrid.storage.host_memory import DONT_ROUND, compiled_part_missing, rounded
from lmcache_hybrid.storage.remote.clients import SCHEMES, Client
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, Status, error, ok, skipped, warning
from lmcache_hybrid.tools.stored.redis_client import connect

GIB = 1 << 30
# Less than this is as good as full.
FULL_BYTES = 64 << 20
EVICTING = ("allkeys-lru", "allkeys-lfu", "allkeys-random", "allkeys-lrm")


def check_memory(context: Context) -> Iterator[Finding]:
    """LMCache takes its pool at start-up, once per rank."""
    if context.config is None:
        return
    wanted = int(context.config.max_local_cpu_size * GIB)
    free = psutil.virtual_memory().available
    message = f"max_local_cpu_size takes {decimal(wanted)} per rank, {decimal(free)} are available"
    if wanted > free:
        yield warning("memory", f"{message}.", "Lower max_local_cpu_size, or free memory.")
        return
    ranks = free // wanted if wanted else 0
    message += f": enough for {ranks} rank{'s' * (ranks != 1)}" if ranks else ""
    fallback = rounded(wanted)
    if compiled_part_missing(device_ops) and fallback > free:
        yield warning(
            "memory",
            f"{message}, but {decimal(fallback)} per rank where CUDA cannot pin it as it is.",
            f"Set {DONT_ROUND}, or lower max_local_cpu_size.",
        )
    else:
        yield ok("memory", f"{message}.")


def check_disks(context: Context) -> Iterator[Finding]:
    """Free space against what may still be written."""
    config = context.config
    if config is None:
        return
    limit = int(config.max_local_disk_size * GIB)
    for path in _folders(config.local_disk or ""):
        yield _local_disk(path, limit)
    with suppress(ConfigError):  # those who check the options say so
        for _, folders in shared_folders(config):
            for folder in folders:
                yield _shared_folder(Path(folder))


def _folders(text: str) -> list[Path]:
    return [Path(part.strip()) for part in text.split(",") if part.strip()]


def _local_disk(path: Path, limit: int) -> Finding:
    try:
        free = shutil.disk_usage(path).free
        held = sum(file.stat().st_size for file in path.glob("*.pt"))
    except OSError as failure:
        return skipped("disk space", f"{path} cannot be looked at ({failure.strerror}).")
    missing = max(0, limit - held) - free
    message = (
        f"{path} has {decimal(free)} free and holds {decimal(held)} of max_local_disk_size "
        f"{decimal(limit)}"
    )
    if missing <= 0:
        return ok("disk space", f"{message}.")
    fitting = (free + held) / GIB
    return (error if free < FULL_BYTES else warning)(
        "disk space",
        f"{message}, so the disk is full before LMCache evicts.",
        f"Free {decimal(missing)}, or set max_local_disk_size to at most {fitting:.1f}.",
    )


def _shared_folder(path: Path) -> Finding:
    try:
        usage = shutil.disk_usage(path)
    except OSError as failure:
        return skipped("disk space", f"{path} cannot be looked at ({failure.strerror}).")
    fix = f"Run `lmcache-hybrid purge {path} --older-than 7d --yes` regularly."
    message = f"{path} has {decimal(usage.free)} of {decimal(usage.total)} free"
    if usage.free < FULL_BYTES:
        return error("disk space", f"{message}: it is full, and fs:// never evicts.", fix)
    return Finding("disk space", Status.OK, f"{message}; fs:// never evicts.", fix)


def check_redis(context: Context) -> Iterator[Finding]:
    """What happens when the server is full."""
    url = context.config.remote_url if context.config else None
    if not url or urlsplit(url).scheme not in SCHEMES:
        return
    try:
        client = connect(url)
    except (ConfigError, StoreError):
        yield skipped("Redis memory", "The server cannot be reached; see remote_url.")
        return
    try:
        memories = list(_memories(client))
    except Exception as failure:  # an ACL without INFO
        yield skipped("Redis memory", f"INFO is refused: {failure}.", "Allow INFO for this user.")
        return
    finally:
        client.close()
    for where, memory in memories:
        yield _redis_memory(
            where,
            int(memory.get("used_memory", 0)),
            int(memory.get("maxmemory", 0)),
            str(memory.get("maxmemory_policy", "unknown")),
        )


def _memories(client: Client) -> Iterator[tuple[str, dict]]:
    """What each server that takes writes says of its memory, and how to name it."""
    if not isinstance(client, redis.RedisCluster):
        yield "", client.info("memory")
        return
    for node in client.get_primaries():
        yield f"{node.name}: ", client.info("memory", target_nodes=node)


def _redis_memory(where: str, used: int, limit: int, policy: str) -> Finding:
    fix = "Set maxmemory to what the server may take, and maxmemory-policy to allkeys-lru."
    if not limit:
        return warning(
            "Redis memory",
            f"{where}maxmemory is not set: the store grows ({decimal(used)} now) until the host "
            "has no memory.",
            fix,
        )
    room = f"{where}{decimal(used)} of maxmemory {decimal(limit)} used, maxmemory-policy {policy}"
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
