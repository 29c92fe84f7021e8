# SPDX-License-Identifier: Apache-2.0
"""Describes LMCache's options for a hybrid model, beyond LMCache's own definitions of them.

LMCache's ``_CONFIG_DEFINITIONS`` has each option's name, type and default.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GIGABYTES, TOKENS = "gigabytes (2^30 bytes)", "tokens"
# Longer times fail: of sockets in milliseconds (32 bits), and of threads in seconds.
SOCKET_MS, THREAD_SECONDS = 2**31 - 1, 9_000_000_000
# Prefixes of options that nothing here reads.
UNREAD = ("mp_", "blend_", "pd_", "nixl_", "p2p_")


@dataclass(frozen=True)
class LMCacheOption:
    """
    Attributes:
        unit: of its number; "" where it has none.
        least: its smallest number; None where any is taken.
        above: the number that it must exceed; None where any is taken.
        most: its largest number; None where any is taken.
        moot: it is set to false, because nothing here needs it.
        is_set: whether a value asks for what ``refused`` says.
        refused: why such a value cannot keep its meaning, and the fix; "" where it can.
    """

    unit: str = ""
    least: int | None = None
    above: int | None = None
    most: int | None = None
    moot: bool = False
    is_set: Callable[[Any], bool] = bool
    refused: str = ""


def _is_power_of_two(value: Any) -> bool:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return number > 0 and not number & (number - 1)


# What is true of all others.
PLAIN = LMCacheOption()


def _refused(why: str, is_set: Callable[[Any], bool] = bool) -> LMCacheOption:
    return LMCacheOption(is_set=is_set, refused=why)


OPTIONS: dict[str, LMCacheOption] = {
    "max_local_cpu_size": LMCacheOption(GIGABYTES),
    "max_local_disk_size": LMCacheOption(GIGABYTES),
    "reserve_local_cpu_size": LMCacheOption(GIGABYTES),
    "lazy_memory_safe_size": LMCacheOption(GIGABYTES),
    "maru_pool_size": LMCacheOption(GIGABYTES),
    "max_hidden_state_cpu_size": LMCacheOption(GIGABYTES),
    "chunk_size": LMCacheOption(TOKENS),
    "min_retrieve_tokens": LMCacheOption(TOKENS, least=0),
    "lookup_timeout_ms": LMCacheOption("milliseconds", above=0, most=SOCKET_MS),
    "blocking_timeout_secs": LMCacheOption("seconds", above=0, most=THREAD_SECONDS),
    "pin_timeout_sec": LMCacheOption("seconds", above=0),
    "pin_check_interval_sec": LMCacheOption("seconds", above=0, most=THREAD_SECONDS),
    "use_layerwise": LMCacheOption(moot=True),
    "enable_async_loading": LMCacheOption(moot=True),
    "enable_blending": _refused("a recurrent state cannot be blended; set it to false"),
    "save_unfull_chunk": _refused("states exist at block boundaries only; set it to false"),
    "enable_p2p": _refused("peers exchange whole chunks of attention only; set it to false"),
    "enable_pd": _refused("use kv_role with a shared redis:// or fs:// store; set it to false"),
    "enable_controller": _refused("the controller does not know state records; set it to false"),
    "enable_hidden_state_cache": _refused("it is not kept for hybrid models; set it to false"),
    "enable_scheduler_bypass_lookup": _refused("every rank must be asked; set it to false"),
    "enable_chunk_statistics": _refused(
        "chunks are not counted for hybrid models; set it to false"
    ),
    "external_lookup_client": _refused("every rank must be asked; remove it"),
    "lookup_server_worker_ids": _refused("every rank must be asked; remove it"),
    "hit_miss_ratio": _refused("hits are not thinned out here; remove it", lambda v: v is not None),
    "gds_path": _refused("its buffers lie on the GPU; use local_disk or fs:// and remove it"),
    "maru_path": _refused("its buffers are one chunk long; use redis:// and remove it"),
    "storage_plugins": _refused("its buffers may not fit a record; use redis:// or fs://"),
    "remote_serde": _refused(
        "a state must come back bit for bit; use 'naive'", lambda v: v not in (None, "naive")
    ),
}
_PAGED = _refused("LMCache's pool then has room for whole chunks alone; remove it")
# The same of keys of LMCache's ``extra_config``. Numbers are not converted by LMCache.
EXTRA_OPTIONS: dict[str, LMCacheOption] = {
    # Of its health monitor, which switches LMCache off where it cannot compare or wait.
    "fallback_policy": _refused(
        "LMCache's health monitor knows recompute and local_cpu; write one of them",
        lambda v: v not in ("recompute", "local_cpu"),
    ),
    "get_blocking_failed_threshold": LMCacheOption("failed reads", above=0),
    "ping_interval": LMCacheOption("seconds", above=0, most=THREAD_SECONDS),
    "ping_timeout": LMCacheOption("seconds", above=0, most=THREAD_SECONDS),
    "waiting_time_for_recovery": LMCacheOption("seconds", least=0),
    "local_cpu.pinned_align_bytes": _refused(
        "LMCache opens no store with it, unless it is a power of two; remove it",
        lambda v: v is not None and not _is_power_of_two(v),
    ),
    "rust_raw_block.io_engine": dataclasses.replace(
        _PAGED, is_set=lambda v: str(v).lower() == "io_uring"
    ),
    "rust_raw_block.use_iouring": _PAGED,
    "rust_raw_block.use_uring": _PAGED,
    "shm_name": _refused(
        "ranks and engines of one name would write into each other's memory, and a /dev/shm that "
        "is too small ends them; remove it"
    ),
    "audit_backend_enabled": _refused("no record is found in a backend that it wraps; remove it"),
    "enable_nixl_storage": _refused("its buffers do not fit a record; use redis:// or fs://"),
    "fs_connector_relative_tmp_dir": _refused(
        "records are written beside their place, under names of their own; remove it"
    ),
    "save_chunk_meta": _refused(
        "a record needs its size beside it; remove it", lambda v: v is False
    ),
}
