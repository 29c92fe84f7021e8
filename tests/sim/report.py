# SPDX-License-Identifier: Apache-2.0
"""What a long run of the simulation counted: docs/generated/simulation.json and its table.

python -m tests.sim.report    after a run with ``SIM_OUT=build/sim``, as ``make sim`` does
"""

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.figures import read, replace, write

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "build"
FIGURES, PAGE = ROOT / "docs/generated/simulation.json", ROOT / "docs/reliability.md"
# What is counted -> names of the figures, in the order of the last column.
ROWS = {
    "programs": ("programs",),
    "scheduler steps, of them on devices": ("steps", "steps on devices"),
    "steps of pipelines": ("steps of pipelines",),
    "lookups that hit": ("hits",),
    "loads, tokens that hit": ("loads", "hit tokens"),
    "states stored, states restored": ("states saved", "states loaded"),
    "states written inside a chunk": ("checkpoints inside a chunk",),
    "lookups in which ranks named different boundaries": ("ranks disagree",),
    "pages loaded that another rank stored": ("pages of another rank",),
    "failed loads": ("failed loads",),
    "records rejected": ("records rejected",),
    "aborts: waiting, loading, running, preempted": (
        "aborted WAITING",
        "aborted WAITING_FOR_REMOTE_KVS",
        "aborted RUNNING",
        "aborted PREEMPTED",
    ),
    "preemptions, loads after one": ("preempted", "loads after preemption"),
    "accepted draft tokens": ("accepted drafts",),
    "resets of vLLM's cache, weights replaced, engine restarts": (
        "reset",
        "weights replaced",
        "restarts",
    ),
}


def table(parts: list[dict[str, Any]]) -> str:
    """Markdown of the sums; a run that saw a wrong byte has failed and gets no table."""
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    seeds = ", ".join(str(part["seed"]) for part in parts)
    lines = [f"| seeds | {seeds} |", "|---|---:|", "| **steps that saw a wrong byte** | **0** |"]
    for label, names in ROWS.items():
        lines.append(f"| {label} | {', '.join(f'{sums[name]:,}' for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    """Write both; the tests before it have passed."""
    files = sorted(PARTS.glob("sim.[0-9]"))
    parts = [read(file) for file in files]
    write(FIGURES, {"command": "make sim", "parts": parts})
    replace(PAGE, "simulation", table(parts))


if __name__ == "__main__":
    main()
