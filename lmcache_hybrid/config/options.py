# SPDX-License-Identifier: Apache-2.0
"""Reads LMCache's options for a hybrid model: keeps, sets or refuses each."""

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from vllm.logger import init_logger

from lmcache_hybrid.config.folders import (
    MAX_AGE_KEY,
    MAX_SIZE_KEY,
    TRUSTED_OWNER_KEY,
    FolderLimits,
    check_folder,
    read_limits,
    read_trusted_owner,
    trusted_owner,
)
from lmcache_hybrid.config.other_names import name_as_redis
from lmcache_hybrid.config.redis_credentials import (
    PASSWORD_FILE,
    hide_passwords,
    holds_password,
    shown,
)
from lmcache_hybrid.config.stores import all_places, check_places, places, shared_folders
from lmcache_hybrid.config.stores.base import folders_in
from lmcache_hybrid.config.values import (
    as_lmcache_reads,
    problems,
    read_values,
    settle_empty,
    taken_away,
    without_prefix,
)
from lmcache_hybrid.core.digests import PLAIN, Digester, read_key
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY
from lmcache_hybrid.upstream.lmcache_home import take

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import KVTransferConfig, VllmConfig

logger = init_logger("vllm.lmcache_hybrid.config.options")

# Keys of kv_connector_extra_config with this prefix are this package's own.
OWN_PREFIX = "lmcache.hybrid_"
LOAD_LIMIT_KEY = "lmcache.max_tokens_per_load"
CHECKPOINT_KEY = "lmcache.hybrid_checkpoint_tokens"
KEY_FILE_KEY = "lmcache.hybrid_key_file"
POLICY_KEY = "lmcache.hybrid_load_policy"
SHARE_KEY = "lmcache.hybrid_share_prefills"
POLICIES = ("always", "faster")
# All that begin with OWN_PREFIX.
SETTINGS = {
    *(CHECKPOINT_KEY, KEY_FILE_KEY, POLICY_KEY, SHARE_KEY),
    *(MAX_SIZE_KEY, MAX_AGE_KEY, TRUSTED_OWNER_KEY),
    "lmcache.hybrid_load_failure_policy",
}
# Settings of earlier versions: why they are gone.
_GONE = {"lmcache.hybrid_attention_group": "it changed nothing, all attention groups are stored"}
# Default of CHECKPOINT_KEY: a state at each chunk end of a prefill.
CHUNK_ENDS = "chunk"
DEFAULT_CHUNK_SIZE = 256
STABLE_HASH = "sha256_cbor"

# Options that cannot keep their meaning: (is it set?, why not, and the fix).
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enable_blending": (bool, "a recurrent state cannot be blended; set it to false"),
    "save_unfull_chunk": (bool, "states exist at block boundaries only; set it to false"),
    "enable_p2p": (bool, "peers exchange whole chunks of attention only; set it to false"),
    "enable_pd": (bool, "use kv_role with a shared redis:// or fs:// store; set it to false"),
    "enable_controller": (bool, "the controller does not know state records; set it to false"),
    "enable_hidden_state_cache": (bool, "it is not kept for hybrid models; set it to false"),
    "enable_scheduler_bypass_lookup": (bool, "every rank must be asked; set it to false"),
    "enable_chunk_statistics": (bool, "chunks are not counted for hybrid models; set it to false"),
    "external_lookup_client": (bool, "every rank must be asked; remove it"),
    "lookup_server_worker_ids": (bool, "every rank must be asked; remove it"),
    "hit_miss_ratio": (lambda v: v is not None, "hits are not thinned out here; remove it"),
    "gds_path": (bool, "its buffers lie on the GPU; use local_disk or fs:// and remove it"),
    "maru_path": (bool, "its buffers are one chunk long; use redis:// and remove it"),
    "storage_plugins": (bool, "its buffers may not fit a record; use redis:// or fs://"),
    "remote_serde": (
        lambda v: v not in (None, "naive"),
        "a state must come back bit for bit; use 'naive'",
    ),
}
# The same for keys of LMCache's extra_config.
_REFUSED_EXTRA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "audit_backend_enabled": (bool, "no record is found in a backend that it wraps; remove it"),
    "enable_nixl_storage": (bool, "its buffers do not fit a record; use redis:// or fs://"),
    "fs_connector_relative_tmp_dir": (
        bool,
        "records are written beside their place, under names of their own; remove it",
    ),
    "save_chunk_meta": (lambda v: v is False, "a record needs its size beside it; remove it"),
}

