# SPDX-License-Identifier: Apache-2.0
"""The options of an engine, LMCache's and this package's, as the scheduler side needs them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.config.folders import FolderLimits, read_limits
from lmcache_hybrid.config.own_options import (
    CHECKPOINT_KEY,
    CHUNK_ENDS,
    KEEP_SHARE_KEY,
    KEY_FILE_KEY,
    LOAD_FAILURE_KEY,
    LOAD_LIMIT_KEY,
    POLICIES,
    POLICY_KEY,
    SHARE_KEY,
    names_of,
    problems,
    read_own_options,
    remarks,
    sound_own_options,
)
from lmcache_hybrid.core.digests import PLAIN, Digester, KeyedDigester
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY
from lmcache_hybrid.core.secret_files import read_key

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
        keep_share: of the bytes of RAM or disk that records kept by requests may take, 0 for none;
            for the part of one salt see :data:`.storage.keep_shares.OF_SALT`.
        names: see :func:`.own_options.names_of`.
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
    keep_share: float = 0.25
    names: Mapping[str, str] = field(default_factory=dict, compare=False)


def read_options(
    vllm_config: "VllmConfig", config: "LMCacheEngineConfig", block_size: int | None = None
) -> Options:
    """Read the options.

    Args:
        block_size: N in tokens; None skips the checks that need it.

    Raises:
        ConfigError: an option of ours is unknown or has a bad value, see
            :func:`.own_options.problems`; or a sentence for each of the others: a negative
            ``min_retrieve_tokens``, a limit without ``fs://``, an unusable key file, and lengths
            that do not fit N.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    wrong = list(problems(extra, os.environ))
    own, names = sound_own_options(extra), names_of(extra)
    shortest = config.min_retrieve_tokens
    if shortest is None or shortest < 0:
        wrong.append(
            f"LMCache option min_retrieve_tokens={shortest} is not a number of tokens; write one, "
            "or 0."
        )
    digester: Digester = PLAIN
    limits = FolderLimits()
    try:
        if (key_file := own[KEY_FILE_KEY]) is not None:
            digester = KeyedDigester(read_key(names[KEY_FILE_KEY], key_file))
    except ConfigError as error:
        wrong += error.args
    try:
        limits = read_limits(own, names, config)
    except ConfigError as error:
        wrong += error.args
    if own[POLICY_KEY] == "faster" and own[LOAD_FAILURE_KEY] == "fail":
        wrong.append(
            f"{names[POLICY_KEY]}='faster' gives up loads that are slower than computing, and "
            f"{names[LOAD_FAILURE_KEY]}='fail' would end their requests with an error; set the "
            "second to recompute, or the first to always."
        )
    alone = not transfer.get_from_extra_config(BESIDE_KEY, False)
    checkpoint = own[CHECKPOINT_KEY]
    chunk_ends = checkpoint == CHUNK_ENDS
    options = Options(
        save=transfer.kv_role != "kv_consumer" and not os.environ.get("LMCACHE_FORCE_SKIP_SAVE"),
        priority_limit=config.priority_limit,
        min_retrieve_tokens=shortest,
        max_tokens_per_load=own[LOAD_LIMIT_KEY],
        checkpoint_tokens=0 if chunk_ends else checkpoint,
        chunk_ends=chunk_ends,
        save_decode=bool(config.save_decode_cache),
        digester=digester,
        load_policy=own[POLICY_KEY],
        share_prefills=own[SHARE_KEY] and alone,
        alone=alone,
        events=bool(config.enable_kv_events) and _publishes(vllm_config),
        folder_limits=limits,
        keep_share=own[KEEP_SHARE_KEY],
        names=names,
    )
    if block_size is not None:
        wrong += _bad_lengths(options, block_size)
    if wrong:
        raise ConfigError(*wrong)
    return options


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
    asked = SHARE_KEY in options.names and read_own_options(extra)[SHARE_KEY]
    if asked and not options.alone:
        logger.warning(
            "%s=true does nothing beside other connectors of a MultiConnector: each request "
            "computes what it does not find.",
            options.names[SHARE_KEY],
        )


def log_events(vllm_config: "VllmConfig", config: "LMCacheEngineConfig") -> None:
    """Log if only one of vLLM and LMCache publishes KV cache events."""
    publishes = _publishes(vllm_config)
    if publishes and not config.enable_kv_events:
        logger.info(
            "vLLM publishes KV cache events of its own cache only; set LMCache's enable_kv_events "
            "to true for those of what LMCache stores."
        )
    inside = BESIDE_KEY in vllm_config.kv_transfer_config.kv_connector_extra_config
    for sentence in without_events(config, publishes, inside):
        logger.warning("%s", sentence)


def without_events(config: "LMCacheEngineConfig", publishes: bool, inside: bool) -> Iterator[str]:
    """Yield a sentence if LMCache is told to publish KV cache events, and cannot.

    Args:
        publishes: whether vLLM publishes events.
        inside: whether the connector is in a MultiConnector.
    """
    if config.enable_kv_events and not publishes:
        yield (
            "LMCache option enable_kv_events=True has no effect, because vLLM publishes no events; "
            """add --kv-events-config '{"enable_kv_cache_events": true}', or set it to false."""
        )
    elif config.enable_kv_events and inside:
        yield (
            "LMCache option enable_kv_events=True has no effect in a MultiConnector, where vLLM "
            "does not ask ranks what they hold; use LMCacheConnectorV1 alone, or set it to false."
        )


def _bad_lengths(options: Options, block_size: int) -> Iterator[str]:
    """Yield a sentence for each length in tokens that does not fit this model's blocks.

    States exist at block boundaries only, and no load is less than a block.

    Args:
        block_size: N in tokens.
    """
    limit = options.max_tokens_per_load
    if 0 < limit < block_size:
        yield (
            f"{options.names[LOAD_LIMIT_KEY]}={limit} is less than this model's block size "
            f"{block_size}, so nothing could be loaded; set it to {block_size} or more, or to 0 "
            "for no limit."
        )
    tokens = options.checkpoint_tokens
    if tokens < 0 or tokens % block_size:
        nearest = max(1, round(tokens / block_size)) * block_size
        yield (
            f"{options.names[CHECKPOINT_KEY]}={tokens} is not a multiple of this model's block "
            f"size {block_size}; set it to {nearest}, to 0 for no checkpoints, or remove it for "
            "one at each chunk's end."
        )
