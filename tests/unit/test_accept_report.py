# SPDX-License-Identifier: Apache-2.0
"""The acceptance test's screen and its JSON."""

import dataclasses
import json
import math

import pytest

from lmcache_hybrid.tools.accept.compare import Verdict
from lmcache_hybrid.tools.accept.report import as_json

from .accept_engine import RAM, run, shown


def test_one_screen() -> None:
    lines = shown(run())
    assert len(lines) <= 40 and all(len(line) <= 100 for line in lines)
    text = "\n".join(lines)
    assert "V2 model runner" in text and "NVIDIA H100 (CUDA 13.0)" in text and "N = 16" in text
    assert "Save: copies 0.50 GB/s, 25% of one plain copy (2.00 GB/s)" in text
    assert lines[-1].startswith("PASS")


def test_prompts_that_differ_are_named() -> None:
    lines = shown(run(wrong=16, tiers=[RAM]))
    assert any("2N+1" in line and "differs by" in line for line in lines)
    last = " ".join(lines[-4:])
    assert "FAIL, wrong answers: " in last and "N+1 (RAM)" in last and "missed" not in last
    assert "no wrong" not in last


@pytest.mark.parametrize(
    "options, title, told",
    [
        (
            {"second": {"lose": "RemoteBackend"}},
            "FAIL, no wrong answer, missed hits: ",
            "not N+1 (redis:// after a restart)",
        ),
        (
            {"lose": "LocalCPUBackend"},
            "FAIL, no wrong answer, a problem above: ",
            "records came from ['RemoteBackend'], not from LocalCPUBackend only",
        ),
        (
            {"missing_tiers": ["RemoteBackend"]},
            "FAIL, a problem above: nothing was compared",
            "! RemoteBackend is configured",
        ),
    ],
)
def test_what_is_no_wrong_answer_is_told_apart(options: dict, title: str, told: str) -> None:
    result = run(**options)
    text = " ".join(" ".join(shown(result)).split())
    assert result.verdict is Verdict.FAIL and title in text and told in text


def test_prompts_that_do_not_fit_are_named() -> None:
    result = run(max_model_len=40, tiers=[RAM])
    names = result.plan.left_out
    lines = shown(result)
    assert result.verdict is Verdict.PASS and "2N+1" in names
    text = " ".join(" ".join(lines).split())
    assert f"too long for context, KV cache or LMCache's pool: {', '.join(names)} PASS" in text
    assert f"; {len(names)} prompts not asked. " in lines[-1]
    assert not [line for line in shown(run()) if "ot asked" in line]


def test_the_report_is_plain_json_of_digests() -> None:
    result = run(wrong=16)
    result.checks[0] = dataclasses.replace(result.checks[0], difference=math.inf)
    report = as_json(result)
    text = json.dumps(report, allow_nan=False)
    assert report["verdict"] == "FAIL" and report["checks"][0]["difference"] is None
    assert "ordinary" not in report["facts"]
    prompt = result.told[0].prompts[0]
    assert ", ".join(map(str, prompt[:4])) not in text
    assert {"differs"} <= {each["outcome"] for each in report["checks"]}
