# SPDX-License-Identifier: Apache-2.0
"""Checks that RAM and disks have the configured room, and how many prompts a store holds."""

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from lmcache import device_ops

from lmcache_hybrid.config.container import memory_limit
from lmcache_hybrid.config.folders import FolderLimits
from lmcache_hybrid.config.options import Options
from lmcache_hybrid.config.own_options import MAX_AGE_KEY, MAX_SIZE_KEY
from lmcache_hybrid.config.stores import MEMORY, shared_folders
from lmcache_hybrid.config.tiers import Tier, prompt_bytes, tiers
from lmcache_hybrid.config.tight_memory import folders_in_memory, tight_memory
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.sizes import GIB, in_gib, size_text
from lmcache_hybrid.storage.host_memory import DONT_ROUND, compiled_part_missing, rounded
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, error, ok, skipped, warning

# Less than this is as good as full.
FULL_BYTES = 64 << 20
# A store that holds fewer of the longest prompts evicts nearly all before they are asked again.
# In RAM, requests that wait with a hit may pin half of them.
FEW, FEW_IN_RAM = 4, 8
RAM = MEMORY.title


def check_memory(context: Context) -> Iterator[Finding]:
    """Check that memory is enough for the pools of this host's ranks, taken at start-up."""
    if context.config is None:
        return
    wanted = int(context.config.max_local_cpu_size * GIB)
    try:
        free = psutil.virtual_memory().available
    except (OSError, KeyError):
        yield skipped("memory", "This system does not say how much memory is available.")
        return
    # Huge pages do not count as the container's memory.
    limit = math.inf if context.config.local_cpu_use_hugepages else memory_limit()
    there = f"{size_text(free)} are available"
    if limit < free:
        free, there = int(limit), f"this container may use {size_text(int(limit))}"
    here = context.local_ranks
    if model := context.model:
        given, options = (model.offloaded, model.nodes, model.share), _options(context)
        most = options.folder_limits.max_bytes if options else None
        for said in (
            *tight_memory(context.config, here, *given),
            *folders_in_memory(context.config, here, most),
        ):
            sentence, fix = said.split("; set ")
            yield warning("memory", f"{sentence}.", f"Set {fix}")
    message = f"max_local_cpu_size takes {size_text(wanted)} per rank, {there}"
    if wanted * here > free:
        message += f", and this engine has {here} ranks here" if here > 1 else ""
        yield warning("memory", f"{message}.", "Lower max_local_cpu_size, or free memory.")
        return
    ranks = free // wanted if wanted else 0
    message += f": enough for {ranks} rank{'s' * (ranks != 1)}" if ranks else ""
    fallback = rounded(wanted)
    if compiled_part_missing(device_ops) and fallback * here > free:
        yield warning(
            "memory",
            f"{message}, but {size_text(fallback)} per rank where CUDA cannot pin it as it is.",
            f"Set {DONT_ROUND}, or lower max_local_cpu_size.",
        )
    else:
        yield ok("memory", f"{message}.")


def check_prompts(context: Context) -> Iterator[Finding]:
    """Check how many of the longest prompts RAM, local disk and folders hold."""
    options = _options(context)
    for tier in tiers(context.config, options) if options else ():
        if tier.limit:
            yield from prompts_that_fit(context, tier)


def prompts_that_fit(context: Context, tier: Tier) -> Iterator[Finding]:
    model, options = context.model, _options(context)
    if not options or not model or not model.served or model.windows or not model.longest:
        return
    of_stages = [
        prompt_bytes(
            options,
            model.longest,
            model.step_tokens,
            model.block_size,
            model.unit,
            *of_stage,
            model.block_size // model.dcp,
        )
        for of_stage in model.stages
    ]
    taken = sum(of_stages) * model.ranks if tier.shared else max(of_stages)
    message = (
        f"{tier.name} holds about {tier.holds(taken)} prompts of max_model_len={model.longest:,} "
        f"tokens, which take {size_text(taken)}{'' if tier.shared else ' per rank'}"
    )
    few = FEW_IN_RAM if tier.name == RAM else FEW
    # A small tier in front of a larger one is fine: it holds what is hit again soon.
    if tier.limit >= few * taken or not tier.last:
        yield ok("prompts", f"{message}.")
        return
    yield warning(
        "prompts",
        f"{message}, so a few of them push all others out.",
        f"Set {tier.setting} to {in_gib(few * taken)} or more, or --max-model-len to what you "
        "serve.",
    )


