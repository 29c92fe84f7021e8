# SPDX-License-Identifier: Apache-2.0
"""What waiting requests pin in LMCache's RAM."""

from tests.mutants.defect import always, each_of, gone, passes

MISTAKES = {
    "lmcache_hybrid/scheduler/pin_limit.py": {
        "any number of requests waits with a hit": (
            "self._full = len(self._held) >= FEW and self.bytes >= self._most",
            "self._full = False",
        ),
        "few requests are looked up only where the pool has room for them": (
            "self._full = len(self._held) >= FEW and",
            "self._full =",
        ),
        "waiting requests pin the whole pool": ("PART = 0.5", "PART = 1.0"),
        "the head of the queue waits until those behind it pin less": gone(
            "        if request_id == self._head:\n            return True\n"
        ),
        "the head of the first pass stays the head": (
            "        self._head, self._full = None, False\n",
            "        self._full = False\n",
        ),
        "once the pool was full nobody but the head is looked up": (
            "        self._head, self._full = None, False\n",
            "        self._head = None\n",
        ),
        "a request that waits for others is overtaken within a pass": (
            "        if not self._full:\n            self._take_answers()\n",
            "        if True:\n            self._take_answers()\n",
        ),
        "a lookup that was answered counts as if it was not, until vLLM asks again": gone(
            "            self._take_answers()\n"
        ),
        "a lookup counts once it is answered": gone(
            "        self._hold(request_id, self._keys(request, all_of_it))\n"
        ),
        "a lookup counts with all that it might have found": passes(
            "            self._hold(request_id, self._keys(lookup.request, result))\n"
        ),
        "records that several requests pin count for each": always(
            "            if holders == 1:\n"
        ),
        "records on disk count": always("            if source == RAM:\n"),
        "states on disk count": (
            "        if hashes and result.source == RAM:\n",
            "        if hashes:\n",
        ),
        "what vLLM holds counts": (
            "prefix.hashes[request.floor : result.boundary]",
            "prefix.hashes[: result.boundary]",
        ),
        "the partly filled page does not count": (
            "        tail = (prefix.inner[end],) if result.tail else ()\n",
            "        tail = ()\n",
        ),
        "records of other tags count once": (
            "(prefix.tags, each, False) for",
            "((), each, False) for",
        ),
    },
    "lmcache_hybrid/scheduler/lookups.py": {
        "a load still counts as waiting": (
            "        self._pins.forget(tracker.request.request_id)\n        return result\n",
            "        return result\n",
        ),
        "a claim that was dropped still counts": (
            "        self._pins.forget(tracker.request.request_id)\n        if claim:\n",
            "        if claim:\n",
        ),
        "a prompt that vLLM holds all of waits for others": (
            "isinstance(tracker.phase, NotAsked) and not nothing",
            "isinstance(tracker.phase, NotAsked)",
        ),
        "a request that was asked for already waits for others": (
            "isinstance(tracker.phase, NotAsked) and not nothing",
            "not nothing",
        ),
        "each pass counts a request that waits for others": gone(
            "                tracker.delayed = True\n"
        ),
    },
    "lmcache_hybrid/scheduler_side.py": {
        "requests that wait are not bounded, because RAM counts as switched off": (
            "config.max_local_cpu_size if config.local_cpu else None",
            "None",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
