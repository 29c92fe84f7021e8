# SPDX-License-Identifier: Apache-2.0
"""The table of what the identity of the weights costs, out of docs/generated/weights.json."""

from pathlib import Path

from benchmarks.figures import replace

SHOWN = 50e9  # bytes
_LABELS = {
    "plain read": "a plain read of the file",
    "load": "vLLM's safetensors loader without digest",
    "load and digest": "the same with digest: loaders that stream",
    "digest of loaded tensors": "on top of a load: loaders that fill tensors",
}


def fill(page: Path, figures: dict) -> None:
    """Write the table between its markers. Mutates the page."""
    replace(page, "weights", table(figures))


def table(figures: dict) -> str:
    """Rates, and seconds for a model of 50 GB at that rate."""
    lines = ["|  | GB/s, lowest to highest | 50 GB |", "| --- | ---: | ---: |"]
    for name, seconds in figures["seconds"].items():
        rates = [figures["bytes"] / seconds[key] / 1e9 for key in ("median", "highest", "lowest")]
        shown = SHOWN * seconds["median"] / figures["bytes"]
        lines.append(
            f"| {_LABELS[name]} | {rates[0]:.3g} ({rates[1]:.3g} to {rates[2]:.3g}) "
            f"| {shown:.0f} s |"
        )
    took = figures["seconds"]
    added = (took["load and digest"]["median"] - took["load"]["median"]) / figures["bytes"]
    lines.append(f"| **added where weights are streamed** |  | **{SHOWN * added:.0f} s** |")
    size = figures["bytes"] / 1e9
    return "\n".join(lines) + (
        f"\n\n`{figures['command']}`; {figures['date']}, {figures['machine']}; a file of "
        f"{size:.1f} GB in the page cache, one thread, scaled to 50 GB."
    )
