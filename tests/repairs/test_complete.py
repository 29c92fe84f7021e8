# SPDX-License-Identifier: Apache-2.0
"""Each repair has a test that says when to delete it, and what such a test says."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lmcache_hybrid.storage import host_memory as pinned
from lmcache_hybrid.storage import read_reservation as staging
from lmcache_hybrid.storage.disk import make_backend
from lmcache_hybrid.storage.remote import make_connector
from lmcache_hybrid.tools import repairs as listed
from tests.compat.names import HOOKS
from tests.unit.test_hooks import targets_of
from vllm_patch import cpu, events, partial_hits, scheduler_repairs, sessions

from . import test_pool, test_vllm  # noqa: F401  (fills TESTED)
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


def installed(module: ModuleType) -> set[str]:
    """What a module's ``install`` calls of its own module."""
    calls = ast.walk(ast.parse(inspect.getsource(module.install)))
    names = {
        node.func.id for node in calls if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }
    return {name_of(getattr(module, name)) for name in names}


# Repairs that wait for a model's loader, because they import what only a worker has.
BY_THE_LOADER = {
    "vllm_patch.partial_hits.copy_whole_pages",
    "vllm_patch.sessions.forget_columns_of_parts",
}


@pytest.mark.parametrize("module", [scheduler_repairs, cpu, events, partial_hits, sessions])
def test_every_repair_of_vllm_says_when_it_can_go(module):
    repairs = {name for name, _ in documented() if name.startswith(f"{module.__name__}.")}
    assert installed(module) == repairs - BY_THE_LOADER and repairs


def test_every_repair_has_a_test_that_says_delete_me():
    repairs = {name for name, _ in documented()} - CHOICES
    assert repairs <= TESTED


def test_every_repair_with_a_test_is_told_to_users():
    """By ``lmcache-hybrid version --repairs``, of a class at least the class."""
    told = {repair.name for repair in listed.repairs()} | {name for name, _ in listed.stand_ins()}
    assert {name for name in TESTED if not told & {name, name.rpartition(".")[0]}} == set()


# Of LMCache's stores.
STORES = (make_backend, make_connector, pinned, staging)
# They put repairs in their places; that of staging is its ``allocate``.
APPLY = {"lmcache_hybrid.storage.read_reservation.ReadReservation.__init__"}
# What replaces something that works. No test can say when it can go.
CHOICES = {
    "lmcache_hybrid.storage.disk.make_backend.install",
    "lmcache_hybrid.storage.remote.make_connector.install",
}
# Methods of upstream's that put something in a place, as an assignment does.
SETTERS = {"bind_native"}


def replacing(module: ModuleType) -> Iterator[str]:
    """Functions and methods that put something in the place of LMCache's, or of its client's."""
    file = f"{module.__name__.replace('.', '/')}.py"
    theirs = {hook.name.rpartition(".")[2] for hook in HOOKS if hook.replaced_in == file}
    for name, function in functions_in(ast.parse(inspect.getsource(module)), module.__name__):
        nodes = list(ast.walk(function))
        places = {target.attr for node in nodes for target in targets_of(node)}
        called = {node.func.attr for node in nodes if hasattr(getattr(node, "func", 0), "attr")}
        if places & theirs or called & SETTERS:
            yield name


def functions_in(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods; one inside another is part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions_in(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{name}.{child.name}", child


def test_what_replaces_lmcaches_own_says_why():
    found = {name for module in STORES for name in replacing(module)}
    assert found - APPLY <= {name for name, _ in documented()}
    assert APPLY < found and len(found) > 2


def test_each_file_of_repairs_has_some():
    names = [name for name, _ in documented()]
    for module in STORES:
        assert any(name.startswith(f"{module.__name__}.") for name in names), module


def test_a_choice_is_not_passed_off_as_a_repair():
    texts = dict(documented())
    assert {name for name, text in texts.items() if "No bug:" in text} == CHOICES
    assert not CHOICES & TESTED
    for name in CHOICES:
        assert "Gain:" in texts[name] and "Seen in:" in texts[name]


def test_every_repair_names_bug_symptom_and_releases():
    for name, text in documented():
        for part in ("Bug:", "Symptom:", "Seen in:"):
            assert name in CHOICES or part in text, f"{name} has no {part!r}"


def test_the_design_notes_list_every_repair_of_vllm_and_no_other():
    repairs = {
        name.rpartition(".")[2] for name, _ in documented() if name.startswith("vllm_patch.")
    }
    assert set(re.findall(r"^\| `(\w+)` ", DESIGN, re.MULTILINE)) == repairs


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
    assert (
        where(scheduler_repairs.reserve_windows)
        == "reserve_windows (vllm_patch/scheduler_repairs.py)"
    )
