# SPDX-License-Identifier: Apache-2.0
"""Drafters of several MTP modules, for which vLLM keeps known tokens behind a prefill's steps."""

import pytest
from vllm.config import SpeculativeConfig

from .offers import CHUNKS
from .program import TRUNKS, Run, Tally
from .setup import Setup
from .storage import N

DRAFTS = 3


@pytest.mark.parametrize("more", [1, 2, DRAFTS])
@pytest.mark.parametrize("blocks, checkpoint", [(2, 2 * N), (8, 0)], ids=["checkpoint", "again"])
def test_no_step_is_to_end_where_vllm_ends_none(monkeypatch, blocks, checkpoint, more):
    """It would be shortened to no token at all, for ever."""
    monkeypatch.setattr(
        SpeculativeConfig, "use_multi_module_mtp", lambda self: self.method == "mtp"
    )
    shape = dict(groups="sa", blocks=120, batch=20 * N, drafts=DRAFTS, mtp=True, runner="v2")
    run = Run(Setup(**shape, checkpoint=checkpoint), tally := Tally())
    (engine,) = run.engines
    for name in ("first", "again"):
        engine.add(name, TRUNKS[0][: blocks * N + more], 3)
        engine.drain()
        engine.reset_prefix_cache(False)
    run.play([])
    assert tally.events["hits"]


@pytest.mark.parametrize("batch", [2 * N, 2 * N + DRAFTS, 3 * N - 1])
def test_no_end_of_a_chunk_is_stored_that_is_computed_again(monkeypatch, batch):
    monkeypatch.setattr(
        SpeculativeConfig, "use_multi_module_mtp", lambda self: self.method == "mtp"
    )
    shape = dict(groups="sa", blocks=120, batch=batch, drafts=DRAFTS, mtp=True, runner="v2")
    run = Run(Setup(**shape, chunk_ends=True), tally := Tally())
    (engine,) = run.engines
    engine.add("first", TRUNKS[0][: 12 * N + 5], 3)
    engine.drain()
    run.play([])
    assert tally.events["states saved"] and not tally.events[CHUNKS]
