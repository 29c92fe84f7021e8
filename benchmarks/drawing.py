# SPDX-License-Identifier: Apache-2.0
"""What the plots of the benchmarks share: one row for each case, small SVGs with text as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEAD, FOOT = 700, 36, 62  # pixels; the width of a page of the site
TEXT, FAINT, GRID = "#24292f", "#57606a", "#d8dee4"
OURS, THEIRS = "#0072b2", "#d55e00"  # told apart with every kind of colour vision
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and a search finds it
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 13,
    "text.color": TEXT,
    "axes.edgecolor": GRID,
    "xtick.color": FAINT,
    "xtick.labelsize": 12,
}


@dataclass(frozen=True)
class Rows:
    """Axes whose y is the number of a row, from the top.

    Args:
        axes: matplotlib's, of ``left`` to ``right`` in pixels of ``WIDTH``.
        heading: y of the headings.
    """

    axes: Any
    left: float
    right: float
    heading: float

    def name(self, row: float, text: str, note: str = "") -> None:
        """Name a row at its left, with a faint note below the name."""
        end = self.left - 10
        self.cell(row - 0.19 if note else row, end, text)
        if note:
            self.cell(row + 0.24, end, note, color=FAINT, size=11)

    def cell(self, row: float, x: float, text: str, ha: str = "right", **style: Any) -> None:
        """Text that ends at ``x`` pixels."""
        place = (x - self.left) / (self.right - self.left)
        where = self.axes.get_yaxis_transform()
        self.axes.text(place, row, text, ha=ha, va="center_baseline", transform=where, **style)

    def limit(self, x: float) -> None:
        """Draw a line through all rows at the value ``x``, and name it."""
        self.axes.plot([x, x], self.axes.get_ylim(), color=TEXT, linewidth=2, clip_on=False)
        self.axes.text(x, self.heading, "limit", ha="center", va="center_baseline", weight="bold")

    def below(self, *lines: str) -> None:
        """Say what the axis is, below its numbers."""
        for number, line in enumerate(lines):
            self.axes.annotate(
                line,
                (0.5, 0),
                (0, -36 - 17 * number),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="center",
                color=FAINT,
                size=12,
            )


@contextmanager
def rows(
    path: Path, title: str, count: float, row: int, left: float, right: float
) -> Iterator[Rows]:
    """Axes for ``count`` rows; an SVG at the end. The same figures give the same file.

    Args:
        path: of the SVG.
        title: what a screen reader says.
        row: height of each, in pixels.
        left: end of the axis, in pixels of ``WIDTH``.
        right: the other end.
    """
    import matplotlib
    from matplotlib.figure import Figure

    height = HEAD + int(count * row) + FOOT
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="white")
        box = (left / WIDTH, FOOT / height, (right - left) / WIDTH, count * row / height)
        axes = figure.add_axes(box)
        axes.patch.set_visible(False)
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(axis="x", length=0, pad=6)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        yield Rows(axes, left, right, heading=-0.5 - HEAD / 2 / row)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(path, format="svg", metadata={**nothing, "Title": title})