# Options that are not needed here.
_MOOT = ("use_layerwise", "enable_async_loading")
# Options that must be above 0, and their units.
_POSITIVE = {"lookup_timeout_ms": "milliseconds", "blocking_timeout_secs": "seconds"}


@dataclass(frozen=True)
class Options:
    """Settings of this package, and those of LMCache that the scheduler side needs.

    Attributes:
        save: whether this engine stores anything (``kv_role``, ``LMCACHE_FORCE_SKIP_SAVE``).
        priority_limit: requests with a larger priority value are not stored.
        min_retrieve_tokens: hits of fewer tokens are not loaded.
        max_tokens_per_load: 0 for no limit.
        checkpoint_tokens: T; a long prefill stores a state every T tokens, 0 for none.
        chunk_ends: whether it stores one where a step ends at a boundary anyway.
        save_decode: whether boundaries in generated tokens are stored.
        digester: keyed when a key file is configured.
        load_policy: one of :data:`POLICIES`; "faster" skips hits that compute faster.
        share_prefills: whether a request waits for a prefix that another one is computing; not
            beside another connector, which may have it.
        alone: whether this is the only connector.
        events: whether KV cache events are published for stored records.
        folder_limits: limits to which this engine cleans the folders of ``fs://``.
    """

    save: bool
    priority_limit: int | None
    min_retrieve_tokens: int
    max_tokens_per_load: int
    checkpoint_tokens: int = 0
    chunk_ends: bool = True
    save_decode: bool = False
    digester: Digester = PLAIN
    load_policy: str = POLICIES[0]
    share_prefills: bool = True
    alone: bool = True
    events: bool = False
    folder_limits: FolderLimits = FolderLimits()


def read_options(vllm_config: "VllmConfig", config: "LMCacheEngineConfig") -> Options:
    """Read the options.

    Raises:
        ConfigError: a setting of ours is unknown or in LMCache's ``extra_config``, or has a bad
            value: not a whole number, a negative length, an unknown policy, not a boolean, a
            limit without ``fs://``, or an unusable key file.
    """
    transfer = vllm_config.kv_transfer_config
    for key in transfer.kv_connector_extra_config:
        if key in _GONE:
            logger.warning_once("%s is not a setting any more: %s; remove it.", key, _GONE[key])
        elif key.startswith(OWN_PREFIX) and key not in SETTINGS and key != BESIDE_KEY:
            raise ConfigError(f"{key} is not a setting; the settings are {sorted(SETTINGS)}.")
    for key in config.extra_config or {}:
        if str(key).startswith((OWN_PREFIX, OWN_PREFIX.removeprefix("lmcache."))):
            raise ConfigError(
                f"{key} stands in LMCache's extra_config, where nothing reads it; move it to "
                "kv_connector_extra_config of --kv-transfer-config."
            )

    def whole(key: str, default: int | None, instead: str = "") -> int | None:
        value = transfer.get_from_extra_config(key, default)
        try:
            if value is None or int(value) == float(value):
                return default if value is None else int(value)
        except (TypeError, ValueError, OverflowError):
            pass
        raise ConfigError(f"{key}={value!r} is not a whole number; write one{instead}.")

    def tokens(key: str, value: int | None) -> int:
        if value is None or value < 0:
            raise ConfigError(f"{key}={value} is not a number of tokens; write one, or 0.")
        return value

    alone = not transfer.get_from_extra_config(BESIDE_KEY, False)
    policy = transfer.get_from_extra_config(POLICY_KEY, POLICIES[0])
    if policy not in POLICIES:
        raise ConfigError(f"{POLICY_KEY}={policy!r} is not a policy; write one of {POLICIES}.")
    share = transfer.get_from_extra_config(SHARE_KEY, True)
    if not isinstance(share, bool):
        raise ConfigError(f"{SHARE_KEY}={share!r} is neither true nor false; write one of them.")
    key_file = transfer.get_from_extra_config(KEY_FILE_KEY, None)
    chunk_ends = stores_chunk_ends(transfer)
    return Options(
        save=transfer.kv_role != "kv_consumer" and not os.environ.get("LMCACHE_FORCE_SKIP_SAVE"),
        priority_limit=config.priority_limit,
        min_retrieve_tokens=tokens(
            "LMCache option min_retrieve_tokens", config.min_retrieve_tokens
        ),
        max_tokens_per_load=tokens(LOAD_LIMIT_KEY, whole(LOAD_LIMIT_KEY, 0) or 0),
        checkpoint_tokens=(
            0 if chunk_ends else whole(CHECKPOINT_KEY, 0, f", or '{CHUNK_ENDS}'") or 0
        ),
        chunk_ends=chunk_ends,
        save_decode=bool(config.save_decode_cache),
        digester=PLAIN if key_file is None else read_key(KEY_FILE_KEY, str(key_file)),
        load_policy=policy,
        share_prefills=share and alone,
        alone=alone,
        events=bool(config.enable_kv_events) and _publishes(vllm_config),
        folder_limits=read_limits(transfer.kv_connector_extra_config, config),
    )


