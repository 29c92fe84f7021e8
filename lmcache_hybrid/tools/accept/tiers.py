# SPDX-License-Identifier: Apache-2.0
"""Lists the tiers of a rank's store to test, and settings that prevent the test."""

from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.config.own_options import LOAD_LIMIT_KEY, POLICIES, POLICY_KEY
from lmcache_hybrid.config.stores import all_places
from lmcache_hybrid.config.stores.base import Place

if TYPE_CHECKING:
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore


def _located(store: "LMCacheStore") -> list[Place]:
    """List the places where a lookup may find records, the nearest first."""
    config, there = store._engine.config, store.manager.storage_backends
    asked = config.retrieve_locations or there
    return [p for p in all_places(config) if p.backend in there and p.backend in asked]


def tiers_of(store: "LMCacheStore") -> list[dict[str, Any]]:
    """List the tiers that are written and read, the nearest first; do they survive a restart?"""
    chosen = store._engine.config.store_location
    return [
        {"name": place.backend, "title": place.title, "survives": place.kind.survives}
        for place in _located(store)
        if chosen in (None, place.backend)
    ]


def refusals(options: Options, store: "LMCacheStore", least: int) -> list[str]:
    """List the settings that suppress hits which vLLM's own cache has, one sentence each.

    Args:
        least: tokens of the shortest hit: U, or N.
    """
    found, config = [], store._engine.config
    if not options.save:
        found.append(
            "LMCACHE_FORCE_SKIP_SAVE is set, so nothing is stored that could be tested; unset it "
            "for this test."
        )
    if options.max_tokens_per_load:
        found.append(
            f"{LOAD_LIMIT_KEY}={options.max_tokens_per_load} lets a load bring less than vLLM's "
            "own cache holds, so they cannot be compared; leave it out for this test."
        )
    if options.load_policy != POLICIES[0]:
        found.append(
            f"{POLICY_KEY}={options.load_policy} computes hits where that is faster, so they "
            "cannot be compared; leave it out for this test."
        )
    if options.min_retrieve_tokens > least:
        found.append(
            f"LMCache option min_retrieve_tokens={options.min_retrieve_tokens} leaves hits of "
            f"{least} tokens out, so they cannot be compared; set it to {least} or less for this "
            "test."
        )
    chosen = config.store_location
    nearest = next((place.backend for place in _located(store)), None)
    if chosen and chosen != nearest:
        found.append(
            f"LMCache option store_location={chosen!r} is not the nearest backend that is read, "
            f"{nearest}, so one cannot be told from the other; leave it out for this test, or read "
            f"from it only with retrieve_locations: [{chosen}]."
        )
    return found


def missing_of(store: "LMCacheStore") -> list[str]:
    """List configured stores that LMCache did not open."""
    config, there = store._engine.config, store.manager.storage_backends
    named = (place.backend for place in all_places(config))
    return [name for name in named if name not in there]
