# SPDX-License-Identifier: Apache-2.0
"""What a plan has you write: LMCache's file and the flags of ``vllm serve``."""

import json
import math
from dataclasses import dataclass

from lmcache_hybrid.tools.sizing.blocks import Sizes
from lmcache_hybrid.tools.sizing.storage import Stored

GIB = 1 << 30
# Host memory of an engine that keeps nothing in RAM: LMCache's default. Records are copied
# through it, and config.options.check_pool wants room for two.
COPIES_GIB = 5.0
# Where the user's own name belongs.
FOLDER, REDIS = "/srv/lmcache", "redis://cache:6379"


@dataclass(frozen=True)
class ToWrite:
    """Lines for one backend.

    Attributes:
        lmcache_yaml: LMCache's options; sizes in GiB of one rank.
        vllm_flags: what follows ``vllm serve MODEL``.
        elsewhere: what the store itself must be told; empty where that is nothing.
    """

    lmcache_yaml: dict[str, bool | float | str]
    vllm_flags: list[str]
    elsewhere: str

    def text(self, model: str) -> str:
        """As a shell and an editor take it, in lines of at most 80 columns."""
        values = (
            f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
            for name, value in self.lmcache_yaml.items()
        )
        pairs = list(zip(self.vllm_flags[::2], self.vllm_flags[1::2], strict=True))
        flags = [f"{flag} {value}" for flag, value in pairs[:-1]]
        transfer = json.dumps(json.loads(pairs[-1][1]), indent=2).replace("\n", "\n  ")
        flags.append(f"{pairs[-1][0]} '{transfer}'")
        serve = " \\\n  ".join(["LMCACHE_CONFIG_FILE=lmcache.yaml", f"vllm serve {model}", *flags])
        lines = ["# lmcache.yaml", *values, "", "# shell", serve]
        return "\n".join([*lines, *(["", f"# {self.elsewhere}"] if self.elsewhere else [])])


def to_write(
    backend: str, sizes: Sizes, stored: Stored, own: dict[str, float | str], flags: list[str]
) -> ToWrite:
    """Bound one backend so that it holds what a plan stores.

    Args:
        backend: a name in ``storage.BACKENDS``.
        own: this package's options that the plan was made with.
        flags: vLLM's, name and value in turn.
    """
    largest = max(group.bytes for group in sizes.groups)
    copies = max(COPIES_GIB, gib(8 * largest))
    taken, elsewhere = gib(stored.taken / sizes.tp), ""
    yaml: dict[str, bool | float | str]
    if backend == "ram":
        yaml = {"local_cpu": True, "max_local_cpu_size": max(taken, gib(2 * largest))}
    else:
        yaml = {"local_cpu": False, "max_local_cpu_size": copies}
    if backend == "disk":
        yaml |= {"local_disk": FOLDER, "max_local_disk_size": taken}
    elif backend == "fs":
        yaml["remote_url"] = f"fs://localhost:0{FOLDER}"
        own = own | {"lmcache.hybrid_fs_max_size_gb": gib(stored.taken)}
    elif backend == "redis":
        yaml["remote_url"] = REDIS
        elsewhere = f"Redis: maxmemory {stored.taken}, maxmemory-policy allkeys-lru"
    transfer: dict = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    if own:
        transfer["kv_connector_extra_config"] = own
    made = [*flags, "--kv-transfer-config", json.dumps(transfer)]
    return ToWrite(yaml, made, elsewhere)


def gib(size: float) -> float:
    """Bytes in GiB, rounded up to a tenth: what LMCache's ``*_size`` options call GB."""
    return math.ceil(size / GIB * 10) / 10
