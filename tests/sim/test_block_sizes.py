# SPDX-License-Identifier: Apache-2.0
"""Groups whose blocks have different sizes: hits at their common multiples, and whole."""

import pytest

from lmcache_hybrid.storage.key_names import parse_key

from .engine import SimEngine
from .program import TRUNKS
from .setup import Setup
from .storage import N, Pool
from .warm import hits


@pytest.mark.parametrize("device", ["", "late"])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("groups", ["sda", "ads", "dss", "smd", "tds"])
def test_hits_end_where_every_groups_blocks_end(groups, drafts, device):
    """Each step checks all pages: of 7 N + 3 tokens 6 N are loaded, the last N are not."""
    pool = Pool()
    setup = Setup(groups=groups, ranks=2, drafts=drafts, blocks=60, device=device)
    engine = SimEngine(setup, pool)
    # The blocks of no group are 2 N x 3 N.
    assert engine.plan.block_size == setup.common == (6 * N if "t" in groups else 2 * N)
    prompt = TRUNKS[0][: 7 * N + 3]
    for name in ("first", "again"):
        engine.add(name, prompt, 5)
        engine.drain()
        engine.reset_prefix_cache(False)
    counts = engine.ranks[0].connector.worker.counts
    assert hits(engine) == 1
    assert counts.loaded_attention == 6 * N // setup.common and counts.loaded_states == 1
    # A token has 8 bytes, whatever the size of vLLM's blocks; a state has 16 bytes.
    pages, states = len(groups) - groups.count("s"), groups.count("s")
    assert counts.loaded_bytes == 6 * N * 8 * pages + 16 * states
    stored = {parse_key(key.to_string()).label for key, _ in pool.records}
    assert stored == {f"{'s' if kind == 's' else 'a'}{i}" for i, kind in enumerate(groups)}
    engine.check_empty()
    pool.close()


def test_the_last_boundary_is_stored_whatever_a_step_holds():
    """vLLM ends a step at the last multiple of N only, 7 N here."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sda", blocks=60, batch=8 * N), pool)
    prompt = TRUNKS[0][: 7 * N + 3]
    for name in ("first", "again"):
        engine.add(name, prompt, 2)
        engine.drain()
        engine.reset_prefix_cache(False)
    assert hits(engine) == 1 and engine.hybrid.counts.hit_tokens.total() == 6 * N
    engine.check_empty()
    pool.close()


def test_a_hit_starts_behind_what_vllm_still_has():
    """Local blocks count in common multiples, too: 2 N of them are local and 4 N are loaded."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sda", blocks=60), pool)
    prompt = TRUNKS[0][: 7 * N + 3]
    for name, tokens, reset in (("long", prompt, True), ("short", prompt[: 3 * N], False)):
        engine.add(name, tokens, 2)
        engine.drain()
        if reset:
            engine.reset_prefix_cache(False)
    engine.add("again", prompt, 2)
    engine.drain()
    counts = engine.ranks[0].connector.worker.counts
    assert hits(engine) == 1 and counts.loaded_attention == 2
    engine.check_empty()
    pool.close()
