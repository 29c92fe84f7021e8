# SPDX-License-Identifier: Apache-2.0
"""What upstream moved, by name. Reads source files only: nothing of upstream is imported.

``UPSTREAM=FOLDER[:FOLDER]`` checks unpacked releases instead of what is installed.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat import names
from tests.compat.names.resolver import Hook, Tree

ROOT = Path(__file__).parents[2]
FILES = sorted(
    file
    for name in ("vllm_patch", "lmcache_hybrid")
    for file in (ROOT / name).rglob("*.py")
    if file.name != "tiny_models.py"  # it fills tokenizers of its own
)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.fixture(scope="module")
def upstream() -> Tree:
    folders = os.environ.get("UPSTREAM")
    if folders:
        return Tree(*map(Path, folders.split(os.pathsep)))
    return Tree.installed(*names.PACKAGES)


@pytest.mark.parametrize("hook", (*names.HOOKS, *names.imports()), ids=str)
def test_upstream_has(upstream: Tree, hook: Hook) -> None:
    if upstream.module(hook.module.split(".")[0]) is None:
        pytest.skip("this package is not among the folders")
    assert hook.problem(upstream) is None


# The list against our code


def foreign_writes(file: Path, own: set[str]) -> Iterator[str]:
    """Names of attributes that a file assigns to on objects that are not its own.

    Own is ``self`` in a method, ``self.x`` and what our classes name as their data.
    """
    tree = ast.parse(file.read_text())
    methods = {
        node
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        for node in ast.walk(method)
    }
    for node in ast.walk(tree):
        is_setattr = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr"
        assert not is_setattr, f"{file.name}:{node.lineno}: write setattr() as an assignment"
        for target in targets_of(node):
            mine = node in methods and ast.unparse(target).startswith("self.")
            if not mine and target.attr not in own and not target.attr.startswith("_hybrid"):
                yield target.attr


def targets_of(node: ast.AST) -> list[ast.Attribute]:
    if isinstance(node, ast.Assign):
        targets = [t for group in node.targets for t in ast.walk(group)]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    else:
        return []
    return [t for t in targets if isinstance(t, ast.Attribute) and isinstance(t.ctx, ast.Store)]


def is_frozen(owner: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(n) for n in (*owner.decorator_list, *owner.keywords))


def own_data() -> set[str]:
    """Attributes that our own classes declare, or set on themselves; frozen ones have none."""
    names = set()
    for file in FILES:
        for owner in ast.walk(ast.parse(file.read_text())):
            if not isinstance(owner, ast.ClassDef) or is_frozen(owner):
                continue
            for node in ast.walk(owner):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
                names.update(
                    target.attr
                    for target in targets_of(node)
                    if getattr(target.value, "id", "") == "self"
                )
    return names


def test_every_foreign_attribute_that_we_assign_to_is_listed_and_no_other() -> None:
    listed = {
        (hook.replaced_in, hook.name.rpartition(".")[2]) for hook in names.HOOKS if hook.replaced_in
    }
    # A name that is both (block_size) counts as theirs.
    own = own_data() - {name for _, name in listed}
    assigned = {
        (str(file.relative_to(ROOT)), name) for file in FILES for name in foreign_writes(file, own)
    }
    assert assigned == listed


def test_nothing_is_listed_twice() -> None:
    listed = [(str(hook), hook.replaced_in) for hook in names.HOOKS]
    assert len(listed) == len(set(listed))


# Of CPU hosts alone, where other hosts cannot import everything.
ON_CPU = {
    "vllm.platforms.cpu.CpuPlatform.check_and_update_config",
    "vllm.model_executor.layers.mamba.mamba_mixer2.MambaMixer2.get_kv_cache_spec",
}


def takes_parameters(node: ast.AST | None) -> bool:
    """Not a property: where it is gone, nothing is replaced."""
    return isinstance(node, FUNCTION) and "property" not in map(ast.unparse, node.decorator_list)


def test_every_function_that_is_replaced_is_looked_up_in_untested_releases(upstream: Tree) -> None:
    """What tools replace is no engine's; redis is looked up nowhere, because pip decides on it."""
    replaced = {
        str(hook)
        for hook in names.HOOKS
        if hook.replaced_in
        and not hook.replaced_in.startswith("lmcache_hybrid/tools/")
        and hook.module.split(".")[0] in ("vllm", "lmcache")
        and takes_parameters(getattr(upstream.find(hook.module, hook.name), "node", None))
    }
    assert ON_CPU < replaced and len(replaced) > 25
    assert replaced - ON_CPU <= set(names.TAKES)


