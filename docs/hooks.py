# SPDX-License-Identifier: Apache-2.0
"""Links from docs/ to the rest of the repository, which is no part of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Name the file instead of linking to it.

    Raises:
        PluginError: the file does not exist.
    """
    folder = Path(page.file.abs_src_path).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist.")
        text, path = link[1].strip("`"), f"`{target.relative_to(ROOT)}`"
        return path if text in path else f"{link[1]} ({path})"

    return LINK.sub(named, markdown)
