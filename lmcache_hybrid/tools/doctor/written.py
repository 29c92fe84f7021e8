# SPDX-License-Identifier: Apache-2.0
"""Reads what the user wrote, whatever else is wrong, and takes out what is refused."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.folders import trusted_owner
from lmcache_hybrid.config.lmcache_config import refusals
from lmcache_hybrid.config.lmcache_file import CONFIG_FILE
from lmcache_hybrid.config.other_names import name_as_redis
from lmcache_hybrid.config.own_options import TRUSTED_OWNER_KEY, read_own_options
from lmcache_hybrid.config.redis_credentials import hide_passwords
from lmcache_hybrid.config.values import as_lmcache_reads, problems, read_values, settle_empty
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.upstream.lmcache_home import take

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import KVTransferConfig

# Options that a test record needs, those first that others depend on.
_OF_STORES = (
    *("local_cpu", "blocking_timeout_secs", "max_local_disk_size", "remote_serde"),
    *("extra_config", "local_disk", "remote_storage_plugins", "remote_url"),
)
_NAMES_STORES = ("local_disk", "remote_storage_plugins", "remote_url")


def _defaults() -> "LMCacheEngineConfig":
    return take("v1.config", "LMCacheEngineConfig")()


def written_config(transfer: "KVTransferConfig | None") -> "LMCacheEngineConfig | None":
    """Read LMCache's options one by one, without its own checks; those it would misread are left.

    Returns:
        LMCache's defaults with them; None if the file cannot be read.
    """
    try:
        values = read_values(os.environ.get(CONFIG_FILE), os.environ)
    except ConfigError:
        return None
    for key, value in (transfer.kv_connector_extra_config if transfer else {}).items():
        if key.startswith("lmcache."):
            values[key.removeprefix("lmcache.")] = key, value
    config = _defaults()
    with suppress(ConfigError):
        own = read_own_options(transfer.kv_connector_extra_config if transfer else {})
        config._hybrid_trusted_owner = own[TRUSTED_OWNER_KEY]
    for option, entry in values.items():
        if hasattr(config, option) and not any(problems({option: entry})):
            try:
                read = as_lmcache_reads({option: entry})
            except Exception:  # of LMCache's converters; other checks say so
                continue
            for name, value in read.items():
                vars(config)[name] = value
    settle_empty(config)
    try:
        name_as_redis(config)
    except ConfigError:
        config.remote_url = None
    hide_passwords(config)
    return config


def stores_alone(
    config: "LMCacheEngineConfig",
) -> "tuple[LMCacheEngineConfig, list[str]]":
    """Take the stores out of a configuration that is refused.

    Returns:
        LMCache's defaults with the stores of ``config`` that are accepted, and the options of
        those that are not.
    """
    made = _defaults()
    made._hybrid_trusted_owner = trusted_owner(config)
    refused = []
    for option in _OF_STORES:
        for value in _parts(option, getattr(config, option), made):
            before = getattr(made, option)
            vars(made)[option] = value(before)
            if refusals(made, None):
                vars(made)[option] = before
                if option in _NAMES_STORES:
                    refused.append(option)
    return made, list(dict.fromkeys(refused))


def _parts(option: str, value: Any, made: "LMCacheEngineConfig") -> Iterator[Any]:
    """Yield functions that add one part of a value to the parts before."""
    if value == getattr(made, option):
        return
    if option == "extra_config":
        for name, each in (value or {}).items():
            yield lambda before, name=name, each=each: {**(before or {}), name: each}
    elif option == "remote_storage_plugins":
        for each in value or ():
            yield lambda before, each=each: [*(before or ()), each]
    else:
        yield lambda before: value
