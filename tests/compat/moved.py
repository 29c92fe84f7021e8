# SPDX-License-Identifier: Apache-2.0
"""What a release of vLLM or LMCache changed in the names that we use, from its source alone."""

import ast
import re
from pathlib import Path

from tests.compat.names import HOOKS, imports
from tests.compat.names.resolver import Hook, Tree


def missing_and_where(root: Path, package: str) -> list[str]:
    """A line for each name that we use and the release lacks: its file, and files that have it."""
    tree = Tree(root)
    lines = []
    for hook in of(package):
        problem = hook.problem(tree)
        if problem is not None:
            said = problem.removeprefix(f"{hook.module}.")
            lines.append(f"{_file(root, hook)}: {said}{_elsewhere(root, hook, tree)}")
    return list(dict.fromkeys(lines))


def changed(old: Path, new: Path, package: str) -> list[str]:
    """A line for each function or value that we use and that reads otherwise than in ``old``.

    Classes are left out, because what we use of them is listed by itself.
    """
    before, after = Tree(old), Tree(new)
    lines = []
    for hook in of(package):
        texts = [_text(hook, tree) for tree in (before, after)]
        if None not in texts and texts[0] != texts[1]:
            lines.append(f"{_file(new, hook)}: {hook.name} reads otherwise")
    return lines


def of(package: str) -> list[Hook]:
    """What we use of a package, each name once."""
    hooks = (hook for hook in (*HOOKS, *imports()) if hook.module.split(".")[0] == package)
    return list({(hook.module, hook.name, hook.takes, hook.holds): hook for hook in hooks}.values())


def _file(root: Path, hook: Hook) -> str:
    """Where we get it from, in the release or in those before it."""
    path = Path(*hook.module.split("."))
    package = path / "__init__.py"
    return str(package if (root / package).is_file() else path.with_suffix(".py"))


def _text(hook: Hook, tree: Tree) -> str | None:
    """Code of a function or an assignment without its docstring; None of anything else."""
    found = tree.find(hook.module, hook.name)
    if found is None or isinstance(found.node, (ast.Module, ast.ClassDef)):
        return None
    node = found.node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ast.unparse(node)
    body = node.body[ast.get_docstring(node) is not None :]
    return "\n".join(map(ast.unparse, (node.args, *body)))


def _elsewhere(root: Path, hook: Hook, tree: Tree) -> str:
    """Files of the release that define a name that is gone from its place, at most three."""
    first = hook.name.split(".")[0]
    if tree.find(hook.module, first) is not None and first:
        return ""
    package = root / hook.module.split(".")[0]
    if first:
        wanted = re.compile(rf"^(?:class |def |async def ){re.escape(first)}\b", re.MULTILINE)
        files = [f for f in package.rglob("*.py") if wanted.search(f.read_text("utf-8", "replace"))]
    else:
        files = list(package.rglob(f"{hook.module.rpartition('.')[2]}.py"))
    names = sorted(str(file.relative_to(root)) for file in files)[:3]
    return f" (is in {', '.join(names)})" if names else ""