def _options(context: Context) -> Options | None:
    """Read the options; None if one is refused or unreadable, which other checks report."""
    with suppress(ConfigError):
        return context.read_options() if context.config else None
    return None


def check_disks(context: Context) -> Iterator[Finding]:
    """Compare free space with what may still be written."""
    config = context.config
    if config is None:
        return
    limit = int(config.max_local_disk_size * GIB)
    disks = [part.strip() for part in (config.local_disk or "").split(",") if part.strip()]
    # LMCache deals the folders out to the ranks.
    used = [disks[rank % len(disks)] for rank in range(context.local_ranks)] if disks else []
    for paths in _by_file_system(map(Path, dict.fromkeys(disks))):
        yield _local_disk(paths, limit, sum(Path(each) in paths for each in used))
    with suppress(ConfigError):  # reported by other checks
        for _, folders in shared_folders(config):
            for folder in folders:
                options = _options(context)
                yield _shared_folder(
                    Path(folder), options.folder_limits if options else FolderLimits()
                )


def _by_file_system(paths: Iterable[Path]) -> Iterable[list[Path]]:
    """List together the folders that share a file system's room."""
    found: dict[object, list[Path]] = {}
    for path in paths:
        try:
            where: object = _there(path).stat().st_dev
        except OSError:
            where = path
        found.setdefault(where, []).append(path)
    return found.values()


def _local_disk(paths: Sequence[Path], limit: int, ranks: int) -> Finding:
    """Compare the room of folders on one file system with the limits of ranks that write there."""
    named = ", ".join(map(str, paths))
    try:
        usage = shutil.disk_usage(_there(paths[0]))
        held = sum(file.stat().st_size for path in paths for file in path.glob("*.pt"))
    except OSError as failure:
        return skipped("disk space", f"{named} cannot be looked at ({failure.strerror}).")
    if not usage.total:
        return _without_size(paths[0])
    free = usage.free
    inodes = os.statvfs(_there(paths[0]))
    if inodes.f_files and not inodes.f_favail:
        fix = "Delete files there, or make the file system with more inodes."
        return warning("disk space", f"{named} takes no more files: no inode is free there.", fix)
    missing = max(0, limit * ranks - held) - free
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    message = (
        f"{named} {'have' if paths[1:] else 'has'} {size_text(free)} free and "
        f"{'hold' if paths[1:] else 'holds'} {size_text(held)} of max_local_disk_size "
        f"{size_text(limit)}{each}"
    )
    if missing <= 0:
        return ok("disk space", f"{message}.")
    fitting, fix = free + held, f"Free {size_text(missing)}"
    if fitting > FULL_BYTES:
        fix += f", or set max_local_disk_size to at most {in_gib(fitting // ranks)}"
    return (warning if held or free >= FULL_BYTES else error)(
        "disk space", f"{message}, so the disk is full before LMCache evicts.", f"{fix}."
    )


def _there(path: Path) -> Path:
    """Return the folder, or the one in which an engine will create it."""
    return path if path.exists() else path.absolute().parent


def _without_size(path: Path) -> Finding:
    """For a network's file system that says nothing, or ``/proc``, where the folder is refused."""
    return skipped("disk space", f"The file system of {path} does not say how large it is.")


def _shared_folder(path: Path, limits: FolderLimits) -> Finding:
    try:
        usage = shutil.disk_usage(_there(path))
    except OSError as failure:
        return skipped("disk space", f"{path} cannot be looked at ({failure.strerror}).")
    if not usage.total:
        return _without_size(path)
    message = f"{path} has {size_text(usage.free)} of {size_text(usage.total)} free"
    fix = f"Set {MAX_SIZE_KEY} in kv_connector_extra_config to what it may hold, in GB."
    if usage.free < FULL_BYTES:
        return error("disk space", f"{message}: it is full.", f"Free some space. {fix}")
    if limits.max_bytes and limits.max_bytes > usage.total:
        return warning(
            "disk space",
            f"{message}, and {MAX_SIZE_KEY} allows {size_text(limits.max_bytes)}: it is full "
            "before anything is deleted.",
            f"Set {MAX_SIZE_KEY} to less than {in_gib(usage.total)}.",
        )
    if limits.max_bytes:
        return ok("disk space", f"{message}; it holds {size_text(limits.max_bytes)} at most.")
    if limits:
        return ok("disk space", f"{message}; {MAX_AGE_KEY} empties it, without a limit in bytes.")
    return warning("disk space", f"{message}, and nothing is ever deleted there.", fix)
