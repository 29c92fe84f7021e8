# SPDX-License-Identifier: Apache-2.0
"""Pages that are equal on all ranks are stored once and restored on all."""

import pytest

from lmcache_hybrid.storage.key_names import parse_key
from lmcache_hybrid.storage.record_format import payload_bytes

from .engine import SimEngine
from .setup import Setup
from .storage import N, Pool
from .warm import PROMPT, hits

BLOCKS = len(PROMPT) // N


@pytest.fixture(params=[2, 4])
def engine(request):
    pool = Pool()
    engine = SimEngine(Setup(groups="sms", ranks=request.param), pool)
    engine.add("first", PROMPT, 2)
    engine.drain()
    engine.reset_prefix_cache(False)
    yield engine
    engine.heal()
    engine.drain()
    engine.check_empty()
    pool.close()


def stored(engine: SimEngine) -> dict[str, list]:
    """(rank in the key, bytes of pages) of every record in the store, by group."""
    found: dict[str, list] = {"a1": [], "s0": [], "s2": []}
    for key, memory in engine._pool.records:
        name = parse_key(key.to_string())
        found[name.label].append((name.rank, payload_bytes(memory.get_size())))
    return found


def test_pages_take_their_unique_bytes_and_states_those_of_each_rank(engine):
    found, ranks = stored(engine), len(engine.ranks)
    pages = [engine.ranks[0].connector.worker.pages[group] for group in (0, 1, 2)]
    assert found["a1"] == [(0, pages[1].block_bytes)] * BLOCKS
    for label, each in (("s0", pages[0]), ("s2", pages[2])):
        boundaries = len(found[label]) // ranks
        assert boundaries and sorted(found[label]) == [
            (rank, each.block_bytes) for rank in range(ranks) for _ in range(boundaries)
        ]


def test_every_rank_restores_what_one_stored(engine):
    """The pages themselves are checked in each step, on every rank."""
    engine.add("again", PROMPT, 2)
    engine.drain()
    assert hits(engine) == 1
    counts = [rank.connector.worker.counts for rank in engine.ranks]
    assert [each.loaded_attention for each in counts] == [BLOCKS] * len(engine.ranks)


def test_the_pages_are_equal_on_all_ranks_and_the_states_are_not(engine):
    """Otherwise the tests above would prove nothing."""
    mixes = [rank._mix for rank in engine.ranks]
    assert len({int(mix[1]) for mix in mixes}) == 1
    assert len({int(mix[0]) for mix in mixes}) == len(mixes)


@pytest.mark.parametrize("full", [0, 1])
def test_all_ranks_compute_what_one_could_not_store(engine, full):
    """The first rank's pages are missing on all, the second one's states on that one alone."""
    prompt = PROMPT[::-1]
    engine.stores[full].full = True
    engine.add("second", prompt, 2)
    engine.drain()
    engine.reset_prefix_cache(False)
    engine.heal()
    engine.add("third", prompt, 2)
    engine.drain()
    assert hits(engine) == 0
    engine.reset_prefix_cache(False)
    engine.add("fourth", prompt, 2)
    engine.drain()
    assert hits(engine) == 1
