# SPDX-License-Identifier: Apache-2.0
"""How ``benchmarks.peers`` judges answers, and what its tables say of them."""

from pathlib import Path

import pytest

from benchmarks.peers import report
from benchmarks.peers.arms import ARMS, BASE, RELEASES
from benchmarks.peers.probe import NOISE, judge, prompts
from benchmarks.peers.servers import DAMAGE_EVERY, first_error, spoil

N = 384
PLACES = {"folder": "/tmp/x", "redis": 7, "server": 8, "chunk": N}


def answer(hit: int, *logprobs: float, tokens: str = "ab") -> dict:
    return {"hit": hit, "tokens": list(tokens), "logprobs": list(logprobs), "seconds": 0.1}


def test_an_answer_is_compared_with_the_one_at_its_own_boundary() -> None:
    right = [[answer(0, -1.0, -2.0), answer(N, -1.5, -2.0)], [answer(0, -3.0, -3.0)]]
    asked = [
        answer(N, -1.5, -2.0),
        answer(0, -3.0, -3.0 - NOISE / 2),
        answer(N, -1.0, -2.0),  # what it would be without the hit
        answer(0, -3.0, -3.0, tokens="ac"),
    ]
    found = judge(asked, right, N)
    assert (found["answers"], found["wrong"], found["exact"]) == (4, 2, 1)
    assert [(each["prompt"], each["time"]) for each in found["which"]] == [(0, 1), (1, 1)]
    assert found["which"][0]["as_at"] == [0] and found["largest"] == 0.5
    with pytest.raises(AssertionError, match="at no boundary"):
        judge([answer(N + 1, -1.5, -2.0)], right, N)


def test_the_prompts_are_short_whole_and_branching() -> None:
    asked = prompts(N, "seed")
    lengths = [len(prompt) for prompt in asked]
    assert min(lengths) < N and {N, 2 * N} <= {*lengths} and max(lengths) > 2048
    assert asked[10][: 2 * N + 50] == asked[6][: 2 * N + 50] and asked[10] != asked[6]
    assert asked == prompts(N, "seed") != prompts(N, "other")


def test_a_damaged_record_keeps_its_length_and_no_page_of_it_is_whole() -> None:
    record = bytes(10 * DAMAGE_EVERY)
    changed = spoil(record)
    assert len(changed) == len(record)
    pages = [changed[at : at + DAMAGE_EVERY] for at in range(0, len(record), DAMAGE_EVERY)]
    assert all(any(page) for page in pages)


def test_each_arm_names_its_places_and_a_known_release() -> None:
    for arm in ARMS.values():
        assert arm.release in RELEASES
        for part in (arm.connector, arm.lmcache, list(arm.server or ())):
            assert "$" not in str(arm.filled(part, PLACES))
        assert (arm.store == "files") == ("files" in str((arm.connector, arm.lmcache, arm.server)))


def test_the_line_that_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(Worker pid=1) ERROR 11-29 10:00:00 [a.py:1] ValueError: several groups\n"
        "RuntimeError: Engine core initialization failed.\n\nthe end\n"
    )
    assert first_error(log) == "ValueError: several groups"
    log.write_text("it says\nnothing of use\n")
    assert first_error(log) == "nothing of use"


def figures() -> dict:
    judged = {"answers": 36, "wrong": 0, "exact": 36, "largest": 0.0, "which": []}
    steps = {"one_at_a_time": judged, "four_at_a_time": judged, "hit_share": 0.875}
    again = {"hits": [N, N]}
    made = {"date": "2026-01-02", "machine": "2 cores"}
    probe = {
        **made,
        "large_steps": steps,
        "small_steps": steps | {"hit_share": 0.5},
        "stored_bytes": 42_000_000,
        "engine_restart": again,
        "restart": again | {"hits": [N, 0], "server_says": "size mismatch"},
        "damaged": {"computed": 1, "wrong": 2, "error": 0, "right": 0},
    }
    speed = {**made, "rounds": 2, "median_ttft_ms": [5.0, 6.0], "request_throughput": [4.0, 4.0]}
    speed |= {"vllm_hit_tokens": [10, 10], "external_hit_tokens": [20, 20]}
    speed |= {"prompt_tokens": [50, 50]}
    speed |= {
        "first_token": {"own_ms": [10.0], "stored_ms": [20.0, 99.0], "stored_hits": [N, 0]},
    }
    store = {**made, "own_ms": [10.0, 12.0], "stored_ms": [33.0, 22.0], "stored_hits": [N, N]}
    alone = speed | {"median_ttft_ms": [10.0, 10.0], "request_throughput": [2.0, 8.0]}
    release = {"lmcache": RELEASES[1]}
    rows = {
        f"{BASE} {RELEASES[1]}": {"title": "vLLM alone", **release, "probe": probe, "speed": alone},
        "mp-files-separate": {"title": "files", **release, "probe": probe},
        "mp-old": {"title": "old", **release, "probe": made | {"failed": "ValueError: groups"}},
    }
    rows["mp-files-separate"] |= {"speed": speed, "store": store}
    model = {"family": "qwen3_next", "block_size": N, "limits": [2048, 767]}
    return {"command": "python -m benchmarks.peers", "model": model, "arms": rows}


def test_tables_say_what_was_measured_and_what_does_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- peers:begin -->\n\nstale\n\n<!-- peers:end -->\nAfter.\n")
    report.fill(page, figures())
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "stale" not in text
    damaged = "1 computed, 2 wrong"
    assert f"| files | 0 of 72 | 0 of 72 | 88% | 50% | 42 | yes | 1 of 2 | {damaged} |" in text
    assert "| old | does not run: `ValueError: groups` |" in text
    first = "2.00 (fastest 2.00) | 28 ms; 2.50"
    assert f"| files | {first} | 0.55 (0.50 to 0.60) | 1.25 (0.50 to 2.00) | 60% |" in text
    assert "| vLLM alone, beside LMCache 0.5.7rc2 | 10 ms |  | 10 ms | 5.00 | 20% |" in text
    assert "N = 384; `--max-num-batched-tokens` 2048 and 767" in text and "of 2 rounds" in text
    assert len(list(report.tables(figures()))) == 2
