# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a prefix which another one is computing."""

from tests.mutants.defect import Defect, one

PREFILLS = "lmcache_hybrid/scheduler/shared_prefills.py"
CHECKPOINTS = "lmcache_hybrid/scheduler/checkpoints.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"

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
        "        if gone or wait.still > STILL or",
        "        if gone or",
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
        "each.checkpoints.is_barred(boundary) for each in (leader, follower)",
        "each.checkpoints.is_barred(boundary) for each in (leader,)",
    ),
    one(
        "a request waits for what others compute behind it",
        PREFILLS,
        " or computed < start or",
        " or",
    ),
    one(
        "what is stored under other tags counts as stored",
        PREFILLS,
        "            if leader.prefix.tags == tracker.prefix.tags:",
        "            if True:",
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
        SCHEDULER,
        "tracker.may_load and not request.skip_reading_prefix_cache:\n",
        "tracker.may_load:\n",
    ),
    one(
        "who has waited in vain takes what the store had before",
        SCHEDULER,
        "                gain = self._admission.ask_again(tracker, num_computed_tokens)\n",
        "                pass\n",
    ),
)
