# SPDX-License-Identifier: Apache-2.0
"""Tells how deep vLLM lets hits reach beside a drafter. ``lmcache-hybrid plan`` has no vLLM."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# For which methods each release gives up the end of a hit; vLLM: ``use_eagle_block_drop``.
_DROPPING = {
    "0.32": ("eagle", "eagle3", "mtp", "dflash", "dspark"),
    "0.33": ("eagle", "eagle3", "mtp"),
}
_OLD_RELEASE = "this release of vLLM does so, with or without a connector (0.33 need not)"
_OLD_HASHES = "disable_lookahead_block_hashes is set in --speculative-config (leave it out)"

_NOTHING_LOST = "Hits lose nothing to this drafter."
_SEVERAL_MODULES = (
    "If it has several MTP modules (num_nextn_predict_layers above 1), a hit ends where at least "
    "{} tokens of its prompt follow."
)


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


def why_hits_are_shorter(config: "VllmConfig", unit: int) -> str | None:
    """Return what hits lose beside this drafter and why, in a sentence; None if nothing.

    The sentence names what to change.

    Args:
        unit: tokens between two boundaries where a hit may end, N or U.
    """
    if not drops_block(config):
        return None
    causes = []
    if not hasattr(config, "num_hash_lookahead_tokens"):
        causes.append(_OLD_RELEASE)
    if getattr(config.speculative_config, "disable_lookahead_block_hashes", False):
        causes.append(_OLD_HASHES)
    if config.cache_config.enable_mamba_shared_prefix_checkpoint:
        causes.append("--enable-mamba-shared-prefix-checkpoint is set (leave it out)")
    transfer = config.kv_transfer_config
    if transfer is not None and BESIDE_KEY in transfer.kv_connector_extra_config:
        causes.append("LMCacheConnectorV1 is in a MultiConnector (alone it need not)")
    return _lost(unit, causes)


def planned(speculative: Mapping[str, Any], unit: int) -> dict[str, str]:
    """Return what hits lose beside a drafter and why, in sentences, by release of vLLM.

    For ``LMCacheConnectorV1`` alone.

    Args:
        speculative: vLLM's ``--speculative-config``.
        unit: as in :func:`why_hits_are_shorter`.

    Raises:
        ConfigError: it does not say what drafts, or not how many tokens in a number.
    """
    method = speculative.get("method")
    if not isinstance(method, str):
        raise ConfigError(
            "--speculative-config names no method, which vLLM would find out from the drafter's "
            'files; add "method", such as "mtp" or "eagle".'
        )
    method = "mtp" if method.endswith("_mtp") else method  # names that vLLM still takes
    drafted = speculative.get("num_speculative_tokens")
    if drafted is not None and type(drafted) is not int:
        raise ConfigError(f"num_speculative_tokens={drafted!r} is not a number; write 1 or more.")
    kept = speculative.get("disable_eagle_block_drop", False)
    said = {}
    for release, methods in _DROPPING.items():
        causes = [_OLD_RELEASE] if release == "0.32" else []
        if release != "0.32" and speculative.get("disable_lookahead_block_hashes"):
            causes.append(_OLD_HASHES)
        if method not in methods or kept:
            said[release] = _NOTHING_LOST
        elif causes:
            said[release] = f"{_lost(unit, causes)} {too_short(unit)}"
        elif method == "mtp" and drafted != 1:
            ahead = drafted or "num_speculative_tokens"
            said[release] = f"{_NOTHING_LOST} {_SEVERAL_MODULES.format(ahead)}"
        else:
            said[release] = _NOTHING_LOST
    return said


def too_short(unit: int) -> str:
    """Return a sentence on the prompts that hit nothing, where the end of a hit is given up."""
    return f"A prompt of fewer than {2 * unit:,} tokens leaves no state for its repeat."


def _lost(unit: int, causes: Sequence[str]) -> str:
    because = f", because {' and '.join(causes)}" if causes else ""
    return f"Beside this drafter vLLM gives up the last {unit:,} tokens of each hit{because}."
