# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a prefix which another one is computing."""

from tests.mutants.defect import Defect, one

PREFILLS = "lmcache_hybrid/scheduler/shared_prefills.py"
CHECKPOINTS = "lmcache_hybrid/scheduler/checkpoints.py"
ADMISSION = "lmcache_hybrid/scheduler/admission.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a request waits for one that was preempted",
        PREFILLS,
        "        gone = computed < wait.boundary and not _runs(leader)\n",
        "        gone = False\n",
    ),
    one(
        "a request waits for ever for one that does not move",
        PREFILLS,
        " or wait.still > STILL or",
        " or",
    ),
    one(
        "a request waits for ever for a state that no cache has",
        PREFILLS,
        " or wait.late > LATE:\n",
        ":\n",
    ),
    one(
        "a request waits where the step that ends there is over",
        PREFILLS,
        "            if boundary - computed <= self.step_tokens and not",
        "            if boundary <= computed and not",
    ),
    one(
        "a request waits for less than half a step",
        PREFILLS,
        "            if boundary - start <= self.step_tokens / 2 or",
        "            if boundary <= start or",
    ),
    one(
        "a request waits for a boundary from which it may not start",
        PREFILLS,
        "leader.checkpoints.barred | follower.checkpoints.barred",
        "leader.checkpoints.barred",
    ),
    one(
        "a request waits for what others compute behind it",
        PREFILLS,
        "not start <= computed < boundary:",
        "not computed < boundary:",
    ),
    one(
        "what is stored under other tags counts as stored",
        PREFILLS,
        "            if stores and leader.prefix.tags == tracker.prefix.tags:",
        "            if stores:",
    ),
    one(
        "what its leader did not store counts as stored",
        PREFILLS,
        "            if stores and leader.prefix.tags",
        "            if leader.prefix.tags",
    ),
    one(
        "a request waits for one that stores nothing any more",
        PREFILLS,
        "            if not (_runs(leader) and leader.saving):\n",
        "            if not _runs(leader):\n",
    ),
    one(
        "a request waits for one that has passed the boundary",
        PREFILLS,
        "not start <= computed < boundary:",
        "not start <= computed:",
    ),
    one(
        "a request waits for one that has started over",
        PREFILLS,
        "                wait.over = True\n",
        "                pass\n",
    ),
    one(
        "any number of requests wait",
        PREFILLS,
        " or len(self._waits) >= WAITERS:\n",
        ":\n",
    ),
    one(
        "a leader ends a step for each that waits",
        PREFILLS,
        "        return max(set(near) - follower.checkpoints.barred, default=boundary)\n",
        "        return boundary\n",
    ),
    one(
        "a request waits at another one's boundary from which it may not start",
        PREFILLS,
        "max(set(near) - follower.checkpoints.barred, default",
        "max(near, default",
    ),
    one(
        "who does not start behind another one counts all the same",
        PREFILLS,
        "        if wait is not None and wait.reached:\n",
        "        if wait is not None:\n",
    ),
    one(
        "a request that may not ask yet hashes its boundaries in each pass",
        "lmcache_hybrid/scheduler/lookups.py",
        "        first = isinstance(tracker.phase, NotAsked)",
        "        question_of(tracker, floor, self._plan, limit, tail, 0)\n"
        "        first = isinstance(tracker.phase, NotAsked)",
    ),
    one(
        "a leader whose pages are all stored is not looked at",
        "lmcache_hybrid/scheduler/scheduler.py",
        "        self._planner.meet(tracker, boundary)\n"
        "        self._may_store[tracker.request.request_id] = None\n",
        "        self._planner.meet(tracker, boundary)\n",
    ),
    one(
        "a request waits although another connector may have its prefix",
        "lmcache_hybrid/config/options.py",
        "        share_prefills=own[SHARE_KEY] and alone,\n",
        "        share_prefills=own[SHARE_KEY],\n",
    ),
    one(
        "prefills that are to be shared are not, without a word",
        "lmcache_hybrid/config/options.py",
        "    if asked and not options.alone:\n",
        "    if False:\n",
    ),
    one(
        "a leader ends no step where others wait",
        CHECKPOINTS,
        "        wanted += (meeting for meeting in self.meetings if computed",
        "        wanted += (meeting for meeting in () if computed",
    ),
    one(
        "where others waited before a preemption a step still ends",
        CHECKPOINTS,
        "        self.meetings.clear()\n",
        "",
    ),
    one(
        "a request that may not read a cache waits for one",
        ADMISSION,
        "tracker.may_load and not request.skip_reading_prefix_cache:\n            must_wait",
        "tracker.may_load:\n            must_wait",
    ),
    one(
        "who has waited in vain gives up its hit where others pin much",
        ADMISSION,
        "            if must_wait is None:  # it",
        "            if must_wait is None:\n                self._lookups.admit(tracker)  # it",
    ),
    one(
        "who has waited in vain takes what the store had before",
        ADMISSION,
        "num_computed_tokens, again=True)",
        "num_computed_tokens)",
    ),
)
