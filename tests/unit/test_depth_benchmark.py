# SPDX-License-Identifier: Apache-2.0
"""The table of how deep prompts hit beside drafters; its engines are those of test_drafts."""

import json

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
