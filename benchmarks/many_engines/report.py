# SPDX-License-Identifier: Apache-2.0
"""The table of many engines on one store, for the terminal and the page."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import figures

TITLES = {"redis": "Redis", "fs": "fs://", "s3": "S3"}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed; NaN of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def is_wrong(run: dict[str, Any]) -> bool:
    """Whether a record was lost, although the store evicted none, or damaged."""
    return bool(run["damaged"] or (run["lost"] and not run["evicted"]))


def rows(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The head, then a row for each figure; a column for each store."""
    found = [["", *(TITLES[kind] for kind in runs)]]

    def row(name: str, text: Any) -> None:
        found.append([name, *(text(run) for run in runs.values())])

    row("engines", lambda run: f"{run['engines']:,}")
    row("seconds", lambda run: f"{run['seconds']:,.0f}")
    row("requests a second: asked", lambda run: f"{run['engines'] * run['asked_requests']:,.0f}")
    row("made", lambda run: f"{run['requests']:,.1f}")
    row("lookups a second", lambda run: f"{run['lookups']:,.1f}")
    for name, what in (("p50", "half are faster"), ("p99", "99 %"), ("most", "slowest")):
        row(f"a lookup, ms: {what}", lambda run, name=name: f"{run['lookup_ms'][name]:,.1f}")
    for name in ("read", "written"):
        row(f"{name}, MB a second", lambda run, name=name: f"{run[name] / 1e6:,.1f}")
        row("of each engine", lambda run, name=name: f"{run[name] / 1e6 / run['engines']:,.3f}")
    row("connections", lambda run: "not counted" if run["connections"] is None else _whole(run))
    row("prompts stored", lambda run: f"{run['counts'].get('stored', 0):,}")
    row("prompts found and equal", lambda run: f"{run['counts'].get('hits', 0):,}")
    row("and at the end", lambda run: f"{run['checked']:,}")
    row("loads that found it a second time", lambda run: _count(run, "failed_loads"))
    row("prompts not stored at once", lambda run: _count(run, "failed_writes"))
    row("evicted", lambda run: f"{run['evicted']:,}")
    row("**lost**", lambda run: f"**{run['lost']:,}**")
    row("**damaged**", lambda run: f"**{run['damaged']:,}**")
    return found


def _whole(run: dict[str, Any]) -> str:
    return f"{run['connections']:,}"


def _count(run: dict[str, Any], name: str) -> str:
    return f"{run['counts'].get(name, 0):,}"


def markdown(runs: dict[str, dict[str, Any]]) -> str:
    head, *others = rows(runs)
    commands = dict.fromkeys(
        f"`{run['command']}`; {run['date']}, {run['machine']}." for run in runs.values()
    )
    return "\n\n".join([figures.markdown(head, others), *commands])


def table(runs: dict[str, dict[str, Any]]) -> Table:
    head, *others = rows(runs)
    made = Table(title="Engines on one store")
    for at, name in enumerate(head):
        made.add_column(name, justify="right" if at else "left")
    for line in others:
        made.add_row(*(text.replace("*", "") for text in line))
    return made
