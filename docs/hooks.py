# SPDX-License-Identifier: Apache-2.0
"""Puts the examples and the changelog into the site, and names what stays out of it.

Links are written as GitHub needs them. In the site, a link to a file that is not there becomes
that file's path.
"""

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
TYPES = {"", ".json", ".md", ".py", ".yaml", ".yml"}  # "" for Dockerfile


def copied() -> list[Path]:
    """Files beside docs/ that the site has too."""
    found = (path.relative_to(ROOT) for path in EXAMPLES.rglob("*") if path.is_file())
    kept = (path for path in found if not any(p[0] in "._" for p in path.parts))
    examples = (path for path in kept if path.suffix in TYPES)
    return [ROOT / "CHANGELOG.md", *(ROOT / path for path in sorted(examples))]


def on_config(config: Any, **kwargs: Any) -> Any:
    """Write the version into the footer of every page."""
    source = (ROOT / "lmcache_hybrid/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', source, re.M)
    assert version is not None
    config.copyright = f"{config.site_name} {version[1]}, Apache-2.0"
    return config


def on_files(files: Any, config: Any, **kwargs: Any) -> Any:
    """Add the copied files."""
    for path in copied():
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Turn links between docs/ and the rest of the repository into those of the site.

    Raises:
        PluginError: the file does not exist.
    """
    source = Path(page.file.abs_src_path)
    in_site = set(copied())

    def href(target: Path) -> str:
        uri = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT)
        return os.path.relpath(uri, Path(page.file.src_uri).parent)

    def replaced(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if target.is_relative_to(DOCS):
            inside = source.is_relative_to(DOCS)  # mkdocs checks those itself
            return link[0] if inside else f"[{link[1]}]({href(target)}{link[3] or ''})"
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist.")
        if target in in_site:
            return f"[{link[1]}]({href(target)}{link[3] or ''})"
        text, path = link[1].strip("`/"), f"`{target.relative_to(ROOT)}`"
        named = path if text in path else f"{link[1]} ({path})"
        held = [f"[{p.name}]({href(p)})" for p in sorted(in_site) if p.is_relative_to(target)]
        return f"{named} ({', '.join(held)})" if held else named

    return LINK.sub(replaced, markdown)
