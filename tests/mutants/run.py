# SPDX-License-Identifier: Apache-2.0
"""Plants every defect in a copy of the tree and runs the fast tests on it: ``make mutants``."""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants.defect import Defect  # noqa: E402
from tests.mutants.defects import DEFECTS  # noqa: E402

ROOT = Path(__file__).parents[2]
# The test that catches most first; "-x" ends a run at the first failure.
SUITE = ("tests/sim", "tests/unit")
console = Console(width=120, highlight=False)


def copy_tree(target: Path) -> None:
    """What git tracks or would track, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def plant(tree: Path, defect: Defect) -> None:
    """Raises ValueError when the text is not there exactly once: mend the list then."""
    for file, old, new in defect.edits:
        text = (tree / file).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{defect.name}: {file} holds {text.count(old)} times {old!r}")
        (tree / file).write_text(text.replace(old, new))


def run_suite(
    defect: Defect | None, tests: list[str], steps: int, minutes: float
) -> tuple[str, str, float]:
    """(verdict, the test that found it, seconds)."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if defect is not None:
            plant(tree, defect)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--no-header", "--tb=line", "--show-capture=no", "-m", "not engine", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                # The copy comes before the installed package on the path.
                env={
                    **os.environ,
                    "PYTHONPATH": folder,
                    "SIM_STEPS": str(steps),
                    "SIM_SHRINK": "0",
                },
                capture_output=True,
                text=True,
                timeout=60 * minutes,
            )
        except subprocess.TimeoutExpired:
            return "killed", "the suite does not end", time.monotonic() - started
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    verdict = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    if verdict == "broken":
        console.print(done.stdout[-3000:], done.stderr[-2000:])
    where = found[0].split(" - ")[0].partition(" ")[2] if found else ""
    return verdict, where, time.monotonic() - started


def main(
    tests: Annotated[list[str] | None, typer.Argument(help="The fast tests by default.")] = None,
    only: Annotated[str, typer.Option(help="Part of a defect's name; all defects if empty.")] = "",
    skip: Annotated[int, typer.Option(help="Leave out so many of the first.")] = 0,
    steps: Annotated[int, typer.Option(help="Simulation steps per run.")] = 8_000,
    minutes: Annotated[float, typer.Option(help="Longest run of the suite.")] = 10,
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = os.cpu_count() or 1,
) -> None:
    """Plant each defect, run the fast tests, report killed or survived.

    Ends with 0 when the unchanged tree passes and every defect is killed.
    """
    chosen = [defect for defect in DEFECTS if only in defect.name][skip:]
    tests = tests or list(SUITE)
    verdict, where, seconds = run_suite(None, tests, steps, minutes)
    console.print(f"{'unchanged tree':<75} {verdict:<9} {seconds:4.0f} s {where}")
    if verdict != "survived":
        raise typer.Exit(2)
    with ThreadPoolExecutor(jobs) as executor:
        results = executor.map(lambda defect: run_suite(defect, tests, steps, minutes), chosen)
        verdicts = []
        for defect, (verdict, where, seconds) in zip(chosen, results):
            console.print(f"{defect.name:<75} {verdict:<9} {seconds:4.0f} s {where}")
            verdicts.append(verdict)
    killed = verdicts.count("killed")
    console.print(f"{killed} of {len(chosen)} killed")
    if killed < len(chosen):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
