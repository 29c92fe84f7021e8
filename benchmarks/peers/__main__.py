# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.peers: other connectors beside this package, on one machine, in turn.

Builds an environment for each release of LMCache in .peers/, measures its arms by its own
interpreter, and writes the table of docs/connectors.md from the file. An arm that is measured again
replaces only itself.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.figures import page_of, read
from benchmarks.peers import report
from benchmarks.peers.arms import ARMS, BASE, RELEASES, VLLM
from benchmarks.serve.options import Rounds, chosen

ROOT = Path(__file__).parents[2]
ALL = ",".join(name for name in ARMS if name != BASE)
PARTS = ("probe", "speed", "store")
# make hands its own variables on, and the environment that this runs in is none of its.
HANDED_ON = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "VLLM", "LMCACHE", "VENV")


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/peers.json"),
    arms: Annotated[str, typer.Option(help="Which, separated by commas.")] = ALL,
    parts: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(PARTS),
    rounds: Rounds = 5,
    render_only: Annotated[bool, typer.Option(help="Only write the page's table.")] = False,
) -> None:
    """Compare connectors: answers, hits, first tokens, throughput, and what outlives what.

    vLLM alone is measured in each environment, beside the arms of that environment.
    """
    if not render_only:
        asked = chosen(arms, tuple(ALL.split(",")), "arm")
        chosen(parts, PARTS, "part")
        command = " ".join(["python -m benchmarks.peers", *sys.argv[1:]])
        for release in RELEASES:
            these = [name for name in asked if ARMS[name].release == release]
            if these:
                python = environment(release)
                measure = [python, "-m", "benchmarks.peers.measure", "--out", out.absolute()]
                measure += ["--arms", ",".join(these), "--parts", parts]
                measure += ["--rounds", str(rounds), "--command", command]
                subprocess.run(measure, cwd=ROOT, check=True)
    figures = read(out)
    page = page_of(out, "connectors.md")
    if page.exists():
        report.fill(page, figures)
    for table in report.tables(figures):
        Console().print(table)


def environment(release: str) -> Path:
    """The interpreter of .peers/RELEASE, made by the Makefile as .venv is, once."""
    venv = Path(".peers") / release
    make = ["make", "venv", f"VENV={venv}", f"PYTHON={Path(sys.executable).resolve()}"]
    make += [f"VLLM={VLLM}", f"LMCACHE={release}"]
    kept = {name: value for name, value in os.environ.items() if name not in HANDED_ON}
    subprocess.run(make, cwd=ROOT, env=kept, check=True)
    return ROOT / venv / "bin/python"


if __name__ == "__main__":
    typer.run(main)