def test_what_is_looked_up_in_untested_releases_is_listed_without_its_parameters() -> None:
    """These are said in one place."""
    assert set(names.TAKES) <= {str(hook) for hook in names.HOOKS}
    lists = (*names.VLLM, *names.READ, *names.LMCACHE)
    assert not [hook for hook in lists if hook.takes is not None and str(hook) in names.TAKES]


# The look-up itself, on a small tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .b import Base\nfrom vllm.a import Engine as E\n")
    (package / "a.py").write_text(
        "from vllm.b import Base\n"
        "if True:\n"
        "    LIMIT = 3\n"
        "class Engine(Base):\n"
        "    mode: str = 'align'\n"
        "    def __init__(self, config, role=None):\n"
        "        self.queue, self.left = [], {}\n"
        "        self.queue.append(config)\n"
        "    async def step(self, request, *, now=0): return self.queue.pop(  )\n"
        "    @classmethod\n"
        "    def check(cls, config): ...\n"
    )
    (package / "b.py").write_text("class Base:\n    size: int\n    def close(self): ...\n")
    return Tree(tmp_path)


@pytest.mark.parametrize(
    "module, name",
    [
        ("vllm.a", ""),
        ("vllm", "E"),
        ("vllm", "Base.close"),
        ("vllm", "a"),
        ("vllm.a", "LIMIT"),
        ("vllm.a", "Engine.mode"),
        ("vllm.a", "Engine.left"),
        ("vllm.a", "Engine.size"),
        ("vllm.a", "Engine.close"),
    ],
)
def test_a_name_is_found(tree: Tree, module: str, name: str) -> None:
    assert Hook(module, name).problem(tree) is None


@pytest.mark.parametrize(
    "module, name",
    [
        ("vllm.c", ""),
        ("vllm.a", "Gone"),
        ("vllm.a", "Engine.gone"),
        ("vllm.a", "LIMIT.x"),
        ("vllm.a", "Engine.append"),
    ],
)
def test_a_name_that_is_gone_is_named(tree: Tree, module: str, name: str) -> None:
    assert Hook(module, name).problem(tree) == f"{module}{name and '.'}{name} is missing"


@pytest.mark.parametrize(
    "hook, problem",
    [
        (Hook("vllm.a", "Engine.__init__", ("config",)), None),
        (Hook("vllm.a", "Engine.__init__", ("config", "role")), None),
        (Hook("vllm.a", "Engine.check", ("config",)), None),
        (Hook("vllm.a", "Engine.step", ("request",), holds=("self.queue.pop()",)), None),
        (Hook("vllm.a", "Engine.step", ()), "takes (request) instead of ()"),
        (Hook("vllm.a", "Engine.step", ("r",)), "takes (request) instead of (r)"),
        (
            Hook("vllm.a", "Engine.step", ("request", "more")),
            "takes (request) instead of (request, more)",
        ),
        (Hook("vllm.a", "Engine.step", holds=("self.left",)), "no longer holds 'self.left'"),
    ],
)
def test_what_changed_is_said(tree: Tree, hook: Hook, problem: str | None) -> None:
    assert hook.problem(tree) == (problem and f"{hook} {problem}")


@pytest.mark.parametrize(
    "otherwise, problem",
    [
        ((), "vllm.a.Gone is missing"),
        ((Hook("vllm.a", "LIMIT"), Hook("vllm.a", "Engine.step", ("request",))), None),
        ((Hook("vllm.a", "LIMIT"), Hook("vllm.a", "Engine.gone")), "vllm.a.Gone is missing"),
        ((Hook("vllm.a", "Engine.step", ()),), "vllm.a.Gone is missing"),
    ],
)
def test_a_release_that_differs_needs_all_that_it_has_instead(
    tree: Tree, otherwise: tuple[Hook, ...], problem: str | None
) -> None:
    assert Hook("vllm.a", "Gone", otherwise=otherwise).problem(tree) == problem
    assert Hook("vllm.a", "LIMIT", otherwise=otherwise).problem(tree) is None
