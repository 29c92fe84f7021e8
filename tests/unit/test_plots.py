# SPDX-License-Identifier: Apache-2.0
"""The plots of the benchmarks say what the recorded figures say, and can be read."""

import json
import math
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox

from benchmarks import drawing
from benchmarks.performance import plot as performance
from benchmarks.reuse import plot as reuse

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs/generated"
PLOTS = {"reuse": reuse, "performance": performance}
SVG = "{http://www.w3.org/2000/svg}"


def figures(name: str) -> dict:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.fixture(params=PLOTS)
def drawn(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The plot of a recorded file."""
    path = tmp_path / f"{request.param}.svg"
    PLOTS[request.param].draw(figures(request.param), path)
    return path


def draw(name: str, tmp_path: Path, of: dict | None = None) -> ElementTree.Element:
    path = tmp_path / f"{name}.svg"
    PLOTS[name].draw(of or figures(name), path)
    return ElementTree.parse(path).getroot()


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_plot_in_the_docs_is_that_of_the_figures(drawn: Path) -> None:
    """A new run writes both; who edits how it is drawn draws it anew: --render-only."""
    shown = ElementTree.parse(RECORDED / drawn.name).getroot()
    assert texts(shown) == texts(ElementTree.parse(drawn).getroot())


def test_the_page_shows_the_plot_and_says_what_is_seen(drawn: Path) -> None:
    page = (RECORDED.parent / f"{drawn.stem}.md").read_text()
    (alt,) = re.findall(rf"!\[([^]]*)\]\(generated/{drawn.name}\)", page)
    assert "the limit" in alt and "vLLM" in alt


def test_text_can_be_read(drawn: Path) -> None:
    """At the width of a page: large enough, inside the picture, and never over other text."""
    root = ElementTree.parse(drawn).getroot()
    _, _, width, height = map(float, root.get("viewBox", "").split())
    boxes = {text: box(text) for text in root.iter(f"{SVG}text")}
    assert width == drawing.WIDTH
    for text, bounds in boxes.items():
        assert size(text) >= 11, text.text
        assert 0 <= bounds.x0 and bounds.x1 <= width, text.text
        assert 0 <= bounds.y0 and bounds.y1 <= height, text.text
    for one, other in combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one.text, other.text)


def size(text: ElementTree.Element) -> float:
    return float(re.findall(r"(\d+(?:\.\d+)?)px", text.get("style", ""))[0])


def box(text: ElementTree.Element) -> Bbox:
    style = text.get("style", "")
    font = FontProperties("DejaVu Sans", weight="bold" if "font-weight: 700" in style else "normal")
    ink = TextPath((0, 0), text.text, size(text), prop=font).get_extents()
    place = text.get("transform", "")
    x, y = (float(value) for value in re.findall(r"-?\d[\d.]*", place)[-2:])
    left = {"middle": x - ink.width / 2, "end": x - ink.width}.get(
        (re.findall(r"text-anchor: (\w+)", style) or [""])[0], x
    )
    return Bbox.from_extents(left, y - ink.y1, left + ink.width, y - ink.y0)


def test_render_only_draws_the_plot_and_fills_the_page(tmp_path: Path) -> None:
    """Of a file that is in a folder below the page's, and without a measurement."""
    (tmp_path / "generated").mkdir()
    shutil.copy(RECORDED / "reuse.json", tmp_path / "generated")
    page, whole = tmp_path / "reuse.md", (RECORDED.parent / "reuse.md").read_text()
    page.write_text(
        re.sub("(?<=<!-- reuse:begin -->).*(?=<!-- reuse:end -->)", "", whole, flags=re.S)
    )
    out = tmp_path / "generated/reuse.json"
    command = [sys.executable, "-m", "benchmarks.reuse", "--out", out, "--render-only"]
    subprocess.run(command, cwd=ROOT, check=True)
    assert page.read_text() == whole
    assert texts(ElementTree.parse(out.with_suffix(".svg")).getroot())


def test_plots_are_small_and_the_same_each_time(drawn: Path, tmp_path: Path) -> None:
    first = drawn.read_bytes()
    PLOTS[drawn.stem].draw(figures(drawn.stem), drawn)
    assert drawn.read_bytes() == first
    assert len(first) < 25_000 and first.count(b"\n") < 500


def test_reuse_has_a_bar_and_a_dot_for_each_trace(tmp_path: Path) -> None:
    root, (left, right) = draw("reuse", tmp_path), (200, 475)
    runs = {(run["arm"], run["trace"], run["store"]): run for run in figures("reuse")["runs"]}
    ours, own = (
        [
            100 * run["share"]
            for (of, _, store), run in runs.items()
            if of == arm and store in reuse.SIZES
        ]
        for arm in ("default", "vllm")
    )
    assert sorted(f"{share:.1f} %" for share in ours + own) == sorted(
        text for text in texts(root) if re.fullmatch(r"[\d.]+\.\d %", text)
    )
    bars = [ends(path) for path in filled(root, drawing.OURS)]
    assert {start for start, _ in bars} == {left}
    at = [left + share / 100 * (right - left) for share in sorted(ours)]
    assert sorted(end for _, end in bars) == pytest.approx(at, abs=0.01)
    dots = sorted(float(dot.get("x", "")) for dot in root.iter(f"{SVG}use"))
    at = [left + share / 100 * (right - left) for share in sorted(own)]
    assert dots == pytest.approx(at, abs=0.01)
    assert limit(root) == right


def filled(root: ElementTree.Element, color: str) -> list[str]:
    return [
        path.get("d", "")
        for path in root.iter(f"{SVG}path")
        if f"fill: {color}" in path.get("style", "")
    ]


def ends(path: str) -> tuple[float, float]:
    across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]
    return min(across), max(across)