def stores_chunk_ends(transfer: "KVTransferConfig") -> bool:
    """Whether CHECKPOINT_KEY has its default, not a number of tokens."""
    return transfer.get_from_extra_config(CHECKPOINT_KEY, None) in (None, CHUNK_ENDS)


def _publishes(vllm_config: "VllmConfig") -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def log_sharing(vllm_config: "VllmConfig", options: Options) -> None:
    """Warn if requests are told to share prefills, but cannot."""
    asked = vllm_config.kv_transfer_config.get_from_extra_config(SHARE_KEY, False)
    if asked and not options.alone:
        logger.warning(
            "%s=true does nothing beside other connectors of a MultiConnector: each request "
            "computes what it does not find.",
            SHARE_KEY,
        )


def log_events(vllm_config: "VllmConfig", config: "LMCacheEngineConfig") -> None:
    """Log if only one of vLLM and LMCache was told to publish KV cache events."""
    if _publishes(vllm_config) and not config.enable_kv_events:
        logger.info(
            "vLLM publishes KV cache events of its own cache only; set LMCache's enable_kv_events "
            "to true for those of what LMCache stores."
        )
    elif config.enable_kv_events and not _publishes(vllm_config):
        logger.warning(
            "LMCache option enable_kv_events=True has no effect, because vLLM publishes no events; "
            """add --kv-events-config '{"enable_kv_cache_events": true}', or set it to false."""
        )


def check_lengths(options: Options, block_size: int) -> None:
    """Refuse lengths in tokens that do not fit this model's blocks.

    Args:
        block_size: N in tokens.

    Raises:
        ConfigError: ``checkpoint_tokens`` is not a multiple of N (states exist at block
            boundaries only), or ``max_tokens_per_load`` is less than a block.
    """
    limit = options.max_tokens_per_load
    if 0 < limit < block_size:
        raise ConfigError(
            f"{LOAD_LIMIT_KEY}={limit} is less than this model's block size {block_size}, so "
            f"nothing could be loaded; set it to {block_size} or more, or to 0 for no limit."
        )
    tokens = options.checkpoint_tokens
    if tokens < 0 or tokens % block_size:
        nearest = max(1, round(tokens / block_size)) * block_size
        raise ConfigError(
            f"{CHECKPOINT_KEY}={tokens} is not a multiple of this model's block size "
            f"{block_size}; set it to {nearest}, to 0 for no checkpoints, or remove it for one at "
            "each chunk's end."
        )


def check_pool(config: "LMCacheEngineConfig", largest: int) -> None:
    """Refuse a CPU pool too small for two records: every copy goes through it.

    Args:
        largest: bytes of the largest group's block.

    Raises:
        ConfigError: ``max_local_cpu_size`` is too small for this model.
    """
    if 2 * largest > config.max_local_cpu_size * (1 << 30):
        raise ConfigError(
            f"LMCache option max_local_cpu_size={config.max_local_cpu_size} is too small: one "
            f"block of this model takes {largest / 1e6:.1f} MB; set it to "
            f"{max(1, round(8 * largest / (1 << 30)))} GB or more."
        )


