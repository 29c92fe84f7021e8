# SPDX-License-Identifier: Apache-2.0
"""Families beside those of test_families, from RAM: python -m benchmarks.families tries more."""

from pathlib import Path

import pytest

from benchmarks.families.plan import PLAN
from benchmarks.families.trial import attempt

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("family", ["lfm2_moe", "jamba", "qwen3_5", "nemotron_h", "zamba2"])
def test_hits_are_as_deep_and_answers_equal_as_in_vllms_own_cache(
    family: str, model_dir: Path
) -> None:
    result = attempt(family, "v1", model_dir, PLAN[family], seconds=300)
    assert result.starts and not result.why, result.why
    assert result.served and result.equal and result.hit_tokens > 0
    assert result.wrong_shows, "an answer without its states was taken for right"
