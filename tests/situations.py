# SPDX-License-Identifier: Apache-2.0
"""What users set, and what comes of it: the rows of ``situations.toml``.

``python -m tests.situations`` writes them into docs/troubleshooting.md.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_suffix(".toml")
PAGE = Path(__file__).parents[1] / "docs/troubleshooting.md"
# The table stands between these.
BEGIN, END = "<!-- written by python -m tests.situations -->\n", "<!-- end of it -->\n"
SAYS = {
    "hits": "serves hits",
    "refused": "does not start",
    "off": "serves without a hit",
}


@dataclass(frozen=True)
class Situation:
    """One row; the head of the file says what each field is.

    Attributes:
        also: more words of the same message.
        fix: what to do, in Markdown; empty where there is nothing to do.
        doctor: what ``doctor`` says; None for the same words.
    """

    set: str
    outcome: Literal["hits", "refused", "off"]
    words: str = ""
    also: tuple[str, ...] = ()
    fix: str = ""
    doctor: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    lmcache: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def situations() -> list[Situation]:
    """All rows."""
    return [Situation(**row) for row in tomllib.loads(TABLE.read_text())["situation"]]


def table() -> str:
    """The rows that say something, as a table of the page: what stops an engine first."""
    lines = ["| You set | The engine | It says | Fix |", "|---|---|---|---|"]
    for outcome in ("refused", "off", "hits"):
        for row in situations():
            if row.outcome == outcome and row.words:
                said = f"`... {row.words} ...`"
                lines.append(f"| {row.set} | {SAYS[outcome]} | {said} | {row.fix} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table in its place.

    Raises:
        ValueError: it has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + table() + end + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