def load_lmcache_config(vllm_config: "VllmConfig") -> "LMCacheEngineConfig":
    """Load LMCache's configuration from file, environment and ``lmcache.*`` extra config.

    Without any, LMCache's default applies: 5 GB in RAM.

    Raises:
        ConfigError: the file that LMCACHE_CONFIG_FILE names does not exist, options have bad
            values (one sentence each), or the trusted owner is not a user.
    """
    from lmcache.integration.vllm.utils import lmcache_get_or_create_config
    from lmcache.v1.config_base import validate_and_set_config_value

    written = read_values(os.environ.get("LMCACHE_CONFIG_FILE"), os.environ)
    extra = {
        key.removeprefix("lmcache."): (key, value)
        for key, value in vllm_config.kv_transfer_config.kv_connector_extra_config.items()
        if key.startswith("lmcache.") and not key.startswith(OWN_PREFIX) and key != LOAD_LIMIT_KEY
    }
    # kv_connector_extra_config wins.
    written = {option: value for option, value in written.items() if option not in extra}
    own = vllm_config.kv_transfer_config.kv_connector_extra_config
    if wrong := [*problems(written), *problems(extra), *without_prefix(own)]:
        raise ConfigError(" ".join(wrong))
    for sentence in taken_away(os.environ.get("LMCACHE_CONFIG_FILE"), os.environ):
        logger.warning("%s", sentence)
    try:
        # LMCache has one per process, but the values set here are this engine's.
        config = copy.deepcopy(lmcache_get_or_create_config())
    except (AssertionError, ValueError) as error:
        # LMCache may fail first on what is missing beside an option that is refused here.
        if refused := list(_refused(as_lmcache_reads(written))):
            raise ConfigError(" ".join(refused)) from error
        raise
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"LMCache fails on its configuration ({type(error).__name__}); correct the values of "
            "its file, also those that the environment takes the place of."
        ) from error
    for field, (key, value) in extra.items():
        # LMCache itself warns of a field that does not exist.
        if not validate_and_set_config_value(config, field, value) and hasattr(config, field):
            raise ConfigError(
                f"{key}={value!r} is not a value that LMCache's {field} takes; correct it or "
                "remove it from kv_connector_extra_config."
            )
        # As LMCache does for its file and the environment.
        getattr(config, "_user_set_keys", set()).add(field)
        if holds_password(value):
            logger.warning(
                "%s holds a password, which this machine's users see in the list of processes; "
                "put it into a file and name that in %s.",
                key,
                PASSWORD_FILE,
            )
    settle_empty(config)
    config._hybrid_trusted_owner = read_trusted_owner(
        vllm_config.kv_transfer_config.kv_connector_extra_config
    )
    name_as_redis(config)
    hide_passwords(config)
    return config


def settle_lmcache_config(config: "LMCacheEngineConfig", block_size: int) -> None:
    """Refuse unsupported options, then set LMCache's chunk size to N. Mutates ``config``.

    Args:
        block_size: N in tokens.

    Raises:
        ConfigError: an option that cannot keep its meaning on a hybrid model.
    """
    if refused := refusals(config, block_size):
        raise ConfigError(" ".join(refused))
    _settle_chunk_size(config, block_size)
    for name in _MOOT:
        if getattr(config, name):
            logger.info(
                "Setting LMCache's %s from True to False: loads of a hybrid model are asynchronous "
                "already, beside the running requests.",
                name,
            )
    config.use_layerwise = config.enable_async_loading = False
    if config.pre_caching_hash_algorithm != STABLE_HASH:
        logger.info(
            "Setting pre_caching_hash_algorithm from %r to %r: keys of a hybrid model come from "
            "vLLM's block hashes, so PYTHONHASHSEED is not needed whatever LMCache says.",
            config.pre_caching_hash_algorithm,
            STABLE_HASH,
        )
        config.pre_caching_hash_algorithm = STABLE_HASH


def refusals(config: "LMCacheEngineConfig", block_size: int | None) -> list[str]:
    """List what :func:`settle_lmcache_config` would refuse, one sentence each.

    Args:
        block_size: N in tokens; None skips the checks that need it.
    """
    found = []
    for check in _checks(config, block_size):
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return found


def _checks(config: "LMCacheEngineConfig", block_size: int | None) -> Iterator[Callable[[], None]]:
    extra = config.extra_config or {}
    own = {name for place in places(config) for name in place.kind.own_options}
    for name, (is_set, why) in _REFUSED.items():
        yield partial(_refuse_if, name, getattr(config, name, None), is_set, why)
    for name, (is_set, why) in _REFUSED_EXTRA.items():
        if name not in own:
            yield partial(_refuse_if, f"extra_config.{name}", extra.get(name), is_set, why)
    for name, unit in _POSITIVE.items():
        yield partial(_check_positive, name, getattr(config, name), unit)
    yield partial(_check_remote, config)
    yield partial(_check_local, config)
    yield partial(_check_policy, config)
    yield partial(_check_locations, config)
    if block_size is not None:
        yield partial(_check_chunk_size, config, block_size)


