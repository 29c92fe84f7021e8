# SPDX-License-Identifier: Apache-2.0
"""The table of the last long run in docs/reliability.md, from docs/generated/soak.json.

python -m tests.soak.report    as ``make soak`` does after a run that did not fail
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.reuse.report import replace

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = ROOT / "docs/generated/soak.json", ROOT / "docs/reliability.md"
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


def main() -> None:
    """Write it; a run that left something behind has failed."""
    replace(PAGE, "soak", table(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main()
