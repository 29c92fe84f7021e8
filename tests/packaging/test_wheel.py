# SPDX-License-Identifier: Apache-2.0
"""What ``python -m build`` makes, installed where nothing of this checkout is in the way."""

import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.building import ROOT, run

PACKAGES = ("lmcache_hybrid", "vllm_patch")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of a fresh environment with the wheel, above the packages of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--no-deps", "--no-index", "--quiet", wheel], folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    below = Path(run([python, "-c", code], folder).strip(), "below.pth")
    # A path that a .pth names is searched, but its own .pth files (editable installs) are not.
    below.write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin"


def sources() -> set[str]:
    """Every file of both packages, as git would list them."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == sources()
    assert {f"{package}/py.typed" for package in PACKAGES} <= files


def test_wheel_has_its_licence(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        licence = archive.read(name)
    assert licence == (ROOT / "LICENSE").read_bytes() and b"Apache License" in licence


def test_the_installed_command_says_its_version(installed: Path) -> None:
    from lmcache_hybrid import __version__

    shown = run([installed / "lmcache-hybrid", "version"], installed, PATH="/usr/bin:/bin")
    assert shown.startswith(f"lmcache-hybrid {__version__}, vLLM ")


def test_vllm_finds_the_plugin(installed: Path) -> None:
    """Through the entry point of the installed wheel, not of this checkout."""
    code = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="lmcache_hybrid")
print(plugin.value, plugin.load().__code__.co_filename)
"""
    shown = run([installed / "python", "-c", code], installed, PATH="/usr/bin:/bin")
    value, file = shown.split()
    assert value == "vllm_patch:register"
    assert Path(file).is_relative_to(installed.parent)