def _refused(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each option of _REFUSED and _REFUSED_EXTRA that is set."""
    extra = values.get("extra_config") or {}
    written = [(name, values.get(name), *each) for name, each in _REFUSED.items()]
    written += [(f"extra_config.{n}", extra.get(n), *each) for n, each in _REFUSED_EXTRA.items()]
    for name, value, is_set, why in written:
        try:
            _refuse_if(name, value, is_set, why)
        except ConfigError as error:
            yield str(error)


def _refuse_if(name: str, value: Any, is_set: Callable[[Any], bool], why: str) -> None:
    if is_set(value):
        raise ConfigError(
            f"LMCache option {name}={shown(value)} does not work on a hybrid model: {why}."
        )


def _check_positive(name: str, value: Any, unit: str) -> None:
    # Written so that NaN is also refused.
    if value is None or not value > 0:
        raise ConfigError(
            f"LMCache option {name}={value!r} leaves no time to wait; set it to a number of {unit} "
            "above 0, or remove it for LMCache's default."
        )


def _check_chunk_size(config: "LMCacheEngineConfig", block_size: int) -> None:
    chosen = config.chunk_size
    if chosen != DEFAULT_CHUNK_SIZE and chosen % block_size:
        raise ConfigError(
            f"LMCache option chunk_size={chosen} is not a multiple of this model's block size "
            f"{block_size}; remove it, or set it to {block_size}."
        )


def _settle_chunk_size(config: "LMCacheEngineConfig", block_size: int) -> None:
    if config.chunk_size != block_size:
        logger.info(
            "Setting LMCache's chunk_size from %d to the block size %d.",
            config.chunk_size,
            block_size,
        )
        config.chunk_size = block_size


def _check_policy(config: "LMCacheEngineConfig") -> None:
    known = take("v1.storage_backend.cache_policy", "POLICY_MAPPING")
    if str(config.cache_policy).upper() not in known:
        raise ConfigError(
            f"LMCache option cache_policy={config.cache_policy!r} is none of {', '.join(known)}; "
            "use one of them, or remove it for the one of this package."
        )


def _check_locations(config: "LMCacheEngineConfig") -> None:
    """Refuse a store_location, or only retrieve_locations, that keep no records."""
    backends, wrong = [place.backend for place in all_places(config)], {}
    if config.store_location and config.store_location not in backends:
        wrong["store_location"] = config.store_location
    # A missing one is harmless beside others: it is not asked.
    if config.retrieve_locations and not any(n in backends for n in config.retrieve_locations):
        wrong["retrieve_locations"] = config.retrieve_locations
    for option, value in wrong.items():
        raise ConfigError(
            f"LMCache option {option}={shown(value)} names no backend that keeps records here; "
            + (f"use {' or '.join(backends)}, or remove it." if backends else "remove it.")
        )


def _check_remote(config: "LMCacheEngineConfig") -> None:
    if (config.remote_url or config.remote_storage_plugins) and config.remote_serde is None:
        raise ConfigError(
            "LMCache option remote_serde=None opens no remote store; remove it, or write naive."
        )
    check_places(config)
    for option, folders in shared_folders(config):
        for folder in folders:
            check_folder(option, folder, trusted_owner(config))


def memory_of_the_machine() -> float:
    """Return the bytes of memory and swap space; inf where the system does not say."""
    try:
        return float(psutil.virtual_memory().total + psutil.swap_memory().total)
    except (OSError, KeyError):  # no file descriptor left, or a /proc without some of it
        return math.inf


def _check_local(config: "LMCacheEngineConfig") -> None:
    if config.max_local_cpu_size <= 0:
        raise ConfigError(
            f"LMCache option max_local_cpu_size={config.max_local_cpu_size} leaves no memory to "
            "copy through; set it to a few GB."
        )
    taken, whole = config.max_local_cpu_size * (1 << 30), memory_of_the_machine()
    if taken > whole and not config.enable_lazy_memory_allocator:
        raise ConfigError(
            f"LMCache option max_local_cpu_size={config.max_local_cpu_size} takes "
            f"{taken / 1e9:.1f} GB on each rank, more than the {whole / 1e9:.1f} GB that this "
            "machine has; set it to less."
        )
    if not config.local_disk:
        return
    if not (config.max_local_disk_size or 0) > 0:
        raise ConfigError(
            f"LMCache option max_local_disk_size={config.max_local_disk_size} turns local_disk "
            "off; set it to the GB you want to use."
        )
    for folder in folders_in("LMCache option local_disk", config.local_disk):
        check_folder("local_disk", folder, trusted_owner(config))
