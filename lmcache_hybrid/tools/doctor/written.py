# SPDX-License-Identifier: Apache-2.0
"""Takes the stores out of a configuration that is refused, so that they are tried all the same."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.check import STORES
from lmcache_hybrid.config.folders import trusted_owner
from lmcache_hybrid.config.lmcache_config import refusals
from lmcache_hybrid.upstream.lmcache_home import take

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

# Options that a test record needs, those first that others depend on.
_OF_STORES = (
    *("local_cpu", "blocking_timeout_secs", "max_local_disk_size", "remote_serde"),
    *("extra_config", "local_disk", "remote_storage_plugins", "remote_url"),
)


def _defaults() -> "LMCacheEngineConfig":
    return take("v1.config", "LMCacheEngineConfig")()


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
                if option in STORES:
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
