# SPDX-License-Identifier: Apache-2.0
"""What a server's counts say of a run with new prefixes."""

from collections.abc import Mapping

from benchmarks.serve.client import Workload


def computed_again(counts: Mapping[str, float], workload: Workload, block_size: int) -> float:
    """How many prefixes were computed beside the first of each, up to the last boundary in it."""
    boundary = workload.prefix_tokens // block_size * block_size
    hits = counts["vllm_hit_tokens"] + counts["external_hit_tokens"]
    return (workload.prompts - workload.prefixes) - hits / boundary


def check(arm: str, counts: Mapping[str, float], workload: Workload) -> None:
    """The arm was what it is meant to be, and hits came from there. Raises AssertionError."""
    assert counts["recomputed_tokens"] == 0, f"{arm}: loads failed"
    external = counts["external_hit_tokens"]
    if arm in ("unlimited", "small"):
        assert external == 0, f"{arm} has no connector"
    else:
        assert external >= workload.prefix_tokens, f"LMCache brought {external} tokens to {arm}"
    if arm == "apart":
        assert counts["shared_prefills"] == 0, "a request waited for a prefix of another"
    if arm == "unlimited":
        assert counts["vllm_hit_tokens"] >= workload.prefix_tokens, "vLLM's own cache hit nothing"
