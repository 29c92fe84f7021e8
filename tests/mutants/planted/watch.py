# SPDX-License-Identifier: Apache-2.0
"""Defects of what warns that nothing is stored or hit."""

from tests.mutants.defect import Defect, one

WATCH = "lmcache_hybrid/scheduler/store_watch.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "prompts that are stored already are taken for unstored",
        WATCH,
        "        if tracker.found or request",
        "        if request",
    ),
    one(
        "an engine that stores warns of prompts that are too short",
        WATCH,
        "or self._holds and tracker.unstored:",
        "or False:",
    ),
    one(
        "a consumer is told each hour that it stores nothing",
        WATCH,
        "        if not self._options.save or",
        "        if",
    ),
    one(
        "requests that end early count as not stored",
        WATCH,
        " or request.num_computed_tokens < request.num_prompt_tokens",
        "",
    ),
    one(
        "saves that are reported after a burst has ended come too late",
        WATCH,
        "seconds < SETTLE_SECONDS or ",
        "",
    ),
    one(
        "a warning is said again with every ten prompts",
        WATCH,
        "        if now < spell.silent_until:\n            return False\n",
        "",
    ),
    one(
        "what every backend failed to write counts as stored",
        WATCH,
        " and (self.in_ram or not failed)",
        "",
    ),
    one(
        "a failed write to a disk below RAM counts as not stored",
        WATCH,
        "(self.in_ram or not failed)",
        "not failed",
    ),
    one(
        "lookups of what the own cache holds count as missed",
        WATCH,
        "could_hit = not asked.floor and (asked",
        "could_hit = (asked",
    ),
    one(
        "an empty store is blamed for missed lookups",
        WATCH,
        "        look = self._holds and could_hit",
        "        look = could_hit",
    ),
    one(
        "what a reset cleared is still held",
        WATCH,
        "        self._holds = False\n        self._unstored",
        "        self._unstored",
    ),
    one(
        "nobody hears that prompts are stored again",
        WATCH,
        '                self._end(self._unstored, "LMCache stores prompts again.")\n',
        "                self._unstored.count = 0\n",
    ),
    one(
        "what ranks count does not reach the watch",
        "lmcache_hybrid/connector.py",
        "                self.scheduler.store_watch.reported(counts)\n",
        "                pass\n",
    ),
    one(
        "a watch that breaks keeps the claim of a request that ends",
        "lmcache_hybrid/scheduler/scheduler.py",
        "        self.prefills.forget(request.request_id)\n        if tracker is not None:\n",
        "        self.prefills.forget(request.request_id)\n"
        "        if tracker is not None:\n            self.store_watch.ended(tracker)\n",
    ),
)
