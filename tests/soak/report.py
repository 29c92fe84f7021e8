# SPDX-License-Identifier: Apache-2.0
"""The tables of the last long runs in docs/reliability.md and docs/events.md.

    python -m tests.soak.report    as ``make soak`` and ``make soak-events`` do at their end

From docs/generated/soak.json and docs/generated/events.json.
"""

from pathlib import Path
from typing import Any

from benchmarks.figures import read, replace

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = ROOT / "docs/generated/soak.json", ROOT / "docs/reliability.md"
EVENTS, EVENTS_PAGE = ROOT / "docs/generated/events.json", ROOT / "docs/events.md"
# What is counted -> names of the counts, in the order of the last column.
ROWS = {
    "answers": ("asks",),
    "hits compared bit for bit, tokens loaded": ("compared: hit", "hit tokens"),
    "misses and failed loads compared bit for bit": ("compared: miss", "compared: failed load"),
    "failed loads, rejected records": ("failed_loads", "rejected_records"),
    "failed writes, skipped saves": ("failed_writes", "skipped_saves"),
    "requests aborted in bursts": ("aborted",),
    "engine starts, kills": ("engine starts", "engine kills"),
}


def table(run: dict[str, Any]) -> str:
    """Markdown of one run."""
    counts = run["counts"]
    grown = [
        life["growth"] for phase in run["phases"] for life in phase["lives"] if "growth" in life
    ]
    lines = [
        "| | |",
        "|---|---:|",
        f"| minutes of the stream, seed | {run['minutes']:.0f}, {run['seed']} |",
        f"| **wrong answers** | **{run['wrong_answers']}** |",
    ]
    for label, names in ROWS.items():
        lines.append(f"| {label} | {', '.join(f'{counts.get(name, 0):,}' for name in names)} |")
    lines += [
        f"| faults injected | {run['faults']['total']} |",
        "| claims, pins, buffers, blocks left at the end of a phase | 0 |",
        f"| growth of an engine's memory, from its first to its last third, MB | "
        f"{min(grown)} to {max(grown)} |",
    ]
    return "\n".join(lines)


def events_table(run: dict[str, Any]) -> str:
    """Markdown of one run of ``kv_events.py``."""
    counts, lives = run["counts"], run["lives"]
    kills = sum(life["killed"] for life in lives)
    rows = {
        "asks, of them hits": f"{counts['asks']:,}, {counts['hits']:,}",
        "restarts, of them after a `kill -9`": f"{len(lives) - 1}, {kills}",
        "**foreseen exactly**": f"**{counts['right'] / counts['asks']:.1%}**",
        "more foreseen than hit": f"{counts['too_much']}",
        "less foreseen than hit": f"{counts['too_little']}",
        "of these, hits that no prompt had named since the start": f"{counts['not_named']}",
        "asks after a second without events, of them with more foreseen than hit": (
            f"{counts['settled']}, {counts['settled_too_much']}"
        ),
        "records withdrawn from RAM, from disk": (
            f"{counts['withdrawn: CPU']:,}, {counts['withdrawn: STORAGE']:,}"
        ),
    }
    return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {n} |" for name, n in rows.items())])


def main() -> None:
    """Write them; a run that left something behind has failed."""
    replace(PAGE, "soak", table(read(FIGURES)))
    replace(EVENTS_PAGE, "soak", events_table(read(EVENTS)))


if __name__ == "__main__":
    main()
