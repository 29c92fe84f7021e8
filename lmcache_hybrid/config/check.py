# SPDX-License-Identifier: Apache-2.0
"""Checks all settings at once: what is refused is told in one message."""

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from lmcache_hybrid.config.lmcache_config import load_lmcache_config, refusals
from lmcache_hybrid.config.lmcache_file import CONFIG_FILE
from lmcache_hybrid.config.lmcache_values import (
    as_lmcache_reads,
    problems,
    read_values,
    settle_empty,
    unprefixed,
)
from lmcache_hybrid.config.options import Options, read_options
from lmcache_hybrid.config.other_names import name_as_redis
from lmcache_hybrid.config.own_options import TRUSTED_OWNER_KEY, sound_own_options
from lmcache_hybrid.config.parallel import local_ranks, why_no_decode_saves
from lmcache_hybrid.config.redis_credentials import hide_passwords
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.upstream.lmcache_home import take

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import KVTransferConfig, VllmConfig

# Options that name a store.
STORES = ("local_disk", "remote_storage_plugins", "remote_url")


def checked_options(
    vllm_config: "VllmConfig",
    config: "LMCacheEngineConfig | None" = None,
    block_size: int | None = None,
) -> Options:
    """Read the options, and refuse those that no model can be served with, or none of such blocks.

    Args:
        config: LMCache's, not settled; None loads it without warnings.
        block_size: N in tokens; None skips the checks that need it.

    Raises:
        ConfigError: a sentence for each.
    """
    told: tuple[str, ...] = ()
    left: Collection[str] = ()
    if config is None:
        try:
            config = load_lmcache_config(vllm_config, quiet=True)
        except ConfigError as error:
            told, found = error.args, written_config(vllm_config.kv_transfer_config)
            if found is None:
                raise
            config, left = found
    wrong = refusals(config, block_size, local_ranks(vllm_config))
    if config.save_decode_cache and (why := why_no_decode_saves(vllm_config)):
        wrong.append(why)
    options: Options | None = None
    try:
        options = read_options(vllm_config, config, block_size)
    except ConfigError as error:
        wrong += error.args
    wrong = list(dict.fromkeys((*told, *beside(wrong, left))))
    if wrong or options is None:
        raise ConfigError(*wrong)
    return options


def written_config(
    transfer: "KVTransferConfig | None",
) -> "tuple[LMCacheEngineConfig, set[str]] | None":
    """Read LMCache's options one by one, without its own checks; those it would misread are left.

    Returns:
        LMCache's defaults with what was read, and the options that were left; None if the file
        cannot be read.
    """
    extra = transfer.kv_connector_extra_config if transfer else {}
    try:
        values = read_values(os.environ.get(CONFIG_FILE), os.environ)
    except ConfigError:
        return None
    for key, value in extra.items():
        if key.startswith("lmcache."):
            values[key.removeprefix("lmcache.")] = key, value
    config: LMCacheEngineConfig = take("v1.config", "LMCacheEngineConfig")()
    left = {option for _, option in unprefixed(extra)}
    config._hybrid_trusted_owner = sound_own_options(extra)[TRUSTED_OWNER_KEY]
    for option, entry in values.items():
        if any(problems({option: entry})):
            left.add(option)
        elif hasattr(config, option):
            try:
                read = as_lmcache_reads({option: entry})
            except Exception:  # of LMCache's converters; other checks say so
                left.add(option)
                continue
            for name, value in read.items():
                vars(config)[name] = value
    settle_empty(config)
    try:
        name_as_redis(config)
    except ConfigError:
        config.remote_url = None
        left.add("remote_url")
    hide_passwords(config)
    return config, left


def beside(wrong: Iterable[str], left: Collection[str]) -> list[str]:
    """Leave out the sentences that may come from the default of an option that was left.

    Args:
        left: see :func:`written_config`.
    """
    if any(name in left for name in (*STORES, "extra_config")):
        return []
    return [each for each in wrong if not any(f" {name}=" in each for name in left)]
