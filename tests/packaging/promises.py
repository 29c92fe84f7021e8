# SPDX-License-Identifier: Apache-2.0
"""Checks a table of promises, such as ``tests/promises.toml``, against pages and tests."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COLLECT = Path(__file__).with_name("collected.py")


@dataclass(frozen=True)
class Promise:
    """Words of a page, and the tests that prove them.

    Attributes:
        page: path from the root of the checkout.
        words: as on the page, but for line breaks.
        tests: pytest's node ids, with parameters or without.
        ran: the words say what was run and not what the software does, so ``make test-all``
            may be the only one to run it.
    """

    page: str
    words: str
    tests: tuple[str, ...]
    ran: bool = False


@dataclass(frozen=True)
class Collected:
    """Node ids that pytest finds, and those of them that ``make test`` runs."""

    found: frozenset[str]
    run: frozenset[str]


def read(table: Path) -> list[Promise]:
    """All rows of a table, in order. Two of one page with the same words are no TOML."""
    found = []
    for page, lines in tomllib.loads(table.read_text()).items():
        ran = lines.pop("ran", {})
        found += [Promise(page, words, tuple(tests)) for words, tests in lines.items()]
        found += [Promise(page, words, tuple(tests), ran=True) for words, tests in ran.items()]
    return found


def files_named(promises: list[Promise]) -> set[str]:
    """The test files of all promises."""
    return {test.partition("::")[0] for each in promises for test in each.tests}


def of_session(collected: Mapping[str, bool], promises: list[Promise]) -> Collected | None:
    """What a session has collected itself; None if it is one of fewer files than are named."""
    if not files_named(promises) <= {test.partition("::")[0] for test in collected}:
        return None
    quick = frozenset(test for test, is_slow in collected.items() if not is_slow)
    return Collected(frozenset(collected), quick)


def collect(promises: list[Promise], root: Path) -> Collected:
    """Let pytest collect the files that are named, where they exist.

    Raises:
        RuntimeError: one of them cannot be collected.
    """
    named = sorted(files_named(promises))
    files = [file for file in named if (root / file).is_file()]
    if not files:
        return Collected(frozenset(), frozenset())
    command = [sys.executable, str(COLLECT), *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    said, _, last = done.stdout.strip().rpartition("\n")
    # pytest's 5: all that it found was deselected.
    if done.returncode not in (0, 5):
        raise RuntimeError(f"{said[-3000:]}\n{done.stderr[-3000:]}")
    collected = json.loads(last)
    return Collected(frozenset(collected["found"]), frozenset(collected["run"]))


def problems(promises: list[Promise], root: Path, tests: Collected) -> Iterator[str]:
    """What is wrong with a table, one sentence each."""
    pages = {each.page: " ".join((root / each.page).read_text().split()) for each in promises}
    found, run = with_functions(tests.found), with_functions(tests.run)
    for each in promises:
        promise = f"{each.page}: {each.words!r}"
        times = pages[each.page].count(" ".join(each.words.split()))
        if times == 0:
            yield f"{promise} is not on the page; change it here as it was changed there."
        if times > 1:
            yield f"{promise} is {times} times on the page; take more words of it."
        if not each.tests:
            yield f"{promise} has no test; name or write one."
        missing = [test for test in each.tests if test not in found]
        for test in missing:
            yield f"{promise} names {test}, which does not exist."
        left_out = not each.ran and run.isdisjoint(each.tests)
        if each.tests and not missing and left_out:
            yield f"{promise} has only tests that `make test` leaves out; name one that it runs."


def with_functions(node_ids: frozenset[str]) -> frozenset[str]:
    """Node ids with their parameters, and without them."""
    return node_ids | {node_id.partition("[")[0] for node_id in node_ids}
