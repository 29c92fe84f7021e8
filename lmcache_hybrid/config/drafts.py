# SPDX-License-Identifier: Apache-2.0
"""Reads how deep vLLM lets hits reach beside a drafter."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def hash_look_ahead(config: "VllmConfig") -> int:
    """Return how many tokens behind a block its hash covers; 0 before vLLM 0.33."""
    tokens: int = getattr(config, "num_hash_lookahead_tokens", 0)
    return tokens


def drops_block(config: "VllmConfig") -> bool:
    """Whether vLLM gives up the last block of its hits (EAGLE, MTP): another token may follow."""
    speculative = config.speculative_config
    return (
        speculative is not None
        and speculative.use_eagle_block_drop()
        and not hash_look_ahead(config)
    )


def why_a_block_less(config: "VllmConfig") -> str | None:
    """Return why hits end a block earlier beside this drafter, in a sentence; None if they do not.

    The sentence names what to change, if anything.
    """
    if not drops_block(config):
        return None
    if not hasattr(config, "num_hash_lookahead_tokens"):
        return (
            "Beside EAGLE and MTP this vLLM gives up the last block of each hit, with or without a "
            "connector; vLLM 0.33 does not."
        )
    if getattr(config.speculative_config, "disable_lookahead_block_hashes", False):
        return (
            "disable_lookahead_block_hashes costs the last block of each hit; leave it out of "
            "--speculative-config."
        )
    if config.num_prefill_lookahead_tokens > 1:
        return (
            "With several MTP modules vLLM gives up the last block of each hit beside a connector; "
            "num_speculative_tokens=1 in --speculative-config hits a block deeper."
        )
    return (
        "Beside EAGLE and MTP vLLM gives up the last block of each hit in a MultiConnector; "
        "LMCacheConnectorV1 alone hits a block deeper."
    )
