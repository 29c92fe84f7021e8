# SPDX-License-Identifier: Apache-2.0
"""LMCache's options for ``mooncakestore://``, as they are, under Mooncake's present names.

Where one is wrong LMCache logs a warning and goes on without the store.
"""

import os
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

logger = init_logger("vllm.lmcache_hybrid.config.mooncake")

SCHEME = "mooncakestore"
# LMCache's name of a JSON file with the options; it wins.
FILE = "MOONCAKE_CONFIG_PATH"
# Names that LMCache passes on and Mooncake does not know any more, and today's.
_RENAMED = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
_NEEDED = ("local_hostname", "metadata_server", "master_server_addr")


def rename_options(config: "LMCacheEngineConfig") -> None:
    """Add today's names of options to ``extra_config``. Mutates ``config``.

    Without the master's Mooncake's client waits for one on this machine.
    """
    extra = config.extra_config
    if not (config.remote_url or "").startswith(f"{SCHEME}://") or not extra:
        return
    for old, new in _RENAMED.items():
        value = extra.get(f"mooncake_{old}", extra.get(old))
        if value and f"mooncake_{new}" not in extra:
            extra[f"mooncake_{new}"] = value
            logger.info("extra_config.mooncake_%s is what %s says: %s.", new, old, value)


def check_mooncake(config: "LMCacheEngineConfig") -> None:
    """Check Mooncake's client and what it needs.

    Raises:
        ConfigError: LMCache could not make a client.
    """
    extra = config.extra_config or {}
    if extra.get("save_chunk_meta"):
        raise ConfigError(
            f"LMCache option extra_config.save_chunk_meta={extra['save_chunk_meta']!r} is not for "
            f"{SCHEME}:// on a hybrid model, where a value has no metadata; remove it."
        )
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"LMCache option remote_url={config.remote_url!r} needs Mooncake's client, which "
            f"cannot be imported ({error}); install mooncake-transfer-engine and the system's "
            "libibverbs."
        ) from None
    where, options = _options(extra)
    for name in _NEEDED:
        if not options.get(name):
            raise ConfigError(
                f"LMCache option {where}mooncake_{name} is not set, which Mooncake's client needs; "
                "set it as Mooncake's documentation says."
            )


def _options(extra: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Where they stand, and what LMCache makes of them."""
    from lmcache.v1.storage_backend.connector.mooncakestore_connector import MooncakeStoreConfig

    path = os.environ.get(FILE)
    if path is None:
        return "extra_config.", MooncakeStoreConfig._build_setup_dict(extra)
    try:
        return f"{FILE}: ", MooncakeStoreConfig.from_file(path).setup_config
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{FILE}={path!r} cannot be read ({error}); name Mooncake's JSON file, or unset it."
        ) from None
