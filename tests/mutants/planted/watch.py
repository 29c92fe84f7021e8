# SPDX-License-Identifier: Apache-2.0
"""Defects of what warns that nothing is stored or hit."""

from tests.mutants.defect import each_of, gone, passes

MISTAKES = {
    "lmcache_hybrid/scheduler/store_watch.py": {
        "an engine that only reads is never told that nothing hits": (
            "fed = self._holds or not self._options.save",
            "fed = self._holds",
        ),
        "prompts that are stored already are taken for unstored": (
            "        if tracker.found or request",
            "        if request",
        ),
        "an engine that stores warns of prompts that are too short": (
            "or self._holds and tracker.unstored:",
            "or False:",
        ),
        "a consumer is told each hour that it stores nothing": (
            "        if not self._options.save or",
            "        if",
        ),
        "requests that end early count as not stored": gone(
            " or request.num_computed_tokens < request.num_prompt_tokens"
        ),
        "saves that are reported after a burst has ended come too late": gone(
            "seconds < SETTLE_SECONDS or "
        ),
        "a warning is said again with every ten prompts": gone(
            "        if now < spell.silent_until:\n            return False\n"
        ),
        "what every backend failed to write counts as stored": gone(
            " and (self.in_ram or not failed)"
        ),
        "a failed write to a disk below RAM counts as not stored": (
            "(self.in_ram or not failed)",
            "not failed",
        ),
        "lookups of what the own cache holds count as missed": (
            "could_hit = could_hit and not (asked.floor and (self._options.save or found))\n",
            "could_hit = bool(could_hit)\n",
        ),
        "an engine that stores nothing is not warned where vLLM has the beginning": (
            " and not (asked.floor and (self._options.save or found))",
            " and not asked.floor",
        ),
        "hits too short to be loaded count as hits": (
            "            if not self._is_short(asked, result):\n",
            "            if True:\n",
        ),
        "an empty store is blamed for missed lookups": (
            "        look = fed and could_hit",
            "        look = could_hit",
        ),
        "saves whose writes fail later count as stored": (
            "        elif failed and not self.in_ram:\n",
            "        elif False:\n",
        ),
        "what a reset cleared is still held": (
            'cleared."""\n        self._holds = self._found = False\n',
            'cleared."""\n',
        ),
        "nobody hears that prompts are stored again": (
            '                self._end(self._unstored, "LMCache stores prompts again.")\n',
            "                self._unstored.count = 0\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "what ranks count does not reach the watch": passes(
            "                self.scheduler.store_watch.reported(counts)\n"
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a watch that breaks keeps the claim of a request that ends": (
            "        self.prefills.forget(request.request_id)\n        if tracker is not None:\n",
            "        self.prefills.forget(request.request_id)\n"
            "        if tracker is not None:\n            self.store_watch.ended(tracker)\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
