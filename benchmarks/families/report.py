# SPDX-License-Identifier: Apache-2.0
"""The table of what came of it, for docs/families/index.md."""

from pathlib import Path
from typing import Any

from benchmarks.families.plan import PLAN
from benchmarks.figures import markdown, replace
from lmcache_hybrid.tools.tiny_families import FAMILIES

RUNNERS = ("v1", "v2")
HEAD = ["Architecture", "Tiny model", "N", "State, attention groups", "V1", "V2", "Stand-ins"]


def table(figures: dict[str, Any]) -> str:
    """One row for each tiny model; below it the reasons, and architectures without one."""
    reasons: list[str] = []
    known = {a["name"]: a["module"] for a in figures["architectures"]}
    results = {(r["family"], r["runner"]): r for r in figures["results"]}
    rows = []
    for family in PLAN:
        name = FAMILIES[family].model_class
        runs = [results.get((family, runner)) for runner in RUNNERS]
        rows.append([f"`{name}`", f"`{family}`", *_shape(runs)])
        rows[-1] += [_cell(run, reasons) for run in runs]
        rows[-1].append(", ".join(sorted({s for run in runs if run for s in run["standins"]})))
    lines = [
        markdown(HEAD, rows, left=len(HEAD)),
        "",
        *(f"{number}. {text}" for number, text in enumerate(reasons, 1)),
    ]
    return "\n".join([*lines, "", _untried(known)])


def _untried(known: dict[str, str]) -> str:
    """Architectures without a tiny model, with one of those above that has their module."""
    tried = sorted({FAMILIES[family].model_class for family in PLAN})
    named = []
    for name, module in known.items():
        if name not in tried:
            like = [f" (module of `{t}`)" for t in tried if known.get(t) == module]
            named.append(f"`{name}`{like[0] if like else ''}")
    return f"No tiny model in this run: {', '.join(named)}."


def _shape(runs: list[dict[str, Any] | None]) -> list[str]:
    """N, and how many groups hold states and how many attention."""
    for run in runs:
        if run and run["starts"]:
            states = run["groups"].count("MambaSpec")
            return [str(run["block_size"]), f"{states}, {len(run['groups']) - states}"]
    return ["", ""]


def _cell(run: dict[str, Any] | None, reasons: list[str]) -> str:
    if run is None:
        return "not tried"
    if not run["starts"]:
        return f"vLLM alone does not start ({_number(run, reasons)})"
    if run["why"]:
        return f"**not served** ({_number(run, reasons)})"
    if not run["served"]:
        return "**fewer hits than vLLM**"
    verdict = "equal" if run["equal"] else "**differs**"
    sensitive = "" if run["wrong_shows"] else "; lost states do not show"
    return f"{verdict}, {run['hit_tokens']:,} of {run['asked_tokens']:,}{sensitive}"


def _number(run: dict[str, Any], reasons: list[str]) -> int:
    text = run["why"].replace("|", "/")
    if text not in reasons:
        reasons.append(text)
    return reasons.index(text) + 1


def fill(page: Path, figures: dict[str, Any]) -> None:
    """Put the table into ``page``."""
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    unknown = ", ".join(f"`{name}` ({why})" for name, why in figures["not_imported"].items())
    note = f"Could not be imported, so not known to be hybrid or not: {unknown}." if unknown else ""
    made = f"`python -m benchmarks.families`, {figures['date']}; {versions}."
    replace(page, "families", "\n\n".join(filter(None, [table(figures), note, made])))
