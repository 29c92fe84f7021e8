# SPDX-License-Identifier: Apache-2.0
"""The options of an engine, LMCache's and this package's, as the scheduler side needs them."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.config.folders import FolderLimits, read_limits
from lmcache_hybrid.config.own_options import (
    CHECKPOINT_KEY,
    CHUNK_ENDS,
    KEY_FILE_KEY,
    LOAD_LIMIT_KEY,
    POLICIES,
    POLICY_KEY,
    SHARE_KEY,
    read_own_options,
    remarks,
    written,
)
from lmcache_hybrid.core.digests import PLAIN, Digester, read_key
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_hybrid.config.options")


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
        ConfigError: an option of ours is unknown or has a bad value, see
            :func:`.own_options.problems`; ``min_retrieve_tokens`` is negative; a limit without
            ``fs://``; or an unusable key file.
    """
    transfer = vllm_config.kv_transfer_config
    own = read_own_options(transfer.kv_connector_extra_config)
    shortest = config.min_retrieve_tokens
    if shortest is None or shortest < 0:
        raise ConfigError(
            f"LMCache option min_retrieve_tokens={shortest} is not a number of tokens; write one, "
            "or 0."
        )
    alone = not transfer.get_from_extra_config(BESIDE_KEY, False)
    checkpoint, key_file = own[CHECKPOINT_KEY], own[KEY_FILE_KEY]
    chunk_ends = checkpoint == CHUNK_ENDS
    return Options(
        save=transfer.kv_role != "kv_consumer" and not os.environ.get("LMCACHE_FORCE_SKIP_SAVE"),
        priority_limit=config.priority_limit,
        min_retrieve_tokens=shortest,
        max_tokens_per_load=own[LOAD_LIMIT_KEY],
        checkpoint_tokens=0 if chunk_ends else checkpoint,
        chunk_ends=chunk_ends,
        save_decode=bool(config.save_decode_cache),
        digester=PLAIN if key_file is None else read_key(KEY_FILE_KEY, key_file),
        load_policy=own[POLICY_KEY],
        share_prefills=own[SHARE_KEY] and alone,
        alone=alone,
        events=bool(config.enable_kv_events) and _publishes(vllm_config),
        folder_limits=read_limits(own, config),
    )


def _publishes(vllm_config: "VllmConfig") -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def log_remarks(vllm_config: "VllmConfig") -> None:
    """Warn of options and variables that do nothing, see :func:`.own_options.remarks`."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    for sentence in remarks(extra, os.environ):
        logger.warning("%s", sentence)


def log_sharing(vllm_config: "VllmConfig", options: Options) -> None:
    """Warn if requests are told to share prefills, but cannot."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    asked = SHARE_KEY in written(extra) and read_own_options(extra)[SHARE_KEY]
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
