# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a prefix which another one is computing."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/scheduler/shared_prefills.py": {
        "a request waits for one that was preempted": (
            "        gone = computed < wait.boundary and not _runs(leader)\n",
            "        gone = False\n",
        ),
        "a request waits for ever for one that does not move": (" or wait.still > STILL or", " or"),
        "a request waits for ever for a state that no cache has": (
            " or wait.late > LATE:\n",
            ":\n",
        ),
        "a request waits where the step that ends there is over": (
            "            if boundary - computed <= self.step_tokens and not",
            "            if boundary <= computed and not",
        ),
        "a request waits for less than half a step": (
            "            if boundary - start <= self.step_tokens / 2 or",
            "            if boundary <= start or",
        ),
        "a request waits for a boundary from which it may not start": (
            "leader.step_ends.barred | follower.step_ends.barred",
            "leader.step_ends.barred",
        ),
        "a request waits for what others compute behind it": (
            "not start <= computed < boundary:",
            "not computed < boundary:",
        ),
        "what is stored under other tags counts as stored": (
            "            if stores and leader.prefix.tags == tracker.prefix.tags:",
            "            if stores:",
        ),
        "what its leader did not store counts as stored": (
            "            if stores and leader.prefix.tags",
            "            if leader.prefix.tags",
        ),
        "a request waits for one that stores nothing any more": (
            "            if not (_runs(leader) and leader.saving):\n",
            "            if not _runs(leader):\n",
        ),
        "a request waits for one that has passed the boundary": (
            "not start <= computed < boundary:",
            "not start <= computed:",
        ),
        "a request waits for one that has started over": passes(
            "                wait.over = True\n"
        ),
        "any number of requests wait": (" or len(self._waits) >= WAITERS:\n", ":\n"),
        "a leader ends a step for each that waits": (
            "        return max(set(near) - follower.step_ends.barred, default=boundary)\n",
            "        return boundary\n",
        ),
        "a request waits at another one's boundary from which it may not start": (
            "max(set(near) - follower.step_ends.barred, default",
            "max(near, default",
        ),
        "who does not start behind another one counts all the same": (
            "        if wait is not None and wait.reached:\n",
            "        if wait is not None:\n",
        ),
    },
    "lmcache_hybrid/scheduler/lookups.py": {
        "a request that may not ask yet hashes its boundaries in each pass": (
            "        first = isinstance(tracker.phase, NotAsked)",
            "        question_of(tracker, floor, self._plan, limit, tail, 0)\n"
            "        first = isinstance(tracker.phase, NotAsked)",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a leader whose pages are all stored is not looked at": (
            "        self._planner.meet(tracker, boundary)\n"
            "        self._may_store[tracker.request.request_id] = None\n",
            "        self._planner.meet(tracker, boundary)\n",
        ),
    },
    "lmcache_hybrid/config/options.py": {
        "a request waits although another connector may have its prefix": (
            "        share_prefills=own[SHARE_KEY] and alone,\n",
            "        share_prefills=own[SHARE_KEY],\n",
        ),
        "prefills that are to be shared are not, without a word": never(
            "    if asked and not options.alone:\n"
        ),
    },
    "lmcache_hybrid/scheduler/step_ends.py": {
        "a leader ends no step where others wait": (
            "        wanted += (meeting for meeting in self.meetings if computed",
            "        wanted += (meeting for meeting in () if computed",
        ),
        "where others waited before a preemption a step still ends": gone(
            "        self.meetings.clear()\n"
        ),
    },
    "lmcache_hybrid/scheduler/admission.py": {
        "a request that may not read a cache waits for one": (
            "tracker.may_load and not request.skip_reading_prefix_cache:\n            must_wait",
            "tracker.may_load:\n            must_wait",
        ),
        "who has waited in vain gives up its hit where others pin much": (
            "            if must_wait is None:  # it",
            "            if must_wait is None:\n                self._lookups.admit(tracker)  # it",
        ),
        "who has waited in vain takes what the store had before": (
            "num_computed_tokens, again=True)",
            "num_computed_tokens)",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
