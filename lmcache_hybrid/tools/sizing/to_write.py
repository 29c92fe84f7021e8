# SPDX-License-Identifier: Apache-2.0
"""Writes a plan's settings: LMCache's file and the flags of ``vllm serve``."""

import json
import math
import shlex
from typing import Any

from lmcache_hybrid.core.sizes import GIB
from lmcache_hybrid.tools.sizing.blocks import Sizes

# Host memory of an engine that keeps nothing in RAM: LMCache's default. Records are copied
# through it, and config.store_sizes.check_sizes needs room for two.
COPIES_GIB = 5.0
# Placeholders for the user's own names.
FOLDER, REDIS = "/srv/lmcache", "redis://cache:6379"


def to_write(
    backend: str,
    sizes: Sizes,
    bytes_taken: int,
    own: dict[str, Any],
    flags: list[str],
    *,
    bytes_in_ram: int,
) -> dict[str, Any]:
    """Set the limit of one backend so that it holds a plan's records.

    Args:
        backend: a name in ``storage.BACKENDS``.
        bytes_taken: there, over all ranks.
        own: this package's options for the plan.
        flags: vLLM's, name and value in turn.
        bytes_in_ram: of the prompts that RAM above a disk or folder holds, over all ranks.

    Returns:
        ``lmcache_yaml``, LMCache's options, with sizes in GiB per rank; ``vllm_flags``, to append
        to ``vllm serve MODEL``; ``elsewhere``, settings of the store itself, empty if none.
    """
    largest = max(group.bytes for group in sizes.groups)
    least, copies = gib(2 * largest), max(COPIES_GIB, gib(8 * largest))
    bytes_taken = max(bytes_taken, 2 * largest * sizes.tp)  # 0 would stand for no limit
    taken, elsewhere = gib(bytes_taken / sizes.tp), ""
    yaml: dict[str, bool | float | str]
    if backend == "ram":
        yaml = {"local_cpu": True, "max_local_cpu_size": max(taken, least)}
    else:
        yaml = {"local_cpu": False, "max_local_cpu_size": copies}
    in_ram = max(copies, gib(bytes_in_ram / sizes.tp))
    # RAM that holds all of the store behind it is of no use.
    if backend in ("disk", "fs") and in_ram < taken:
        yaml = {"local_cpu": True, "max_local_cpu_size": in_ram}
    if backend == "disk":
        yaml |= {"local_disk": FOLDER, "max_local_disk_size": max(taken, least)}
    elif backend == "fs":
        yaml["remote_url"] = f"fs://localhost:0{FOLDER}"
        own = own | {"lmcache.hybrid_fs_max_size_gb": gib(bytes_taken)}
    elif backend == "redis":
        yaml["remote_url"] = REDIS
        elsewhere = f"Redis: maxmemory {bytes_taken}, maxmemory-policy allkeys-lru"
    transfer: dict = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    if own:
        transfer["kv_connector_extra_config"] = own
    # For what is still being written when vLLM ends; RAM ends with it.
    flags = flags if backend == "ram" else [*flags, "--shutdown-timeout", "30"]
    made = [*flags, "--kv-transfer-config", json.dumps(transfer)]
    return {"lmcache_yaml": yaml, "vllm_flags": made, "elsewhere": elsewhere}


def as_typed(written: dict[str, Any], model: str) -> str:
    """Format :func:`to_write` for a shell and an editor, in lines of at most 80 columns."""
    values = (
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in written["lmcache_yaml"].items()
    )
    *flags, _, transfer = written["vllm_flags"]
    given = zip(flags[::2], flags[1::2], strict=True)
    pairs = [f"{flag} {shlex.quote(value)}" for flag, value in given]
    indented = json.dumps(json.loads(transfer), indent=2).replace("\n", "\n  ")
    pairs.append(f"--kv-transfer-config '{indented}'")
    serve = " \\\n  ".join(["LMCACHE_CONFIG_FILE=lmcache.yaml", f"vllm serve {model}", *pairs])
    elsewhere = ["", f"# {written['elsewhere']}"] if written["elsewhere"] else []
    return "\n".join(["# lmcache.yaml", *values, "", "# shell", serve, *elsewhere])


def gib(size: float) -> float:
    """Convert bytes to GiB, rounded up to a tenth; LMCache's ``*_size`` options call it GB."""
    return math.ceil(size / GIB * 10) / 10
