# SPDX-License-Identifier: Apache-2.0
"""Lists what this package replaces in vLLM and LMCache, from its own docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("vllm_patch", "lmcache_hybrid")
ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| ``(\w+)`` \| (.+) \|$", re.MULTILINE)
_ROLE = re.compile(r":\w+:`\.?([^`]*)`")
_END = re.compile(r"Remove when: (.+?)(?:\n\n|$)", re.DOTALL)


class Repair(NamedTuple):
    """A function that replaces one of vLLM's or LMCache's with a bug.

    Attributes:
        name: with its module.
        does: its purpose, in one sentence.
        remove_when: the upstream change that makes it unnecessary.
    """

    name: str
    does: str
    remove_when: str


def places() -> list[tuple[str, str]]:
    """List (module of ``vllm_patch``, what it replaces in vLLM)."""
    text = ast.get_docstring(ast.parse((ROOT / "vllm_patch/__init__.py").read_text())) or ""
    return [(module, _plain(what)) for module, what in _ROW.findall(text)]


def repairs() -> Iterator[Repair]:
    """Yield all repairs, by file."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            yield from _repairs_in(ast.parse(file.read_text()), module)


def _repairs_in(node: ast.AST, name: str) -> Iterator[Repair]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(child) or ""
            if (end := _END.search(text)) and "No bug:" not in text:
                yield Repair(f"{name}.{child.name}", _plain(text.splitlines()[0]), _plain(end[1]))
            yield from _repairs_in(child, f"{name}.{child.name}")


def stand_ins() -> Iterator[tuple[str, str]]:
    """Yield (name, what it is) of each class of ours that replaces one of LMCache's.

    Also of replacements for something without a bug.
    """
    for file in sorted((ROOT / "lmcache_hybrid").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        theirs = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmcache.")
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                stands = bool(bases & theirs)
            elif isinstance(node, ast.FunctionDef):
                stands = node.name == "install"
            else:
                continue
            if stands and (text := ast.get_docstring(node)):
                yield f"{module}.{node.name}", _plain(text.splitlines()[0])


def _plain(text: str) -> str:
    return " ".join(_ROLE.sub(r"\1", text).replace("``", "").split())