def limit(root: ElementTree.Element) -> float:
    (line,) = (
        path.get("d", "")
        for path in root.iter(f"{SVG}path")
        if f"stroke: {drawing.TEXT}; stroke-width: 2;" in path.get("style", "")
    )
    assert "limit" in texts(root)
    left, right = ends(line)
    assert left == right
    return left


def test_performance_has_dots_on_a_logarithmic_axis(tmp_path: Path) -> None:
    root = draw("performance", tmp_path)
    asked = figures("performance")["answers"]["repeats"]["seconds"]
    # Plain reads are in the table alone.
    seconds = {arm: each for arm, each in asked.items() if not arm.startswith("plain ")}
    ticks = {text.text: float(text.get("x", "nan")) for text in root.iter(f"{SVG}text")}
    left, decade = ticks["0.1 s"], ticks["1 s"] - ticks["0.1 s"]

    def at(second: float) -> float:
        return left + decade * math.log10(second / 0.1)

    medians = [median(measured) for measured in seconds.values()]
    every = [second for measured in seconds.values() for second in measured]
    dots = sorted(float(dot.get("x", "")) for dot in root.iter(f"{SVG}use"))
    assert dots == pytest.approx(sorted(map(at, medians + every)), abs=0.01)
    assert limit(root) == pytest.approx(at(median(seconds["vllm"])), abs=0.01)
    assert {f"{middle:.3f} s" for middle in medians} <= set(texts(root))
    assert f"{median(seconds['cold']) / median(seconds['ram']):.0f}×" in texts(root)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    some = {"answers": {"repeats": {"rounds": 1, "seconds": {"cold": [3.0], "ram": [0.1]}}}}
    assert "hit on disk" not in texts(draw("performance", tmp_path, some))
    chat = {"trace": "chat", "store": "restarted", "arm": "T4", "share": 0.9}
    other = {"trace": "agent", "store": "restarted", "arm": "default", "share": 0.8}
    shown = texts(draw("reuse", tmp_path, {"runs": [chat, other]}))
    assert "80.0 %" in shown and "90.0 %" not in shown and "chat" not in shown
    performance.draw({"answers": {}}, tmp_path / "none.svg")
    reuse.draw({"runs": [chat]}, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
