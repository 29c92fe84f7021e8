# SPDX-License-Identifier: Apache-2.0
"""Which test finds which planted defect: ``docs/generated/mutants.json``, its row in the docs."""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants.defect import Defect

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/generated/mutants.json"
PAGE = ROOT / "docs/reliability.md"
# Tests by name of the defect that they found in runs that were broken off or had no need of all.
SEEN = TABLE.with_stem("mutants-seen")
# Defects before and after one in the list that are likely to be found by the same tests.
BESIDE = 4
ROW = re.compile(r"^\| \[Planted defects\].*$", re.M)
COMMAND = "make mutants"

# By name of the defect: {"test": ID or "", "seconds": of the run that found it}, and what
# failed in another way.
Results = dict[str, dict[str, Any]]


def load() -> Results:
    """What the last complete run found, and those since."""
    found = complete()
    seen = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    return found | {name: {"test": test} for name, test in seen.items()}


def complete() -> Results:
    """What the last complete run found."""
    found: Results = json.loads(TABLE.read_text())["defects"] if TABLE.exists() else {}
    return found


def note(results: Results) -> None:
    """Keep what a run has found so far, so that the next one begins with these tests."""
    seen = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    seen |= {name: each["test"] for name, each in results.items() if each["test"]}
    SEEN.write_text(json.dumps(dict(sorted(seen.items())), indent=1) + "\n")


def row(results: Results) -> str:
    """The line of docs/reliability.md."""
    found = sum(bool(each["test"]) for each in results.values())
    said = (
        f"{found} of {len(results)} that were run are found by a test"
        if results
        else "no complete run yet"
    )
    return (
        "| [Planted defects](../tests/mutants) | the fast tests | tests that cannot fail "
        f"| {said}, see [mutants.json](generated/mutants.json) |"
    )


def write(results: Results) -> None:
    """Write the table and the row."""
    table = {
        "command": COMMAND,
        "planted": len(results),
        "found": sum(bool(each["test"]) for each in results.values()),
        "defects": results,
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    SEEN.write_text("{}\n")
    PAGE.write_text(ROW.sub(lambda _: row(results), PAGE.read_text()))


def order(
    defect: Defect, files: dict[str, float], known: Results, sources: dict[str, str]
) -> list[str]:
    """Test files, first those that are likely to find the defect, quick ones before others.

    Args:
        defect: what was planted.
        files: all test files and how many seconds they take.
        known: what was found before.
        sources: by name of a defect, the file that it changes; in the order of the list.
    """
    names = list(sources)
    place = names.index(defect.name) if defect.name in sources else 0
    beside = set(names[max(0, place - BESIDE) : place + BESIDE + 1])
    changed = {file for file, _, _ in defect.edits}
    found: Counter[str] = Counter()
    for name, each in known.items():
        if each["test"]:
            likely = (sources.get(name) in changed) + BESIDE * (name in beside)
            found[each["test"].partition("::")[0]] += likely
    beside_it = near(defect, files)

    def rank(file: str) -> tuple[bool, int, bool, float]:
        # The simulation sees most of what goes wrong in serving.
        return file not in beside_it, -found[file], not file.startswith("tests/sim/"), files[file]

    return sorted(files, key=rank)


@functools.cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""


def near(defect: Defect, files: Iterable[str]) -> set[str]:
    """Those test files that have the name of a file that the defect changes, or import it."""
    found = set()
    for changed in {Path(file.removesuffix("/__init__.py")) for file, _, _ in defect.edits}:
        package = re.escape(".".join(changed.parent.parts))
        module = rf"\b({package}\.{changed.stem}|{package} import \(?[^()]*\b{changed.stem})\b"
        for file in files:
            if changed.stem in Path(file).stem or re.search(module, _text(file)):
                found.add(file)
    return found
