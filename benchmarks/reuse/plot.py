# SPDX-License-Identifier: Apache-2.0
"""The plot of docs/reuse.md: the defaults beside vLLM's own cache and the limit."""

from pathlib import Path

from benchmarks.drawing import FAINT, OURS, THEIRS, Rows, rows
from benchmarks.reuse.report import RESTARTED, THIRD

ARM, OWN = "default", "vllm"
NOTES = {
    "repeat": "the same prompts again",
    "chat": "each turn extends the last",
    "short chats": "most are shorter than a block",
    "agent": "histories grow and branch",
    "increment": "another fifth image each time",
    "growing": "one more image, anywhere",
    "documents": "each as often as the others",
    "popular": "some far more often",
    "one-offs": "most occur only once",
}
# Arm -> heading, its right end in pixels, colour.
HEADS = {ARM: ("■ LMCache", 594, OURS), OWN: ("● vLLM alone", 698, THEIRS)}
GAP = 1  # rows between two sizes of the store
# By store. That of THIRD and vLLM's own cache there hold the same bytes.
SIZES = {
    RESTARTED: "Room for a tenth in vLLM's cache, for all in the store; one restart",
    THIRD: "Room for a third in either",
}


def draw(figures: dict, path: Path) -> None:
    """Write an SVG: the share of the oracle's tokens that hit, a row for each trace and store.

    None without the arms that it shows.
    """
    shares: dict[str, dict[str, dict[str, float]]] = {}  # by store, trace and arm
    for run in figures["runs"]:
        if run["arm"] in (ARM, OWN) and run["store"] in SIZES:
            of_store = shares.setdefault(run["store"], {})
            of_store.setdefault(run["trace"], {})[run["arm"]] = 100 * run["share"]
    if not shares:
        return
    count = sum(map(len, shares.values())) + GAP * (len(shares) - 1)
    title = "Hit tokens as a share of those that could be reused, by trace"
    with rows(path, title, count, row=36, left=200, right=475) as to:
        to.axes.set_xlim(0, 100)
        to.axes.set_xticks(range(0, 101, 25), [f"{x} %" for x in range(0, 101, 25)])
        to.below("hit tokens, share of those that could be reused")
        to.limit(100)
        for text, right, color in HEADS.values():
            to.cell(to.heading, right, text, color=color, size=12, weight="bold")
        place = 0
        for store, traces in shares.items():
            above = place - GAP if place else to.heading
            to.cell(above, 4, SIZES[store], ha="left", color=FAINT, size=12)
            for trace, of_trace in traces.items():
                to.name(place, trace, NOTES.get(trace, ""))
                _row(to, place, of_trace)
                place += 1
            place += GAP


def _row(to: Rows, place: float, shares: dict[str, float]) -> None:
    if ARM in shares:
        to.axes.barh(place, shares[ARM], 0.5, color=OURS)
    if OWN in shares:
        style = {"markersize": 9, "markeredgecolor": "white", "zorder": 4, "clip_on": False}
        to.axes.plot(shares[OWN], place, "o", color=THEIRS, **style)
    for arm, share in shares.items():
        _, right, color = HEADS[arm]
        to.cell(place, right, f"{share:.1f} %", color=color)
