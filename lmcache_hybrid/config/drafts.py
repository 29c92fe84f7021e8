# SPDX-License-Identifier: Apache-2.0
"""Reads how deep vLLM lets hits reach beside a drafter."""

from typing import TYPE_CHECKING

from lmcache_hybrid.core.groups import BESIDE_KEY, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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

    The sentence names what to change.
    """
    if not drops_block(config):
        return None
    causes = []
    if not hasattr(config, "num_hash_lookahead_tokens"):
        causes.append("this release of vLLM does so, with or without a connector (0.33 need not)")
    if getattr(config.speculative_config, "disable_lookahead_block_hashes", False):
        causes.append(
            "disable_lookahead_block_hashes is set in --speculative-config (leave it out)"
        )
    if config.num_prefill_lookahead_tokens > 1:
        causes.append("it has several MTP modules (num_speculative_tokens=1 runs one)")
    if config.cache_config.enable_mamba_shared_prefix_checkpoint:
        causes.append("--enable-mamba-shared-prefix-checkpoint is set (leave it out)")
    transfer = config.kv_transfer_config
    if transfer is not None and BESIDE_KEY in transfer.kv_connector_extra_config:
        causes.append("LMCacheConnectorV1 is in a MultiConnector (alone it need not)")
    because = f", because {' and '.join(causes)}" if causes else ""
    return f"Beside this drafter vLLM gives up the last block of each hit{because}."


def may_spoil_chunk_ends(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM may overwrite the state at the end of a chunk of exactly two blocks.

    With one draft token, the running state moves there into the block that drafts had. The worker
    still sees that block in the column before, too, and writes the state of the boundary before
    into it, where the model keeps states inside of chunks (``num_prefill_checkpoint_blocks``).
    Found by reading vLLM 0.32 and 0.33; not seen, because vLLM's CPU build keeps no such states.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group))
    return any(
        spec.num_speculative_blocks == 1 and spec.num_prefill_checkpoint_blocks > 0
        for spec in specs
        if isinstance(spec, MambaSpec)
    )
