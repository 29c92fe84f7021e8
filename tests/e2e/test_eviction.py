# SPDX-License-Identifier: Apache-2.0
"""What a full store keeps."""

from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Engine
from tests.e2e.prompts import prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# With a store of so many GB; a prompt takes about a megabyte.
ROOM, PROMPTS, LENGTH = 0.02, 40, 700


@pytest.mark.parametrize("policy, kept", [({}, True), ({"cache_policy": "LRU"}, False)])
def test_what_was_asked_twice_outlives_prompts_that_come_once(
    model_dir: Path, policy: dict, kept: bool
) -> None:
    """By default; LMCache's LRU evicts it with the others."""
    model = make_model("lfm2", model_dir / "lfm2")
    lmcache = {"local_cpu": True, "max_local_cpu_size": ROOM, **policy}
    with Engine(model, lmcache) as engine:

        def hit(seed: int) -> int:
            engine.forget()
            return engine.ask(prompt(seed, LENGTH)).external

        assert hit(0) == 0 < hit(0)
        for seed in range(1, PROMPTS):
            assert hit(seed) == 0
        assert hit(PROMPTS - 1) > 0  # the newest is there under either
        assert (hit(0) > 0) == kept
        assert hit(1) == 0
        assert engine.counts()["worker"]["skipped_saves"] == 0
