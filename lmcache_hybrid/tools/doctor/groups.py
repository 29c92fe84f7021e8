# SPDX-License-Identifier: Apache-2.0
"""Checks what the model's groups mean for hits."""

from collections.abc import Iterator

from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, ok, skipped, warning


def check_model(context: Context) -> Iterator[Finding]:
    """Groups, N, bytes per block and per state."""
    model = context.model
    if model is None:
        if context.named is None:
            yield skipped("model", "No MODEL was named.", "Name it: lmcache-hybrid doctor MODEL.")
        return
    if not model.served:
        yield warning(
            "model",
            "It has no recurrent layers (nor windows with HMA on), so it goes to LMCache's own "
            "adapter, as without this package.",
        )
        return
    windows = f", windows {model.windows}" if model.windows else ""
    yield ok("groups", f"Attention groups {model.attention}{windows}, state groups {model.states}.")
    yield ok(
        "block size",
        f"N is {model.block_size} tokens: prompts longer than that hit, at multiples of it.",
    )
    sizes = [f"{model.attention_bytes:,} bytes of attention"]
    if model.windows:
        sizes.append(f"{model.window_bytes:,} of windows")
    yield ok(
        "bytes",
        f"Without tensor parallelism a block has {' and '.join(sizes)}, the states at a boundary "
        f"{model.state_bytes:,} bytes.",
    )
