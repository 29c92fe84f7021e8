# SPDX-License-Identifier: Apache-2.0
"""Formats the results of :mod:`.run`, for people and for programs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

from rich.console import Console

from lmcache_hybrid import __version__
from lmcache_hybrid.config.redis_credentials import without_secrets
from lmcache_hybrid.tools.bench.run import ALONE, WITH, Load, Measured
from lmcache_hybrid.tools.bench.workload import NEW
from lmcache_hybrid.upstream import versions

# Columns of the longest bar.
BAR = 24


def print_table(console: Console, found: Sequence[Measured]) -> None:
    """Print a row for each round and server, with a bar of the time to the first token."""
    longest = max(each.first_token_ms for each in found)
    console.print(f"{'':15}{'first token':>12}{'requests/s':>12}{'from LMCache':>14}")
    for title in dict.fromkeys(each.round for each in found):
        console.print(title)
        for each in (row for row in found if row.round == title):
            bar = "█" * max(1, round(BAR * each.first_token_ms / longest))
            console.print(
                f"  {each.arm:13}{each.first_token_ms:>9,.0f} ms{each.requests_per_second:>12.2f}"
                f"{each.loaded:>14.0%}  {bar}"
            )
    for sentence in sentences(found):
        console.print(sentence)


def sentences(found: Sequence[Measured]) -> list[str]:
    """Summarize the figures in words, with warnings."""
    times = {(each.arm, each.round): each.first_token_ms for each in found}
    told = []
    for each in found:
        alone = times.get((ALONE, each.round))
        if each.arm != WITH or alone is None:
            continue
        ratio = each.first_token_ms / alone
        if each.round == NEW or (each.loaded > 0.5 and ratio > 1):
            told.append(f"{each.round}: first token {ratio:.2f} times as long.")
        elif each.loaded > 0.5:
            told.append(f"{each.round}: first token {1 / ratio:.1f} times as fast.")
    if failed := sum(each.failed for each in found):
        told.append(f"Loads of {failed:,} tokens failed: see lmcache-hybrid doctor, and the log.")
    if not any(each.loaded for each in found):
        told.append(
            "Nothing came from LMCache: lmcache-hybrid doctor MODEL -- FLAGS says why. A prompt of "
            "N tokens or fewer never hits."
        )
    return told


def without_tokens(flags: Iterable[str]) -> Iterator[str]:
    """Yield flags without the logins in them."""
    hides = False
    for flag in flags:
        name, joined, _ = flag.partition("=")
        if hides:
            yield "***"
            hides = False
        elif name.replace("_", "-") == "--hf-token":
            hides = not joined
            yield f"{name}=***" if joined else name
        else:
            yield without_secrets(flag)


def as_json(
    model: str, flags: Sequence[str], load: Load, found: Sequence[Measured]
) -> dict[str, Any]:
    """Return all results, with day and versions."""
    vllm, lmcache = versions.found()
    return {
        "date": date.today().isoformat(),
        "versions": {"lmcache-hybrid": __version__, "vllm": vllm, "lmcache": lmcache},
        "model": model,
        "flags": list(without_tokens(flags)),
        "load": asdict(load),
        "rounds": [asdict(each) for each in found],
    }
