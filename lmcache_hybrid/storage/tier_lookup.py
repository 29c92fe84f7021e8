# SPDX-License-Identifier: Apache-2.0
"""Locates many records in a rank's tiers, in one call to each.

LMCache's own ``batched_contains`` stops at the first missing key, and asks most remote stores
key by key.
"""

import concurrent.futures
import time
from collections.abc import Callable, Container, Iterable, Sequence

from lmcache.utils import CacheEngineKey
from vllm.logger import init_logger

from lmcache_hybrid.storage.silent_lookups import PAUSE_SECONDS, SilentStores
from lmcache_hybrid.storage.tiers.base import StorageTier

logger = init_logger("vllm.lmcache_hybrid.storage.tier_lookup")


def locate(
    tiers: Iterable[StorageTier],
    keys: Sequence[CacheEngineKey],
    deadline: float,
    silent: SilentStores,
    hidden: Callable[[str], Container[CacheEngineKey]],
) -> list[str | None]:
    """Name the first tier that holds each key, None where none does.

    Each tier is asked for the keys that those before it lack. One that fails or does not
    answer in time counts as empty, with a warning.

    Args:
        tiers: those to ask, the nearest first.
        deadline: ``time.monotonic`` by which the lookup must end. A remote store gets half of
            the time left, so records in nearer tiers can still be claimed when it is silent.
        silent: remote stores that are not asked. Mutated.
        hidden: by tier name, keys not to ask for.
    """
    found: list[str | None] = [None] * len(keys)
    missing = list(range(len(keys)))
    for tier in tiers:
        skipped = hidden(tier.name)
        asked = [at for at in missing if keys[at] not in skipped]
        if not asked:
            continue
        held = _held(tier, [keys[at] for at in asked], deadline, silent)
        for at, is_held in zip(asked, held, strict=True):
            if is_held:
                found[at] = tier.name
        missing = [at for at in missing if found[at] is None]
    return found


def _held(
    tier: StorageTier, keys: Sequence[CacheEngineKey], deadline: float, silent: SilentStores
) -> Sequence[bool]:
    name = tier.name
    if tier.indexed:
        return tier.held(keys, 0.0)
    if name in silent:
        return [False] * len(keys)
    left = max(0.0, deadline - time.monotonic()) / 2
    fair = silent.is_fair(left)
    try:
        held = tier.held(keys, left)
        silent.answered(name)
        return held
    except (TimeoutError, concurrent.futures.TimeoutError):
        if not fair:  # a busy rank began late: not the store's fault
            return [False] * len(keys)
        pause = silent.add(name)
        if silent.is_news(name, "silent"):
            logger.warning(
                "%s did not answer a cache lookup in time (lookup_timeout_ms): it counts as empty "
                "for %.0f s, and then for up to %.0f s at a time. Check the store and the network "
                "to it.",
                name,
                pause,
                PAUSE_SECONDS,
            )
    except Exception as error:
        if silent.is_news(name, type(error).__name__):
            # redis errors leave the server's message out of their repr.
            said = f"{type(error).__name__}: {error}"
            logger.warning("Lookups in %s fail and count as misses: %s", name, said)
    return [False] * len(keys)
