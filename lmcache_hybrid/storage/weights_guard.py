# SPDX-License-Identifier: Apache-2.0
"""Stops loads and saves once weights are written into the running model.

The fingerprint names the weights loaded at start-up, not those of a reload in place. vLLM's own
reset skips connectors unless it is asked to include them.
"""

from vllm.logger import init_logger

from lmcache_hybrid.identity.weights import LOADED, LoadedWeights
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.storage.rank_lookup import RankLookup

logger = init_logger("vllm.lmcache_hybrid.storage.weights_guard")


class WeightsGuard:
    """Tells whether this rank still computes with the weights that its fingerprint names.

    Called by the thread that runs the model, and by the one that answers lookups and resets.
    """

    def __init__(self, loaded: LoadedWeights = LOADED) -> None:
        self._loaded = loaded
        self._seen = loaded.changes
        self._unused = False  # since the last reset nothing was computed
        self._said = ""  # why nothing is served now

    def stands(self) -> bool:
        """Whether records may be loaded and stored.

        False from a change of weights until a reset, and from a sleep that discards the weights
        until they are loaded again.
        """
        if self._loaded.discarded:
            self._say(
                "vLLM slept at level 2, which discards the weights: LMCache loads and stores "
                "nothing until they are loaded again (collective_rpc reload_weights)."
            )
            return False
        changes = self._loaded.changes
        if changes != self._seen and self._unused:
            self._seen = changes
        if changes == self._seen:
            self._said = ""
            return True
        self._say(
            "Weights were written into the running model: LMCache loads and stores nothing until "
            "all caches are reset (POST /pause?mode=keep, POST /reset_prefix_cache"
            "?reset_running_requests=true&reset_external=true, with images, audio or video POST "
            "/reset_encoder_cache, too, and POST /resume)."
        )
        return False

    def _say(self, why: str) -> None:
        """Warn once for each change, however many lookups and steps ask."""
        if why != self._said:
            self._said = why
            logger.warning(why)

    def computing(self) -> None:
        """Note that a step computes: a change of weights counts from now on."""
        self._unused = False

    def reset(self) -> None:
        """Note a reset of all caches: results of earlier steps are no longer stored."""
        self._seen, self._unused = self._loaded.changes, True
        self._said = ""


class GuardedLookup:
    """Answers from ``lookup`` while ``guard`` stands."""

    def __init__(self, lookup: RankLookup, guard: WeightsGuard) -> None:
        self._lookup, self._guard = lookup, guard

    def answer(self, request: LookupRequest) -> LookupResult:
        """See :meth:`RankLookup.answer`; UNAVAILABLE once the weights have changed."""
        if self._guard.stands():
            return self._lookup.answer(request)
        self._lookup.release(request.request_id, request.number)
        return UNAVAILABLE

    def refresh(self) -> None:
        """See :meth:`RankLookup.refresh`."""
        self._lookup.refresh()
