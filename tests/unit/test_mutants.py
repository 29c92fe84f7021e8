# SPDX-License-Identifier: Apache-2.0
import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run, table, tree
from tests.mutants.defect import one
from tests.mutants.defects import DEFECTS
from tests.mutants.watch import is_find

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_planted_defect_applies_to_this_tree(defect):
    """Its text is there exactly once, and what it leaves is Python."""
    for file, old, new in defect.edits:
        text = (ROOT / file).read_text()
        assert text.count(old) == 1, f"{file} holds {text.count(old)} times {old!r}"
        ast.parse(text.replace(old, new))


def test_no_planted_defect_uses_a_name_that_is_not_there(tmp_path):
    """It would be found by whatever runs that line, whether it looks at the result or not."""
    for index, defect in enumerate(DEFECTS):
        texts = {file: (ROOT / file).read_text() for file, _, _ in defect.edits}
        for file, old, new in defect.edits:
            texts[file] = texts[file].replace(old, new)
        for file, text in texts.items():
            target = tmp_path / f"{index:03}" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F82,E9"]
    checked = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_names_of_planted_defects_differ():
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))


def raised(function):
    try:
        function()
    except BaseException as error:
        return error


def wrapped(cause):
    try:
        raise cause
    except Exception as error:
        raise RuntimeError("failed") from error


@pytest.mark.parametrize(
    "raises, found",
    [
        (lambda: pytest.fail("wrong bytes"), True),
        (lambda: wrapped(KeyError("gone")), True),
        (lambda: {}["gone"], True),
        (lambda: pytest.fail("Timeout (>120.0s) from pytest-timeout."), False),
        (lambda: wrapped(NameError("name 'x' is not defined")), False),
        (lambda: compile("a b", "file", "exec"), False),
        (lambda: __import__("no_such_module"), False),
        (lambda: undefined, False),  # noqa: F821
    ],
)
def test_a_find_is_told_from_a_death_of_another_kind(raises, found):
    assert is_find(raised(raises)) == found


def test_a_defect_is_planted_and_taken_out_again(tmp_path):
    file = tmp_path / "code.py"
    file.write_text("limit = 3\n")
    before = file.stat()
    with tree.planted(tmp_path, one("another limit", "code.py", "= 3", "= 4")):
        assert file.read_text() == "limit = 4\n"
        # Same size: a compiled file of the unchanged text must not be taken for this one's.
        assert int(file.stat().st_mtime) > int(before.st_mtime)
    assert file.read_text() == "limit = 3\n" and file.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ValueError, match="holds 0 times"):
        with tree.planted(tmp_path, one("gone", "code.py", "= 5", "= 4")):
            pass


def test_the_test_that_found_a_like_defect_runs_early():
    known = {"a": {"test": "tests/unit/test_c.py::test_1"}, "b": {"test": ""}}
    files = {f"tests/unit/test_{name}.py": seconds for name, seconds in zip("abcd", (2, 1, 9, 3))}
    files["tests/unit/test_copies.py"] = 9
    ordered = table.order(one("new", "copies.py", "", ""), files, known, {"a": "copies.py"})
    assert [Path(file).stem[5:] for file in ordered] == ["copies", "c", "b", "a", "d"]


def test_tests_that_import_what_was_changed_run_first_however_long_they_take():
    defect = one("new", "lmcache_hybrid/storage/eviction_order.py", "", "")
    files = {"tests/unit/storage/test_arc.py": 30.0, "tests/unit/test_agree.py": 1.0}
    first, *_ = run.plans(defect, files, {})
    assert first == list(files)


def test_the_docs_say_what_the_last_complete_run_found():
    said = json.loads(table.TABLE.read_text())
    results = said["defects"]
    assert said["planted"] == len(results)
    assert said["found"] == sum(bool(each["test"]) for each in results.values())
    assert table.row(results) in table.PAGE.read_text()
