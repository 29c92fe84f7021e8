# SPDX-License-Identifier: Apache-2.0
"""Hits inside a block (``--prefix-match-unit``): as deep as vLLM's own, and no bit differs.

A cold prompt is computed up to its last multiple of the unit and then to its end, so a hit there
computes what the cold one did, in the same chunks.
"""

import random
from pathlib import Path

import pytest
from engine import Engine

from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = pytest.mark.engine

UNITS = {"qwen3_next": 64, "granite4": 64, "lfm2": 16, "falcon_h1": 64}


def lengths_of(size: int, unit: int) -> list[int]:
    """Prompts shorter than a block, of a block, and longer, near multiples of the unit."""
    return [unit + 1, size // 2, size - 1, size, size + unit + 1, 3 * size - 1]


def prompts_of(family: str, size: int) -> list[list[int]]:
    rng = random.Random(family)
    lengths = lengths_of(size, UNITS[family])
    return [[rng.randrange(10, 250) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    "family, runner",
    [("qwen3_next", "v1"), ("granite4", "v1"), ("lfm2", "v1"), ("qwen3_next", "v2")],
)
def test_a_repeat_hits_as_deep_as_in_vllms_own_cache(family, runner, tmp_path: Path) -> None:
    unit = UNITS[family]
    with Engine(
        make_model(family, tmp_path / family),
        lmcache={"local_cpu": True},
        runner=runner,
        prefix_match_unit=unit,
    ) as engine:
        prompts = prompts_of(family, engine.info["block_size"])
        for ids in prompts if runner == "v1" else prompts[::2]:
            first, local = engine.ask(ids), engine.ask(ids)
            engine.forget()
            again = engine.ask(ids)
            assert again.external == again.cached == local.cached == (len(ids) - 1) // unit * unit
            assert again.output == local.output == first.output, f"{len(ids)} tokens"
