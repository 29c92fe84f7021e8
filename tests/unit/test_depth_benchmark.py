# SPDX-License-Identifier: Apache-2.0
"""The table of how deep prompts hit beside drafters; its engines are those of test_drafts."""

import json
from pathlib import Path

import pytest

from benchmarks.depth import __main__ as depth


def row(vllm: str = "0.33.0", drafts: str = "mtp", stored=(2, 0), **more) -> dict:
    return {
        "vllm": vllm,
        "model": "qwen3_next",
        "drafts": drafts,
        "blocks per U": 1,
        "prompt": 30,
        "alone": [2, 0],
        "own": [2, 0],
        "stored": list(stored),
        **more,
    }


@pytest.mark.parametrize(
    "hit, said", [([0, 0], "0"), ([0, 3], "3 U"), ([2, 0], "2 N"), ([1, 3], "1 N + 3 U")]
)
def test_a_hit_is_said_in_blocks(hit, said):
    assert depth.spoken(hit) == said


def test_a_row_has_all_arms():
    _, _, line = depth.table([row(stored=(1, 0))]).splitlines()
    assert line == "| 0.33.0 | qwen3_next | mtp | N | 2 N + 30 | 2 N | 2 N | 1 N |"
    *_, line = depth.table([row(prompt=0, **{"blocks per U": 4})]).splitlines()
    assert "| N / 4 | 2 N |" in line


def test_rows_of_another_vllm_and_of_other_drafters_stay(tmp_path, monkeypatch):
    out = tmp_path / "depth.json"
    old = [row("0.32.0"), row(drafts="none"), row(stored=(1, 0))]
    out.write_text(json.dumps({"rows": old}))
    monkeypatch.setattr(depth, "measure", lambda *_: [row()])
    depth.main(out, "mtp")
    assert json.loads(out.read_text())["rows"] == [row("0.32.0"), row(drafts="none"), row()]


DOCS = Path(__file__).parents[2] / "docs"
MEASURED = json.loads((DOCS / "generated" / "depth.json").read_text())["rows"]


def test_the_page_has_the_measured_table():
    page = (DOCS / depth.PAGE).read_text()
    assert depth.table(MEASURED) in page


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: " ".join(map(str, depth.part(row))))
def test_no_hit_is_less_deep_than_without_a_connector(row):
    """A row that is needs its reason on the page, and a place here."""
    assert row["own"] >= row["alone"] <= row["stored"]


def test_each_release_has_the_same_rows():
    rows = {(row["model"], row["drafts"], row["blocks per U"], row["prompt"]) for row in MEASURED}
    for release in ("0.32.0", "0.33.0"):
        assert sum(row["vllm"] == release for row in MEASURED) == len(rows)
    assert {row["drafts"] for row in MEASURED} == {"none", "mtp", "mtp-2", "eagle", "ngram"}
