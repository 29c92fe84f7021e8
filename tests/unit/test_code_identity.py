# SPDX-License-Identifier: Apache-2.0
"""Names of code from outside vLLM: real distributions and files in a folder of their own."""

import importlib
import sys
from pathlib import Path

import pytest

from lmcache_hybrid.identity import code
from lmcache_hybrid.identity.code import code_identity


def forget() -> None:
    for each in (code_identity, code._packages, code._files_installed, code._content):
        each.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python imports from."""
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()


def package(site: Path, name: str = "plugged", content: str = "SCALE = 1") -> Path:
    folder = site / name
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("")
    (folder / "backend.py").write_text(content)
    importlib.invalidate_caches()
    return folder


def distribution(site: Path, version: str, name: str = "plugged", url: str = "") -> None:
    for old in site.glob("*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = site / f"{name}_kit-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-kit\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{name}\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/backend.py,,\n")
    if url:
        (info / "direct_url.json").write_text(url)
    importlib.invalidate_caches()


def again(module: str) -> str | None:
    """As a process that starts now."""
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "plugged"]:
        del sys.modules[name]
    return code_identity(module)


def test_a_distribution_is_named_with_its_version(site):
    package(site)
    distribution(site, "1.2")
    assert again("plugged.backend") == "plugged-kit==1.2"
    distribution(site, "1.3")
    assert again("plugged.backend") == "plugged-kit==1.3"
    assert code_identity("xxhash").startswith("xxhash==")


def test_code_of_no_distribution_counts_by_the_content_of_its_package(site):
    folder = package(site)
    found = {again("plugged.backend")}
    package(site, content="SCALE = 2")
    found.add(again("plugged.backend"))
    (folder / "kernels.so").write_bytes(b"\x7fELF")  # beside the module, and used by it
    found.add(again("plugged.backend"))
    (folder / "kernel.cu").write_text("compiled when it is needed")
    found.add(again("plugged.backend"))
    assert len(found) == 4 and all(name.startswith("code ") for name in found)
    (folder / "__pycache__").mkdir(exist_ok=True)  # there unless PYTHONDONTWRITEBYTECODE is set
    (folder / "__pycache__/backend.pyc").write_bytes(b"compiled")
    assert again("plugged.backend") in found


def test_what_a_link_leads_to_counts(site):
    folder = package(site)
    (site / "elsewhere").mkdir()
    (site / "elsewhere/kernels.py").write_text("SCALE = 1")
    (folder / "linked").symlink_to(site / "elsewhere")
    (site / "elsewhere/back").symlink_to(folder)  # walked once
    first = again("plugged.backend")
    (site / "elsewhere/kernels.py").write_text("SCALE = 2")
    assert first and again("plugged.backend") != first


def test_a_checkout_in_front_of_the_installed_package_counts_by_its_content(site, monkeypatch):
    """``PYTHONPATH``: the version is that of files which nobody imports."""
    package(site)
    distribution(site, "1.2")
    front = site / "front"
    front.mkdir()
    package(front, content="SCALE = 2")
    monkeypatch.syspath_prepend(front)
    first = again("plugged.backend")
    package(front, content="SCALE = 3")
    assert first.startswith("plugged-kit==1.2 code ") and again("plugged.backend") != first


def test_a_checkout_of_setuptools_develop_counts_by_its_content(site):
    package(site)
    info = site / "plugged_kit.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: plugged-kit\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("plugged\n")
    (info / "SOURCES.txt").write_text("plugged/__init__.py\nplugged/backend.py\n")
    importlib.invalidate_caches()
    first = again("plugged.backend")
    package(site, content="SCALE = 2")
    assert first.startswith("plugged-kit==1.2 code ") and again("plugged.backend") != first


def test_a_single_file_counts_by_its_content(site):
    (site / "plugged.py").write_text("SCALE = 1")
    first = again("plugged")
    (site / "plugged.py").write_text("SCALE = 2")
    assert first and again("plugged") != first


EDITABLE = '{"dir_info": {"editable": true}, "url": "file:///checkout"}'


@pytest.mark.parametrize("url", [EDITABLE, "no json"])
def test_a_checkout_counts_by_its_content_too(site, url):
    """Its files change under one version."""
    package(site)
    distribution(site, "1.2", url=url)
    first = again("plugged.backend")
    package(site, content="SCALE = 2")
    assert first.startswith("plugged-kit==1.2 code ") and again("plugged.backend") != first


@pytest.mark.parametrize("module", ["builtins", "no_such_package.backend"])
def test_what_has_no_files_has_no_name(site, module):
    assert again(module) is None


def test_code_that_cannot_be_read_has_no_name(site, monkeypatch):
    package(site)

    def denied(file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(code.Path, "read_bytes", denied)
    assert again("plugged.backend") is None


def test_a_file_that_was_put_into_an_installed_package_counts_by_content(site):
    folder = package(site)
    distribution(site, "1.2")
    (folder / "patched.py").write_text("SCALE = 1")
    first = again("plugged.patched")
    (folder / "patched.py").write_text("SCALE = 2")
    assert first.startswith("plugged-kit==1.2 code ") and again("plugged.patched") != first


def test_folders_that_a_package_takes_in_when_it_is_imported_count(site, monkeypatch):
    folder = package(site)
    extended = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)"
    (folder / "__init__.py").write_text(extended)
    distribution(site, "1.2")
    other = site / "checkout"
    (other / "plugged").mkdir(parents=True)
    (other / "plugged/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    found = set()
    for content in ("SCALE = 1", "SCALE = 2"):
        (other / "plugged/model.py").write_text(content)
        again("plugged.model")
        importlib.import_module("plugged.model")
        forget()
        found.add(code_identity("plugged.model"))
    assert len(found) == 2 and all(name.startswith("plugged-kit==1.2 code ") for name in found)
