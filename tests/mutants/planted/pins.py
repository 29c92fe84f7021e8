# SPDX-License-Identifier: Apache-2.0
"""What waiting requests pin in LMCache's RAM."""

from tests.mutants.defect import Defect, one

PINS = "lmcache_hybrid/scheduler/pin_limit.py"
LOOKUPS = "lmcache_hybrid/scheduler/lookups.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "any number of requests waits with a hit",
        PINS,
        "self._full = len(self._held) >= FEW and self.bytes >= self._most",
        "self._full = False",
    ),
    one(
        "few requests are looked up only where the pool has room for them",
        PINS,
        "self._full = len(self._held) >= FEW and",
        "self._full =",
    ),
    one(
        "waiting requests pin the whole pool",
        PINS,
        "PART = 0.5",
        "PART = 1.0",
    ),
    one(
        "the head of the queue waits until those behind it pin less",
        PINS,
        "        if request_id == self._head:\n            return True\n",
        "",
    ),
    one(
        "the head of the first pass stays the head",
        PINS,
        "        self._head, self._full = None, False\n",
        "        self._full = False\n",
    ),
    one(
        "once the pool was full nobody but the head is looked up",
        PINS,
        "        self._head, self._full = None, False\n",
        "        self._head = None\n",
    ),
    one(
        "a request that waits for others is overtaken within a pass",
        PINS,
        "        if not self._full:\n            self._take_answers()\n",
        "        if True:\n            self._take_answers()\n",
    ),
    one(
        "a lookup that was answered counts as if it was not, until vLLM asks again",
        PINS,
        "            self._take_answers()\n",
        "",
    ),
    one(
        "a lookup counts once it is answered",
        PINS,
        "        self._hold(request_id, self._keys(request, all_of_it))\n",
        "",
    ),
    one(
        "a lookup counts with all that it might have found",
        PINS,
        "            self._hold(request_id, self._keys(lookup.request, result))\n",
        "            pass\n",
    ),
    one(
        "records that several requests pin count for each",
        PINS,
        "            if holders == 1:\n",
        "            if True:\n",
    ),
    one(
        "records on disk count",
        PINS,
        "            if source == RAM:\n",
        "            if True:\n",
    ),
    one(
        "states on disk count",
        PINS,
        "        if hashes and result.source == RAM:\n",
        "        if hashes:\n",
    ),
    one(
        "what vLLM holds counts",
        PINS,
        "prefix.hashes[request.floor : result.boundary]",
        "prefix.hashes[: result.boundary]",
    ),
    one(
        "the partly filled page does not count",
        PINS,
        "        tail = (prefix.inner[end],) if result.tail else ()\n",
        "        tail = ()\n",
    ),
    one(
        "records of other tags count once",
        PINS,
        "(prefix.tags, each, False) for",
        "((), each, False) for",
    ),
    one(
        "a load still counts as waiting",
        LOOKUPS,
        "        self._pins.forget(tracker.request.request_id)\n        return result\n",
        "        return result\n",
    ),
    one(
        "a claim that was dropped still counts",
        LOOKUPS,
        "        self._pins.forget(tracker.request.request_id)\n        if claim:\n",
        "        if claim:\n",
    ),
    one(
        "a prompt that vLLM holds all of waits for others",
        LOOKUPS,
        "isinstance(tracker.phase, NotAsked) and not nothing",
        "isinstance(tracker.phase, NotAsked)",
    ),
    one(
        "a request that was asked for already waits for others",
        LOOKUPS,
        "isinstance(tracker.phase, NotAsked) and not nothing",
        "not nothing",
    ),
    one(
        "each pass counts a request that waits for others",
        LOOKUPS,
        "                tracker.delayed = True\n",
        "",
    ),
    one(
        "requests that wait are not bounded, because RAM counts as switched off",
        "lmcache_hybrid/scheduler_side.py",
        "config.max_local_cpu_size if config.local_cpu else None",
        "None",
    ),
)
