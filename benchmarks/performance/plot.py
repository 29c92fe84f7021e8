# SPDX-License-Identifier: Apache-2.0
"""The plot of docs/performance.md: the first token of a prompt asked before."""

from pathlib import Path
from statistics import median

from benchmarks.drawing import FAINT, OURS, TEXT, THEIRS, Rows, rows

QUESTION, COLD, LIMIT = "repeats", "cold", "vllm"
# Arm -> its name and colour, in the order of the rows.
ARMS = {
    COLD: ("no hit, all computed", THEIRS),
    "redis": ("hit in Redis", OURS),
    "disk": ("hit on disk", OURS),
    "ram": ("hit in LMCache's RAM", OURS),
    LIMIT: ("hit in vLLM's own cache", TEXT),
}
MEDIAN, FASTER = 600, 690  # right ends of the columns, in pixels
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds


def draw(figures: dict, path: Path) -> None:
    """Write an SVG: each measurement and the median of each arm, if that question was asked."""
    answer = figures["answers"].get(QUESTION)
    if answer is None:
        return
    seconds = {arm: answer["seconds"][arm] for arm in ARMS if arm in answer["seconds"]}
    every = [second for measured in seconds.values() for second in measured]
    title = "Time to the first token of a prompt asked before"
    with rows(path, title, len(seconds), row=34, left=192, right=520) as to:
        to.axes.set_xscale("log")
        to.axes.set_xlim(min(TICKS[0], *every), max(6, *every))
        to.axes.set_xticks(TICKS, [f"{tick:g} s" for tick in TICKS])
        to.axes.set_xticks([], minor=True)
        to.below(
            "time to the first token, logarithmic scale",
            f"large dot: median, small dots: all {answer['rounds']} measurements",
        )
        if LIMIT in seconds:
            to.limit(median(seconds[LIMIT]))
        to.cell(to.heading, MEDIAN, "median", color=FAINT)
        to.cell(to.heading, FASTER, "speed-up", color=FAINT)
        for place, arm in enumerate(seconds):
            _row(to, place, arm, seconds)


def _row(to: Rows, place: int, arm: str, seconds: dict[str, list[float]]) -> None:
    (name, color), middle = ARMS[arm], median(seconds[arm])
    style = {"color": color, "markeredgecolor": "none"}
    to.name(place, name)
    to.axes.plot(seconds[arm], [place] * len(seconds[arm]), "o", alpha=0.4, markersize=6, **style)
    to.axes.plot(middle, place, "o", markersize=12, **style)
    to.cell(place, MEDIAN, f"{middle:.3f} s", color=color)
    if arm != COLD and COLD in seconds:
        to.cell(place, FASTER, f"{median(seconds[COLD]) / middle:.0f}×", color=color)
