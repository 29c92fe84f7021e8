# SPDX-License-Identifier: Apache-2.0
"""docs/gpu.md says what the reports of a GPU say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import TABLE, TIMES, table, times
from lmcache_hybrid.core.sizes import GIB
from lmcache_hybrid.tools.sizing.plan import RAM_RATE

ROOT = Path(__file__).parents[2]
REPORTS = sorted((ROOT / "docs" / "generated" / "gpu").glob("*.json"))


@pytest.mark.parametrize("place, made", [(TABLE, table), (TIMES, times)], ids=["answers", "times"])
def test_the_tables_are_those_of_the_reports(place, made):
    found = place.search((ROOT / "docs" / "gpu.md").read_text())
    assert found is not None
    assert found[0] == made([json.loads(path.read_text()) for path in REPORTS])


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_every_report_is_of_a_gpu_and_passed(path):
    report = json.loads(path.read_text())
    assert report["verdict"] == "PASS" and report["facts"]["device_type"] == "cuda"
    assert [rank["wrong"] for rank in report["copies"]] == [0]
    hits = [check for check in report["checks"] if check["external"]]
    assert {check["where"].split(",")[0] for check in hits} == {"RAM", "local disk after a restart"}
    # What the page says of those that are not equal.
    others = [check for check in report["checks"] if check["outcome"] != "equal"]
    assert {(check["where"], check["outcome"]) for check in others} <= {
        ("RAM, at once", "within noise")
    }
    lost = min(report["noise"]["lost"].values())
    assert all(check["difference"] < min(lost, report["noise"]["wrong"]) / 5 for check in others)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver to try")
def test_without_a_gpu_the_drivers_test_says_so():
    command = [sys.executable, "-m", "benchmarks.gpu.batches"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("There is no CUDA device here")


def test_plan_assumes_the_fastest_load_of_the_reports():
    """And the page has the slowest and the fastest, of saves and of loads."""
    copies = [rank for path in REPORTS for rank in json.loads(path.read_text())["copies"]]
    page = " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    loads, saves = (
        sorted(rank["bytes"] / rank[way] for rank in copies) for way in ("scatter", "gather")
    )
    assert RAM_RATE == round(loads[-1] / GIB, 1)
    assert f"saved at {saves[0] / 1e9:.1f} to {saves[-1] / 1e9:.1f} GB/s" in page
    assert f"loaded at {loads[0] / 1e9:.1f} to {loads[-1] / 1e9:.1f} (2.5 GiB/s" in page
