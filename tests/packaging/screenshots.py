# SPDX-License-Identifier: Apache-2.0
"""Pictures of every page of the site at two widths, and what is cut there.

    mkdocs build -d site
    pip install playwright          # and a Chromium, such as Debian's chromium-headless-shell
    python tests/packaging/screenshots.py site build/shots --browser /usr/bin/chromium

Ends with exit code 1 where a page is wider than its window, a block or table that does not fit has
no scroll bar, or a name in a table is broken inside.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = (1400, 420)
CUT = """() => {
  const found = [], root = document.documentElement;
  const style = e => getComputedStyle(e);
  const scrolls = e => ['auto', 'scroll'].includes(style(e).overflowX);
  const inScroller = e => {
    for (let p = e; p; p = p.parentElement) if (scrolls(p)) return true;
    return false;
  };
  if (root.scrollWidth > root.clientWidth) found.push('the page');
  for (const e of document.querySelectorAll('article *')) {
    if (style(e).display === 'none') continue;
    const text = e.tagName.toLowerCase() + ': ' + e.textContent.trim().slice(0, 40);
    const wide = e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0;
    if (wide && scrolls(e) && e.offsetHeight - e.clientHeight < 3) found.push('no bar, ' + text);
    if (wide && ['hidden', 'clip'].includes(style(e).overflowX)) found.push('hidden, ' + text);
    if (e.getBoundingClientRect().right > root.clientWidth + 1 && !inScroller(e))
      found.push('beyond the window, ' + text);
  }
  for (const e of document.querySelectorAll('article td code'))
    if (e.getClientRects().length > 1 && !/[-\\s/,]/.test(e.textContent))
      found.push('broken, ' + e.textContent);
  return found;
}"""


def main() -> int:
    """Take the pictures; return whether anything is cut."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    cut = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chosen.browser,
            args=["--no-sandbox"],  # pages of our own; a container's root needs it
            ignore_default_args=["--hide-scrollbars"],
        )
        for width in WIDTHS:
            tab = browser.new_page(viewport={"width": width, "height": 900})
            for page in sorted(chosen.site.resolve().rglob("index.html")):
                name = page.parent.relative_to(chosen.site.resolve()).as_posix()
                tab.goto(page.as_uri(), wait_until="load")
                tab.wait_for_timeout(200)  # the theme wraps tables in a script
                for problem in tab.evaluate(CUT):
                    print(f"{width} {name}: {problem}")
                    cut += 1
                picture = f"{name.replace('/', '-').strip('.') or 'index'}-{width}.png"
                tab.screenshot(path=chosen.out / picture, full_page=True)
        browser.close()
    print(f"{cut} cut")
    return int(cut > 0)


if __name__ == "__main__":
    sys.exit(main())
