# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of servers counts of a run with new prefixes."""

import json
from pathlib import Path

import pytest

from benchmarks.serve import cold_report, hits
from benchmarks.serve.client import Workload

WORKLOAD = Workload(prefixes=3, each=2, prefix_tokens=4096, suffix_tokens=128, output_tokens=16)
N = 640
BOUNDARY = 3840


@pytest.mark.parametrize(
    "local, external, again",
    [
        (0, 0, 3.0),
        (2 * BOUNDARY, BOUNDARY, 0.0),
        (BOUNDARY, BOUNDARY // 2, 1.5),
    ],
)
def test_prefixes_computed_again(local: int, external: int, again: float) -> None:
    """All prompts but the first of each prefix can hit up to the last boundary in it."""
    counts = {"vllm_hit_tokens": local, "external_hit_tokens": external}
    assert hits.computed_again(counts, WORKLOAD, N) == pytest.approx(again)


@pytest.mark.parametrize(
    "arm, local, external",
    [("unlimited", 0, 0), ("small", 0, 4096), ("ram", 9000, 0), ("redis", 0, 4095)],
)
def test_hits_from_elsewhere_end_the_run(arm: str, local: int, external: int) -> None:
    counts = {"recomputed_tokens": 0, "vllm_hit_tokens": local, "external_hit_tokens": external}
    with pytest.raises(AssertionError):
        hits.check(arm, counts, WORKLOAD)


def test_an_arm_that_shares_is_not_apart() -> None:
    counts = {"recomputed_tokens": 0, "vllm_hit_tokens": 0, "external_hit_tokens": 9000}
    hits.check("ram", counts | {"shared_prefills": 1}, WORKLOAD)
    hits.check("apart", counts | {"shared_prefills": 0}, WORKLOAD)
    with pytest.raises(AssertionError, match="waited for a prefix"):
        hits.check("apart", counts | {"shared_prefills": 1}, WORKLOAD)


def test_the_page_gets_a_table_for_each_family(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- cold:begin -->\nstale\n<!-- cold:end -->\nAfter.\n")
    run = {
        "median_ttft_ms": [100.0, 200.0, 300.0],
        "request_throughput": [2.0, 2.0, 4.0],
        "median_itl_ms": [10.0, 10.0, 10.0],
        "prompt_tokens": [100, 100, 100],
        "vllm_hit_tokens": [20, 20, 20],
        "external_hit_tokens": [50, 50, 50],
        "again": [1.0, 2.0, 3.0],
    }
    twice = {name: [2 * value for value in values] for name, values in run.items()}
    model = {"layers": 8, "parameters": 2_000_000, "dtype": "float32", "block_size": N}
    part = {
        "command": "python -m benchmarks.serve.cold",
        "date": "2026-01-02",
        "machine": "2 cores",
        "rounds": 3,
        "small_pool_blocks": 77,
        "runs": {"unlimited": run, "ram": twice},
    }
    out = tmp_path / "cold.json"
    for family in ("granite4", "qwen3_next"):
        for count in (16, 4):
            cold_report.keep(out, family, {"family": family, **model}, part | {"at_once": count})
    granite = {"family": "granite4", **model}
    cold_report.keep(out, "granite4", granite, part | {"at_once": 4, "rounds": 5})
    other = {"at_once": 16, "rounds": 7, "runs": {"unlimited": run, "small": twice}}
    cold_report.keep(out, "granite4", granite, part | other)
    figures = json.loads(out.read_text())
    cold_report.fill(page, figures)
    text = page.read_text()
    assert "stale" not in text and text.startswith("Before.") and text.endswith("After.\n")
    assert text.count("| 4, unlimited | 200 ms | 2 a second | 10 ms | 30% | 50% | 2.0 |") == 2
    ratio = "2.00 (2.00 to 2.00)"
    assert text.count(f"| 4, ram | {ratio} | {ratio} | {ratio} | 30% | 50% | 4.0 |") == 2
    assert text.index("| 4, ram |") < text.index("| 16, unlimited |"), "by number"
    made = "- 4 at once: `python -m benchmarks.serve.cold`, medians of 5; small pools of 77 blocks;"
    assert made in text and text.count("medians of 3") == 3, "the others are as they were"
    assert len(list(cold_report.tables(figures))) == 2
    assert text.index("| 16, ram |") < text.index("| 16, small |"), "a part of other arms"
    assert text.count("- 16 at once: ") == 3
    cold_report.keep(out, "granite4", granite | {"layers": 4}, part | {"at_once": 4})
    assert len(json.loads(out.read_text())["families"]["granite4"]["parts"]) == 1
