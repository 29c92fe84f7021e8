# SPDX-License-Identifier: Apache-2.0
"""vLLM's own hits inside a block (``--prefix-match-unit``) answer as the uninterrupted prefill.

The scheduler splits a cold prompt at its last multiple of the unit, where the repeat resumes. So
both are computed in the same chunks, and not one bit may differ.
"""

import random
from pathlib import Path

import pytest
from engine import Engine

from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = pytest.mark.engine

FAMILIES = ("qwen3_next", "granite4", "lfm2")
REPAIRED = "Repaired vLLM's copy on write"


@pytest.mark.parametrize(
    "family, runner", [(family, "v1") for family in FAMILIES] + [("qwen3_next", "v2")]
)
def test_a_repeat_is_answered_as_at_first(family, runner, tmp_path: Path):
    rng = random.Random(family)
    with Engine(
        make_model(family, tmp_path / family),
        lmcache={"local_cpu": True},
        runner=runner,
        prefix_match_unit=16 if family == "lfm2" else 64,
    ) as engine:
        size = engine.info["block_size"]
        unit = 16 if family == "lfm2" else 64
        lengths = (
            unit + 1,
            max(size // 2, unit + 1),
            size - 1,
            size,
            size + unit + 1,
            3 * size - 1,
        )
        if runner == "v2":
            lengths = (unit + 1, size - 1, size + unit + 1)
        for length in lengths:
            ids = [rng.randrange(10, 250) for _ in range(length)]
            first, again = engine.ask(ids), engine.ask(ids)
            assert first.cached == 0
            assert again.cached == (length - 1) // unit * unit > 0 == again.external, length
            assert again.output == first.output, f"{length} tokens, N = {size}"
        assert engine.log.count(REPAIRED) == 1
