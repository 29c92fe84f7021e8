# SPDX-License-Identifier: Apache-2.0
"""Plants every defect in a copy of the tree and runs the fast tests on it: ``make mutants``."""

import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.mutants import forks, table, tree
from tests.mutants.defect import Defect
from tests.mutants.defects import DEFECTS

SUITE = ("tests/unit", "tests/sim", "tests/repairs")
# It reads what is planted, so it would fail for every defect.
BLIND = "tests/unit/test_mutants.py"
# Files of the first two stages, which are those most likely to find a defect; files that take
# longer than so many seconds come with the rest.
STAGES = ((0, 6), (6, 30))
QUICK_SECONDS = 12.0
NEAR_SECONDS = 40.0  # those that import what was changed
PROGRESS = tree.ROOT / "build/mutants.json"
console = Console(width=140, highlight=False)


@dataclass
class Slot:
    """A copy of the tree in which one defect at a time is tested.

    Attributes:
        folder: holds the copy and what its tests write.
        defect: what is planted; None before the first and for the unchanged tree.
        left: lists of tests still to run on it.
    """

    folder: Path
    defect: Defect | None = None
    left: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0
    other: list[str] = field(default_factory=list)
    run: forks.Run | None = None
    plant: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self, defect: Defect | None, tests: list[list[str]], limit: float) -> None:
        """Plant ``defect`` and run the first list of tests."""
        self.defect, self.left = defect, tests
        self.seconds, self.other = 0.0, []
        self.plant.enter_context(tree.planted(self.folder / "tree", defect))
        self._next(limit)

    def _next(self, limit: float) -> None:
        scratch = self.folder / "scratch"
        self.run = forks.Run(self.folder / "tree", scratch, self.left.pop(0), limit)

    def poll(self, limit: float) -> tuple[forks.Outcome, dict] | None:
        """(the last run's outcome, the defect's entry of the table) once that is known."""
        outcome = self.run.poll() if self.run else None
        if outcome is None:
            return None
        self.seconds += outcome.seconds
        self.other += outcome.other
        if not outcome.found and self.left:
            self._next(limit)
            return None
        self.run = None
        self.plant.close()
        result: dict = {"test": outcome.found, "seconds": round(outcome.seconds, 1)}
        if not outcome.found:
            result["other"] = self.other
        return outcome, result


def files(tests: list[str]) -> list[str]:
    """The test files that ``tests`` names."""
    found = []
    for name in tests:
        inside = sorted((tree.ROOT / name).rglob("test_*.py"))
        found += [str(file.relative_to(tree.ROOT)) for file in inside] or [name]
    return [name for name in found if name != BLIND]


def check_unchanged(slot: Slot, tests: list[str], limit: float) -> dict[str, float]:
    """Run the tests on the tree as it is; a failure ends the program with 2.

    Returns:
        Seconds of each file's tests.
    """
    slot.start(None, [tests], limit)
    while (done := slot.poll(limit)) is None:
        time.sleep(0.1)
    outcome, _ = done
    if outcome.code:
        console.print(outcome.output[-4000:], markup=False)
        console.print("The unchanged tree fails: mend that first.")
        raise typer.Exit(2)
    console.print(f"The unchanged tree passes in {outcome.seconds:.0f} s.")
    return outcome.files


@dataclass
class Progress:
    """What a run has found so far, kept on disk.

    Attributes:
        tree: digest of the tree that it ran on.
        files: seconds of each file's tests on the unchanged tree; empty until that passed.
        results: entries of the table.
    """

    tree: str
    files: dict[str, float] = field(default_factory=dict)
    results: table.Results = field(default_factory=dict)

    @classmethod
    def load(cls) -> "Progress":
        """What a run on this very tree that was broken off has found."""
        digest = tree.digest()
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            progress = cls(**json.loads(PROGRESS.read_text()))
            if progress.tree == digest:
                return progress
        return cls(digest)

    def save(self) -> None:
        PROGRESS.parent.mkdir(exist_ok=True)
        PROGRESS.write_text(json.dumps(asdict(self), indent=1))


def plans(defect: Defect, tests: dict[str, float], known: table.Results) -> list[list[str]]:
    """Lists of tests to run one after the other: what found it last time, then all.

    In stages, because to collect all tests takes longer than to run the likely ones.
    """
    sources = {each.name: each.edits[0][0] for each in DEFECTS}
    before = known.get(defect.name, {}).get("test", "")
    here = before.partition("::")[0] in tests
    ordered = table.order(defect, tests, known, sources)
    near = table.near(defect, tests)
    longest = {file: NEAR_SECONDS if file in near else QUICK_SECONDS for file in tests}
    quick = [file for file in ordered if tests[file] <= longest[file]]
    stages = [quick[start:end] for start, end in STAGES]
    asked = {file for stage in stages for file in stage}
    stages.append([file for file in ordered if file not in asked])
    return [[before]] * bool(before and here) + [stage for stage in stages if stage]


