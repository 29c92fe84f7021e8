# SPDX-License-Identifier: Apache-2.0
"""Lets the hits of a hybrid model reach as deep beside a drafter as without a connector."""

import functools
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig

from lmcache_hybrid.core.groups import BESIDE_KEY
from vllm_patch.configuration import CONNECTOR


def install() -> None:
    """Apply the repair. Mutates ``VllmConfig``; before vLLM 0.33 there is nothing to do."""
    if hasattr(VllmConfig, "num_hash_lookahead_tokens"):
        let_hashes_look_ahead()


class _WithoutConnector:
    """A configuration, but for its connector."""

    kv_transfer_config = None

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _is_alone(transfer: KVTransferConfig | None) -> bool:
    """Whether ours is the engine's connector; not in a MultiConnector, where others may be, too."""
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return False
    return BESIDE_KEY not in transfer.kv_connector_extra_config


def let_hashes_look_ahead() -> None:
    """A hybrid model must not lose a block of each hit to its drafter.

    What EAGLE and MTP keep of a token depends on the next one, so a hit must not end where
    another token follows. vLLM's block hashes cover the next token for that; beside a connector
    they do not, and each hit gives up its last block. Connectors may take a hash for granted
    wherever a block is full; this one does not.

    vLLM's guard stays with ``--enable-mamba-shared-prefix-checkpoint``: vLLM expects a hash
    wherever a connector lets a step end.

    Bug: ``VllmConfig.num_hash_lookahead_tokens`` is 0 beside any connector.
    Symptom: with EAGLE or MTP, vLLM's own hits and this package's end a block earlier than those
    of the same engine without a connector.
    Seen in: vLLM 0.33.0.
    Remove when: ``VllmConfig.num_hash_lookahead_tokens`` asks the connector.
    """
    original: Any = vars(VllmConfig)["num_hash_lookahead_tokens"]

    @functools.wraps(original.fget)
    def num_hash_lookahead_tokens(self: VllmConfig) -> int:
        # Workers ask too, before they know KV cache groups.
        model = self.model_config
        if _is_alone(self.kv_transfer_config) and model is not None and model.is_hybrid:
            covered: int = original.fget(_WithoutConnector(self))
            junctions = self.cache_config.enable_mamba_shared_prefix_checkpoint
            return 0 if junctions else covered
        return original.fget(self)

    patched: Any = VllmConfig
    patched.num_hash_lookahead_tokens = property(num_hash_lookahead_tokens)
