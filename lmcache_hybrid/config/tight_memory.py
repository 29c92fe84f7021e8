# SPDX-License-Identifier: Apache-2.0
"""What leaves too little memory for LMCache's pools: the kernel ends such a rank without a word.

The pools alone are checked in ``lmcache_config.py``. These need not fail, as vLLM offloads no more
than there is and leaves out a binding that a container forbids; so they are only warned of.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lmcache_hybrid.config.container import memory_limit
from lmcache_hybrid.config.folders import file_system_of
from lmcache_hybrid.config.lmcache_config import memory_of_the_machine
from lmcache_hybrid.config.stores import shared_folders
from lmcache_hybrid.core.sizes import GIB

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig

_NODES = Path("/sys/devices/system/node")


def offloaded_bytes(vllm_config: "VllmConfig") -> int:
    """Return the bytes of memory that ``--cpu-offload-gb`` takes on each rank at most."""
    return int(vllm_config.offload_config.uva.cpu_offload_gb * GIB)


def nodes_of_ranks(vllm_config: "VllmConfig", ranks: int) -> tuple[int, ...]:
    """Return the NUMA node of each rank here, as far as ``--numa-bind`` says; else none."""
    parallel = vllm_config.parallel_config
    nodes = parallel.numa_bind_nodes if parallel.numa_bind else None
    return tuple(nodes or ())[:ranks]


def share_of_cpu_backend(vllm_config: "VllmConfig") -> float:
    """Return the share of memory that vLLM's CPU backend takes; 0 where it does not take one."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    takes = current_platform.is_cpu() and cache.kv_cache_memory_bytes is None
    return cache.gpu_memory_utilization if takes else 0.0


def taken_beside(vllm_config: "VllmConfig", ranks: int) -> tuple[int, tuple[int, ...], float]:
    """Return what :func:`tight_memory` takes behind ``ranks``."""
    nodes = nodes_of_ranks(vllm_config, ranks)
    return offloaded_bytes(vllm_config), nodes, share_of_cpu_backend(vllm_config)


def tight_memory(
    config: "LMCacheEngineConfig",
    ranks: int,
    offloaded: int,
    nodes: Sequence[int],
    share: float = 0.0,
) -> Iterator[str]:
    """Yield a sentence for each setting of vLLM that does not fit beside the pools.

    Args:
        ranks: on this machine, each of which takes ``max_local_cpu_size``.
        offloaded: see :func:`offloaded_bytes`.
        nodes: see :func:`nodes_of_ranks`.
        share: see :func:`share_of_cpu_backend`.
    """
    pool = config.max_local_cpu_size * GIB
    pools = f"max_local_cpu_size={config.max_local_cpu_size} on {_each(ranks)}"
    whole = _whole(config)
    if share and ranks * pool > (1 - share) * whole:
        yield (
            f"vLLM's CPU backend may take gpu_memory_utilization={share:g} of the "
            f"{whole / 1e9:.1f} GB that this machine or its container has, and {pools} does not "
            "fit beside it: the kernel would end the engine without a word; set "
            "VLLM_CPU_KVCACHE_SPACE, or one of the two to less."
        )
    if offloaded and ranks * (pool + offloaded) > whole:
        yield (
            f"--cpu-offload-gb {offloaded / GIB:g} and {pools} may take "
            f"{ranks * (pool + offloaded) / 1e9:.1f} GB, more than the {whole / 1e9:.1f} GB that "
            "this machine or its container has: the kernel would end a rank without a word; set "
            "one of them to less."
        )
    for node, bound in sorted(Counter(nodes).items()):
        if bound * pool > (there := _memory_of_node(node)):
            ranks_there = f"{bound} rank{'s' * (bound > 1)}"
            yield (
                f"--numa-bind binds {ranks_there} to NUMA node {node}, and max_local_cpu_size="
                f"{config.max_local_cpu_size} takes {bound * pool / 1e9:.1f} GB there, more than "
                f"its {there / 1e9:.1f} GB: the kernel would end a rank without a word; set "
                "max_local_cpu_size to less, or leave --numa-bind out."
            )


def folders_in_memory(
    config: "LMCacheEngineConfig", ranks: int, limit: float | None
) -> Iterator[str]:
    """Yield a sentence for each store in folders that is memory, and may outgrow it.

    Args:
        limit: of the records of all folders in bytes, None for no limit.
    """
    pools, whole = ranks * config.max_local_cpu_size * GIB, _whole(config)
    for option, folders in shared_folders(config):
        kinds = [file_system_of(_existing(folder)) for folder in folders]
        grows = min(_room(folders), limit or math.inf)
        if all(kind in ("tmpfs", "ramfs") for kind in kinds) and pools + grows > whole:
            yield (
                f"{option} is memory ({kinds[0]}), and may grow to {grows / 1e9:.1f} GB beside the "
                f"{pools / 1e9:.1f} GB of max_local_cpu_size, more than the {whole / 1e9:.1f} GB "
                "that this machine or its container has: the kernel would end a rank without a "
                "word; set lmcache.hybrid_fs_max_size_gb to less, or choose a disk."
            )


def limits_above_disks(config: "LMCacheEngineConfig", limit: float | None) -> Iterator[str]:
    """Yield a sentence for each store in folders that is full before it reaches its limit."""
    for option, folders in shared_folders(config):
        if limit is not None and limit > (room := _room(folders)):
            yield (
                f"lmcache.hybrid_fs_max_size_gb={limit / GIB:g} is more than the "
                f"{room / 1e9:.1f} GB of {option}, so nothing is deleted there before it is full; "
                "set it to less."
            )


def scarce_memory(config: "LMCacheEngineConfig", ranks: int) -> Iterator[str]:
    """Yield a sentence if the pools of an engine do not fit what is free, as beside others.

    Call it before any is made: they take all of it at once where they are pinned.
    """
    if config.local_cpu_use_hugepages:  # these are set aside
        return
    wanted = ranks * config.max_local_cpu_size * GIB
    try:
        free = psutil.virtual_memory().available
    except (OSError, KeyError):
        return
    if wanted > free:
        yield (
            f"max_local_cpu_size={config.max_local_cpu_size} takes {wanted / 1e9:.1f} GB on "
            f"{ranks} rank{'s' * (ranks > 1)}, and {free / 1e9:.1f} GB of this machine's memory "
            "are free: the kernel may end this engine or another one; set it to less."
        )


def _each(ranks: int) -> str:
    return "each rank" if ranks == 1 else f"each of {ranks} ranks"


def _whole(config: "LMCacheEngineConfig") -> float:
    """Return the bytes of memory for this engine; those of huge pages are beside a limit."""
    limit = math.inf if config.local_cpu_use_hugepages else memory_limit()
    return memory_of_the_machine(limit)


def _room(folders: Sequence[str]) -> float:
    """Return the bytes of the file systems of folders."""
    there = map(_existing, folders)
    try:
        # A total of 0 is no limit.
        rooms = {os.stat(at).st_dev: shutil.disk_usage(at).total or math.inf for at in there}
    except OSError:  # a share that was lost meanwhile
        return math.inf
    return sum(rooms.values())


def _existing(folder: str) -> str:
    """Return a folder, or the innermost one around it that exists."""
    path = os.path.abspath(folder)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _memory_of_node(node: int) -> float:
    """Return the bytes of memory of a NUMA node; inf if unknown."""
    try:
        lines = (_NODES / f"node{node}" / "meminfo").read_text().splitlines()
        words = next(line.split() for line in lines if " MemTotal:" in line)
        return float(words[-2]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return math.inf
