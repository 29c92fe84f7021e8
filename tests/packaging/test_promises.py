# SPDX-License-Identifier: Apache-2.0
"""Each promise of README.md, docs/reliability.md and docs/security.md has a test that runs."""

from pathlib import Path

import pytest

from tests.marks import COLLECTED
from tests.packaging.promises import Collected, Promise, collect, of_session, problems, read

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/promises.toml"
PAGES = ["README.md", "docs/reliability.md", "docs/security.md"]


def test_each_promise_has_a_test_that_make_test_runs(request: pytest.FixtureRequest) -> None:
    promises = read(TABLE)
    tests = of_session(request.session.stash[COLLECTED], promises) or collect(promises, ROOT)
    assert list(problems(promises, ROOT, tests)) == []


def test_the_table_is_of_these_pages() -> None:
    promises = read(TABLE)
    assert list(dict.fromkeys(each.page for each in promises)) == PAGES
    for page in PAGES:
        assert sum(each.page == page for each in promises) > 40


# Of the check itself

QUICK, SLOW, SOME, ALL_SLOW = (
    f"tests/test_it.py::test_{name}" for name in ("quick", "slow", "some", "all")
)


TESTS = """
import pytest
slow = pytest.mark.slow
def test_quick(): ...
@slow
def test_slow(): ...
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=slow)])
def test_some(x): ...
@pytest.mark.parametrize("x", [pytest.param(n, marks=slow) for n in (1, 2)])
def test_all(x): ...
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One page, and tests of which ``make test`` runs some."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "tests").mkdir()
    (folder / "page.md").write_text("# Page\n\nIt **never**\nforgets. It is blue.\n")
    (folder / "tests/test_it.py").write_text(TESTS)
    (folder / "tests/test_broken.py").write_text("import nothing_of_this_name\n")
    return folder


@pytest.fixture(scope="module")
def collected(checkout: Path) -> Collected:
    return collect([Promise("page.md", "It is blue.", (QUICK,))], checkout)


def test_a_session_of_all_named_files_need_not_collect_them_again() -> None:
    promises = [Promise("page.md", "It is blue.", (QUICK, SLOW))]
    assert of_session({}, promises) is of_session({"tests/other.py::test": False}, promises) is None
    assert of_session({QUICK: False, SLOW: True}, promises) == Collected(
        frozenset({QUICK, SLOW}), frozenset({QUICK})
    )


def table_of(checkout: Path, words: str, *tests: str) -> list[Promise]:
    named = ", ".join(f'"{test}"' for test in tests)
    table = checkout / "promises.toml"
    table.write_text(f"['page.md']\n'{words}' = [{named}]\n")
    return read(table)


def test_good_tables_pass(checkout: Path, collected: Collected) -> None:
    for tests in ((QUICK,), (SLOW, QUICK), (SOME,), (f"{SOME}[1]",), (f"{SOME}[2]", f"{SOME}[1]")):
        promises = table_of(checkout, "It **never** forgets.", *tests)
        assert list(problems(promises, checkout, collected)) == []


@pytest.mark.parametrize(
    "words, tests, problem",
    [
        ("It is blue.", (), "has no test"),
        ("It is red.", (QUICK,), "is not on the page"),
        ("It", (QUICK,), "is 2 times on the page"),
        ("It is blue.", (QUICK, "tests/test_it.py::test_quik"), "test_quik, which does not exist"),
        ("It is blue.", (QUICK, "tests/test_gone.py::test_quick"), "which does not exist"),
        ("It is blue.", (QUICK, f"{SOME}[3]"), "test_some[3], which does not exist"),
        ("It is blue.", ("tests/test_it.py",), "which does not exist"),
        ("It is blue.", (SLOW,), "only tests that `make test` leaves out"),
        ("It is blue.", (SLOW, ALL_SLOW, f"{SOME}[2]"), "only tests that `make test` leaves out"),
    ],
    ids=["no test", "words", "twice", "name", "file", "parameter", "a file", "slow", "all slow"],
)
def test_what_is_wrong_with_a_table_is_said(
    checkout: Path, collected: Collected, words: str, tests: tuple[str, ...], problem: str
) -> None:
    (said,) = problems(table_of(checkout, words, *tests), checkout, collected)
    assert said.startswith(f"page.md: {words!r} ") and problem in said


def test_what_was_run_may_be_run_by_test_all_alone(checkout: Path, collected: Collected) -> None:
    table = checkout / "promises.toml"
    for test, wrong in ((SLOW, 0), ("tests/test_it.py::test_gone", 1)):
        table.write_text(f"['page.md'.ran]\n'It is blue.' = ['{test}']\n")
        assert len(list(problems(read(table), checkout, collected))) == wrong


def test_a_file_that_cannot_be_collected_is_an_error(checkout: Path) -> None:
    broken = table_of(checkout, "It is blue.", "tests/test_broken.py::test_it")
    with pytest.raises(RuntimeError, match="nothing_of_this_name"):
        collect(broken, checkout)