def run_all(
    slots: list[Slot],
    queue: list[Defect],
    tests: dict[str, float],
    limit: float,
    progress: Progress,
) -> None:
    """Test every defect of the queue; adds to ``progress``."""
    known = {**table.load(), **progress.results}
    began, total = time.monotonic(), len(queue)
    busy: list[Slot] = []
    done = 0
    while queue or busy:
        while queue and len(busy) < len(slots):
            slot = next(slot for slot in slots if slot not in busy)
            slot.start(queue[0], plans(queue.pop(0), tests, known), limit)
            busy.append(slot)
        time.sleep(0.05)
        for slot in [*busy]:
            if (ended := slot.poll(limit)) is None:
                continue
            busy.remove(slot)
            assert slot.defect is not None
            outcome, result = ended
            progress.results[slot.defect.name] = known[slot.defect.name] = result
            progress.save()
            done += 1
            left = (time.monotonic() - began) / done * (total - done) / 60
            verdict = "found by" if result["test"] else "SURVIVED"
            console.print(
                f"{done:3}/{total} {slot.seconds:4.0f} s, {left:3.0f} min left  "
                f"{slot.defect.name}\n        {verdict} "
                f"{result['test'] or '; '.join(result['other'])}",
                markup=False,
            )
            if outcome.code == -1:
                console.print(outcome.output[-2000:], markup=False)


def main(
    tests: Annotated[list[str] | None, typer.Argument(help="The fast tests by default.")] = None,
    only: Annotated[str, typer.Option(help="Part of a defect's name; all defects if empty.")] = "",
    steps: Annotated[int, typer.Option(help="Simulation steps per run.")] = 8_000,
    minutes: Annotated[float, typer.Option(help="Longest run of the suite.")] = 15,
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = len(os.sched_getaffinity(0)),
    unchanged: Annotated[bool, typer.Option(help="Test the unchanged tree first.")] = True,
    fresh: Annotated[bool, typer.Option(help="Forget a run that was broken off.")] = False,
    lacking: Annotated[bool, typer.Option(help="Those without a find in the table.")] = False,
) -> None:
    """Plant each defect, run the fast tests, say which test finds it.

    A test finds a defect when it fails; a NameError, SyntaxError or ImportError, or something
    that does not end, is no find. The test that found it last time runs first. A run that was
    broken off goes on where it was, as long as code and tests are the same. A later one begins
    with the tests that found something (docs/generated/mutants-seen.json). A complete one
    writes docs/generated/mutants.json and its row in docs/reliability.md. With --lacking only
    new defects and those that survived are tested; their rows go into the table of that run.

    Ends with 0 when every defect is found, with 2 when the unchanged tree fails.
    """
    progress = Progress(tree.digest()) if fresh else Progress.load()
    results = progress.results
    told = table.complete() if lacking else {}
    chosen = [d for d in DEFECTS if only in d.name and not told.get(d.name, {}).get("test")]
    queue = [d for d in chosen if tests or not results.get(d.name, {}).get("test")]
    os.environ.update(SIM_STEPS=str(steps), SIM_SHRINK="0")
    suite = {name: progress.files.get(name, 0.0) for name in files(tests or list(SUITE))}
    forks.warm()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        slots = [Slot(Path(folder) / str(index)) for index in range(jobs)]
        for slot in slots:
            tree.copy_tree(slot.folder / "tree")
        if unchanged and not suite.keys() <= progress.files.keys():
            suite |= check_unchanged(slots[0], list(suite), 60 * minutes)
            progress.files |= suite
            progress.save()
        try:
            run_all(slots, queue, suite, 60 * minutes, progress)
        finally:
            table.note(results)
    lost = [defect.name for defect in chosen if not results[defect.name]["test"]]
    console.print(f"{len(chosen) - len(lost)} of {len(chosen)} found")
    if not only and not tests:
        rows = told | results
        table.write({defect.name: rows[defect.name] for defect in DEFECTS})
    if lost:
        console.print("Not found:", *lost, sep="\n  ", markup=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except SystemExit as end:
        # Triton's compiled parts write pages about themselves at a regular end.
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
