# SPDX-License-Identifier: Apache-2.0
"""Each repair has a test that says when to delete it, and what such a test says."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_hybrid import local_disk
from vllm_patch import compat

from . import test_disk, test_vllm  # noqa: F401  (fills TESTED)
from .repair import TESTED, name_of, verdict, where

ROOT = Path(__file__).parents[2]
DESIGN = (ROOT / "docs/design.md").read_text()


def documented() -> Iterator[tuple[str, str]]:
    """(name, docstring) of what says "Remove when"."""
    for package in ("vllm_patch", "lmcache_hybrid"):
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            yield from documented_in(ast.parse(file.read_text()), module)


def documented_in(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(child) or ""
            if "Remove when:" in text:
                yield f"{name}.{child.name}", text
            yield from documented_in(child, f"{name}.{child.name}")


def installed() -> set[str]:
    """What ``compat.install`` calls of its own module."""
    calls = ast.walk(ast.parse(inspect.getsource(compat.install)))
    names = {
        node.func.id for node in calls if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }
    return {name_of(getattr(compat, name)) for name in names}


def test_every_repair_of_vllm_says_when_it_can_go():
    repairs = {name for name, _ in documented() if name.startswith(compat.__name__)}
    assert installed() == repairs and len(repairs) > 5


def test_every_repair_has_a_test_that_says_delete_me():
    documented_ones = {name for name, _ in documented() if name.startswith("vllm_patch.")}
    assert documented_ones | overrides() <= TESTED


# What LocalDisk overrides for features of its own.
EXTENDED = {"insert_key", "close"}


def overrides() -> set[str]:
    """Methods with which we replace LMCache's own."""
    return {
        name_of(method)
        for ours in (local_disk.LocalDisk, local_disk.SteadyLFU)
        for name, method in vars(ours).items()
        if inspect.isfunction(method)
        and any(name in vars(theirs) for theirs in ours.__bases__)
        and name not in EXTENDED
    }


def test_what_extends_lmcache_is_there():
    assert EXTENDED < set(vars(local_disk.LocalDisk)) and len(overrides()) > 5


def test_every_repair_names_bug_symptom_and_releases():
    for name, text in documented():
        if not name.startswith("vllm_patch."):
            continue
        for part in ("Bug:", "Symptom:", "Seen in:"):
            assert part in text, f"{name} has no {part!r}"


def test_the_design_notes_list_every_repair_of_vllm():
    for name, _ in documented():
        if name.startswith("vllm_patch."):
            line = f"| `{name.rpartition('.')[2]}` "
            assert f"\n{line}" in DESIGN, f"{name} is not in docs/design.md"


AGAIN = "{label} 2.1 needs {repair} again, although fixed_in is 2.1"


@pytest.mark.parametrize(
    "broken, here, oldest, fixed_in, expected",
    [
        (True, "2.0", "2.0", None, None),
        (True, "2.1+cpu", "2.0", None, None),
        (False, "2.0", "2.0", None, "delete me: {label} 2.0 no longer needs {repair}"),
        (False, "2.1rc1+cpu", "2.0", None, 'fixed_in="2.1"'),
        (True, "2.0.5", "2.0", "2.1", None),
        (False, "2.1", "2.0", "2.1", None),
        (False, "2.1rc1", "2.0", "2.1", None),
        (False, "2.2", "2.0", "2.1", None),
        (True, "2.1", "2.0", "2.1", AGAIN),
        (False, "2.0", "2.0", "2.1", "delete me: {label} 2.0 no longer needs {repair}"),
        (False, "2.2", "2.1", "2.1", "delete me: {label} 2.1, the oldest supported release"),
        (True, "2.2", "2.2", "2.1", "delete me: {label} 2.2, the oldest supported release"),
    ],
)
def test_what_has_to_be_done(broken, here, oldest, fixed_in, expected):
    said = verdict(broken, here, oldest, fixed_in)
    assert said is None if expected is None else expected in said


def test_where_a_repair_is():
    assert where(compat.reserve_windows) == "reserve_windows (vllm_patch/compat.py)"
