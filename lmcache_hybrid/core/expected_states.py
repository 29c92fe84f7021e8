# SPDX-License-Identifier: Apache-2.0
"""Lists where a prefill leaves states. Imports no vLLM: ``lmcache-hybrid plan`` runs without."""


def chunk_tokens(step_tokens: int, block_size: int) -> int:
    """Return the tokens per chunk of a lone prefill: each chunk ends at a multiple of N."""
    return max(1, step_tokens // block_size) * block_size


def boundaries(
    context: int, block_size: int, interval: int, unit: int = 0, start: int = 0
) -> list[int]:
    """List where a prefill of ``context`` tokens leaves states, in tokens, in order.

    The last boundary before its last token, every ``interval`` tokens from ``start`` up to there,
    and the last multiple of ``unit``.
    """
    end = (context - 1) // block_size * block_size
    states = set(range(start + interval, end + 1, interval)) if interval else set()
    inner = (context - 1) // unit * unit if unit else 0
    return sorted((states | {end, inner}) - {0})
