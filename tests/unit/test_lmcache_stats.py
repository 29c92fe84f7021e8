# SPDX-License-Identifier: Apache-2.0
"""What LMCache's own metrics show of this connector's work."""

from types import SimpleNamespace

import pytest
from lmcache.observability import LMCStatsMonitor

from lmcache_hybrid.core.lmcache_stats import LMCacheMonitor
from lmcache_hybrid.protocol.agreement import agree
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.storage.rank_lookup import RankLookup

from .helpers import PLAN, N, Ranks, fill, make_prefix


def hear(rig, monitor) -> None:
    rig.worker.loads._monitor = rig.worker.saves._monitor = monitor


@pytest.fixture
def lmcache() -> LMCStatsMonitor:
    return LMCStatsMonitor()


def test_lmcache_counts_what_its_engine_would(worker, lmcache):
    monitor = LMCacheMonitor(lmcache)
    hear(worker, monitor)
    worker.lookup._monitor = monitor
    worker.saved()
    worker.run(worker.load("good", start=1))
    lost = worker.load("bad")
    worker.store.clear(1)
    worker.run(lost)
    stats = lmcache.get_stats_and_clear()
    assert (stats.interval_store_requests, stats.interval_stored_tokens) == (1, 3 * N)
    assert (stats.interval_lookup_requests, stats.interval_lookup_tokens) == (2, 6 * N)
    assert stats.interval_lookup_hits == 6 * N
    assert (stats.interval_retrieve_requests, stats.interval_requested_tokens) == (2, 5 * N)
    assert stats.interval_hit_tokens == 2 * N
    for times in (stats.time_to_lookup, stats.time_to_retrieve):
        assert len(times) == 2 and all(0 < seconds < 60 for seconds in times)
    assert len(stats.time_to_store) == 1 and 0 < stats.store_speed[0] < 1e9
    left = (lmcache.lookup_requests, lmcache.retrieve_requests, lmcache.store_requests)
    assert left == ({}, {}, {})  # nothing stays open in LMCache


def test_a_skipped_save_is_not_stored_for_lmcache_either(worker, lmcache):
    hear(worker, LMCacheMonitor(lmcache))
    worker.store.reserve = lambda size: None
    worker.saved()
    assert lmcache.get_stats_and_clear().interval_store_requests == 0


def test_a_metric_that_fails_fails_nothing_else(worker):
    """LMCache's monitor asserts; an exception in a load would end the worker's step."""

    def broken(*args):
        raise AssertionError("not this one")

    names = [name for name in vars(LMCStatsMonitor) if name.startswith("on_")]
    monitor = LMCacheMonitor(SimpleNamespace(**dict.fromkeys(names, broken)))
    hear(worker, monitor)
    worker.lookup._monitor = monitor
    worker.saved()
    assert not worker.run(worker.load()).failed_recving
    lost = worker.load("lost")
    worker.store.clear(1)
    assert worker.run(lost).failed_recving == {"lost"}
    counts = worker.worker.counts
    assert (counts.saved_states, counts.loaded_states) == (1, 1) and not counts.skipped_saves
    worker.assert_clean()


def test_further_rounds_of_a_lookup_and_drops_are_not_lookups(lmcache):
    """Ranks that hold different boundaries are asked again."""
    ranks, prefix = Ranks(2), make_prefix(6)
    ranks.lookups[0] = RankLookup(PLAN, ranks.stores[0], LMCacheMonitor(lmcache))
    fill(ranks.stores[0], prefix, 6, (2, 6))
    fill(ranks.stores[1], prefix, 6, (2,))
    assert agree(ranks.ask, LookupRequest("r", prefix, 6, 0)).boundary == 2
    assert len(ranks.questions) == 2
    ranks.lookups[0].answer(LookupRequest("r", prefix, 0, 0))
    ranks.stores[0].readable = lambda: False  # LMCache does not count those either
    ranks.lookups[0].answer(LookupRequest("r", prefix, 6, 0))
    stats = lmcache.get_stats_and_clear()
    assert (stats.interval_lookup_requests, stats.interval_lookup_hits) == (1, 6 * N)
