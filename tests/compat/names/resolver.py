# SPDX-License-Identifier: Apache-2.0
"""Looks up names in upstream's source files, without importing them.

It works on a release that is only unpacked, or that cannot be imported.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_hybrid.upstream.lmcache_home import moved

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition: the module that holds it, and its syntax tree.

    ``node`` is an ``ast.Module`` for a module, and the assignment for a variable.
    """

    module: str
    node: ast.AST


class Tree:
    """Packages as source files.

    Args:
        roots: folders that hold packages, such as an unpacked wheel; the first that
            has a module wins.
    """

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self.module = functools.cache(self._parse)

    @classmethod
    def installed(cls, *packages: str) -> "Tree":
        """Where the packages lie that ``import`` would find; none of them is imported."""
        specs = [importlib.util.find_spec(name) for name in packages]
        found = [spec.submodule_search_locations for spec in specs if spec is not None]
        folders = [Path(locations[0]).parent for locations in found if locations]
        return cls(*dict.fromkeys(folders))

    def _parse(self, module: str) -> ast.Module | None:
        path = Path(*module.split("."))
        for root in self._roots:
            for file in (root / path / "__init__.py", (root / path).with_suffix(".py")):
                if file.is_file():
                    return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str) -> Found | None:
        """``name`` ("Class.attribute", "function", "" for the module) as ``module`` has it.

        Follows imports and base classes. An attribute of a class is one that its body
        defines or one of its methods assigns to ``self``; one of a variable is a key of the
        dict that it is set to. What LMCache has moved is looked for in both of its homes.
        """
        found = self._find(module, name)
        new = None if found else moved(module)
        return self._find(new, name) if new else found

    def _find(self, module: str, name: str) -> Found | None:
        tree = self.module(module)
        if tree is None:
            return None
        if not name:
            return Found(module, tree)
        first, *rest = name.split(".")
        found = self._global(module, first)
        for attribute in rest:
            found = found and self._attribute(found, attribute)
        return found

    def _global(self, module: str, name: str) -> Found | None:
        tree = self.module(module)
        for node in _statements(tree.body if tree else ()):
            if isinstance(node, (ast.ClassDef, _Function)) and node.name == name:
                return Found(module, node)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _names(node):
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    origin = _origin(self, module, node)
                    # ``from package import submodule`` in the package itself says nothing.
                    if (alias.asname or alias.name) == name and (origin, alias.name) != (
                        module,
                        name,
                    ):
                        return self._global(origin, alias.name)
        submodule = f"{module}.{name}"
        tree = self.module(submodule)
        return None if tree is None else Found(submodule, tree)

    def _attribute(self, owner: Found, name: str) -> Found | None:
        if isinstance(owner.node, ast.Module):
            return self._global(owner.module, name)
        if isinstance(owner.node, (ast.Assign, ast.AnnAssign)):
            return _key(owner, name)
        if not isinstance(owner.node, ast.ClassDef):
            return None
        for node in _members(owner.node):
            if isinstance(node, _Function) and node.name == name or name in _names(node):
                return Found(owner.module, node)
        for base in owner.node.bases:
            found = isinstance(base, ast.Name) and self._global(owner.module, base.id)
            found = found and self._attribute(found, name)
            if found:
                return found
        return None


def parameters(function: _Function) -> tuple[list[str], int]:
    """(names of the positional parameters without self, how many of them have no default)."""
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    required = len(names) - len(function.args.defaults)
    bound = names[:1] in (["self"], ["cls"])
    return names[bound:], required - bound


def imported(files: Sequence[Path], packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(module, name) of each ``import`` in ``files`` from one of ``packages``."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            else:
                continue
            yield from (pair for pair in found if pair[0].split(".")[0] in packages)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if`` and ``try`` too."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from _statements(getattr(node, inner, ()))


def _members(owner: ast.ClassDef) -> Iterator[ast.AST]:
    """What a class body defines, then the assignments in its methods."""
    yield from owner.body
    for method in owner.body:
        if isinstance(method, _Function):
            yield from (n for n in ast.walk(method) if isinstance(n, (ast.Assign, ast.AnnAssign)))


def _key(owner: Found, name: str) -> Found | None:
    assert isinstance(owner.node, (ast.Assign, ast.AnnAssign))
    value = owner.node.value
    keys = value.keys if isinstance(value, ast.Dict) else ()
    here = any(isinstance(key, ast.Constant) and key.value == name for key in keys)
    return owner if here else None


def _names(node: ast.AST) -> set[str]:
    """Names that an assignment binds, as variables or as attributes of self."""
    if isinstance(node, ast.AnnAssign):
        targets: list[ast.expr] = [node.target]
    elif isinstance(node, ast.Assign):
        targets = list(node.targets)
    else:
        return set()
    targets += [e for t in targets if isinstance(t, ast.Tuple) for e in t.elts]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self"
    }


def _origin(tree: Tree, module: str, node: ast.ImportFrom) -> str:
    """Absolute name of the module that ``node`` imports from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    # "." means the package itself, which for __init__.py is the module.
    is_package = any((r / Path(*parts) / "__init__.py").is_file() for r in tree._roots)
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *(node.module or "").split(".")]).rstrip(".")


@dataclass(frozen=True)
class Hook:
    """One name of upstream's.

    Attributes:
        module: where our code gets it from.
        name: "Class.attribute" or a name in the module.
        takes: positional parameters that we pass, or that it passes to what replaces
            it; upstream may add others that have defaults. None where that is open, and
            where ``lmcache_hybrid/upstream/signatures.py`` has them.
        holds: code that its definition must hold, as ``ast.unparse`` writes it.
        replaced_in: our file that assigns to it, "" where it is only used.
        otherwise: what a release that differs has instead, all of it.
    """

    module: str
    name: str
    takes: tuple[str, ...] | None = None
    holds: tuple[str, ...] = ()
    replaced_in: str = ""
    otherwise: tuple["Hook", ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    def problem(self, tree: Tree) -> str | None:
        """What is wrong with it in ``tree``, in a few words; None when it is as we need it."""
        problem = self._problem(tree)
        instead = problem is not None and self.otherwise
        return None if instead and not any(hook.problem(tree) for hook in instead) else problem

    def _problem(self, tree: Tree) -> str | None:
        found = tree.find(self.module, self.name)
        if found is None:
            return f"{self} is missing"
        node = found.node
        if self.takes is not None and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names, required = parameters(node)
            expected = list(self.takes)
            if names[: len(expected)] != expected or required > len(expected):
                return f"{self} takes ({', '.join(names)}) instead of ({', '.join(expected)})"
        text = ast.unparse(node) if self.holds else ""
        gone = [code for code in self.holds if code not in text]
        return f"{self} no longer holds {gone[0]!r}" if gone else None


def attributes(
    module: str, owner: str, names: str, otherwise: tuple[Hook, ...] = ()
) -> Iterator[Hook]:
    """Hooks for attributes of one owner, their names separated by spaces."""
    yield from (Hook(module, f"{owner}.{name}", otherwise=otherwise) for name in names.split())
