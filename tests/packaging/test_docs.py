# SPDX-License-Identifier: Apache-2.0
"""What pages say beside the code that knows better."""

import re
from pathlib import Path

import yaml

from lmcache_hybrid import backends, config
from lmcache_hybrid.tinymodels import FAMILIES
from vllm_patch.versions import LMCACHE_RANGE, VLLM_RANGE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_supported_range() -> None:
    text = (DOCS / "upgrades.md").read_text()
    for first, last in (VLLM_RANGE, LMCACHE_RANGE):
        assert f">={first},<{last}" in text


def test_every_refused_option_is_on_the_options_page() -> None:
    text = (DOCS / "options.md").read_text()
    for name in (*config._REFUSED, *config._REFUSED_EXTRA, config.CHECKPOINT_KEY):
        assert f"{name}`" in text or f"{name}:" in text, name
    for scheme in backends.REMOTE_SCHEMES:
        assert f"`{scheme}://" in text


def test_tested_families_have_a_page() -> None:
    """Each tiny model's class in ``transformers`` is named on a page, as vLLM names it."""
    pages = "".join(page.read_text() for page in (DOCS / "families").glob("*.md"))
    for name, family in FAMILIES.items():
        if name not in ("llama", "gemma3"):  # no recurrent layers
            assert f"`{family.model_class}`" in pages


def test_links_of_the_readme() -> None:
    for file in ("README.md", "CONTRIBUTING.md", "examples/README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text()):
            assert (ROOT / file).parent.joinpath(target).exists(), f"{file}: {target}"


def test_drawings_are_in_their_pages_and_fetch_nothing() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    drawings = sorted((DOCS / "img").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        assert f"(img/{drawing.name})" in pages
        assert not re.search(r'(href|src)="(?!#)|@import|url\((?!#)', drawing.read_text())


def test_site_fetches_nothing() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & site.keys()
