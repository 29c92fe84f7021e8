# SPDX-License-Identifier: Apache-2.0
"""Figures of engines with different models never stand side by side unmarked."""

import json
from pathlib import Path

import pytest

from benchmarks.performance import report
from benchmarks.performance.engines import short_prompt

MODEL = {"family": "f", "layers": 8, "parameters": 2_000_000, "dtype": "float32"}
HERE, THERE = MODEL | {"block_size": 640}, MODEL | {"block_size": 256}
ARMS = ("cold", "vllm", "ram", "disk", "redis")
MARKERS = ("gain", "plot", "limit", *report.NEED_MODEL, "lookup")


def answer(model: dict | None = None, slower: float = 1.0) -> dict:
    made = {"command": "python", "rounds": 1, "date": "2026-01-02", "machine": "2 cores, AVX2"}
    seconds = {arm: [slower / (place + 1)] for place, arm in enumerate(ARMS)}
    return {**made, "seconds": seconds, **({"model": model} if model else {})}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text("".join(f"<!-- {m}:begin -->\nold\n<!-- {m}:end -->\n" for m in MARKERS))
    return file


def part(page: Path, marker: str) -> str:
    return page.read_text().split(f"<!-- {marker}:begin -->")[1].split(f"<!-- {marker}:end -->")[0]


def test_an_answer_of_another_model_removes_those_before_it():
    answers = {"repeats": answer(HERE), "colds": answer(), "lookup": {"transport": {}}}
    report.keep(answers, "whole_blocks", answer(THERE))
    assert answers.keys() == {"whole_blocks", "lookup"}


def test_answers_of_one_model_stay():
    answers = {"repeats": answer(HERE)}
    report.keep(answers, "whole_blocks", answer(dict(HERE)))
    report.keep(answers, "lookup", {"transport": {}})
    assert answers.keys() == {"repeats", "whole_blocks", "lookup"}


def test_a_page_names_each_tables_model_and_machine(page: Path):
    report.fill(page, {"answers": {"repeats": answer(HERE)}})
    made = part(page, "repeats").strip().splitlines()[-1]
    assert made.endswith(
        "2026-01-02; 2 cores, AVX2; f of 8 layers, 2 million parameters, float32, N = 640."
    )


def test_a_page_marks_a_table_without_a_model(page: Path):
    report.fill(page, {"answers": {"repeats": answer()}})
    assert report.EARLIER in part(page, "repeats")


def test_a_page_keeps_no_table_whose_answer_is_gone(page: Path):
    report.fill(page, {"answers": {"repeats": answer(HERE)}})
    report.fill(page, {"answers": {"whole_blocks": answer(HERE)}})
    assert part(page, "repeats").strip() == part(page, "plot").strip() == report.MISSING
    assert "| cold |" in part(page, "whole_blocks")
    assert "old" not in part(page, "limit")


def test_words_of_the_plot_are_its_figures(page: Path):
    report.fill(page, {"answers": {"repeats": answer(HERE, slower=6.0)}})
    words = part(page, "plot")
    assert "after 6.0 s if all is computed, and after 1.20 to 2.00 s on a hit" in words
    assert "answers 3 to 5 times as fast as no hit. It takes 0.40 to 0.67 times as long" in words
    assert "limit is a hit in vLLM's own cache, 3.00 s" in words


def test_words_of_short_prompts_are_the_lengths_measured(page: Path):
    short = answer(HERE) | short_prompt(640)
    report.fill(page, {"answers": {"short_prompts": short}})
    words = part(page, "short_prompts").strip()
    assert words.startswith("500 tokens with `--prefix-match-unit 64`: they hit at 448.")


@pytest.mark.parametrize("size", [128, 256, 384, 576, 640, 784, 8304])
def test_a_short_prompt_hits_inside_the_first_block(size: int):
    short = short_prompt(size)
    assert 0 < short["hit"] < short["tokens"] < size
    # What vLLM keeps of it: the last multiple of the unit that leaves a token to compute.
    assert short["hit"] == (short["tokens"] - 1) // short["unit"] * short["unit"]


def test_the_page_opens_with_gain_and_cost_of_the_file():
    docs = Path(report.__file__).parents[2] / "docs"
    figures = json.loads((docs / "generated/performance.json").read_text())
    whole = docs / "performance.md"
    assert part(whole, "gain").strip() == report._gain(figures["answers"])
    goals = part(docs.parent / "CONTRIBUTING.md", "goals").strip()
    assert goals == report._goals(figures["answers"])
    assert whole.read_text().startswith("# Performance\n\n<!-- gain:begin -->")
