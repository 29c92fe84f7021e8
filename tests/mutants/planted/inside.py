# SPDX-License-Identifier: Apache-2.0
"""Boundaries inside a block: what is stored, hit and loaded there."""

from tests.mutants.defect import each_of, gone

MISTAKES = {
    "lmcache_hybrid/scheduler/unit_advice.py": {
        "a unit is advised where it has no effect": (
            "plan.with_unit(1).unit and not plan.unit",
            "plan.states and not plan.unit",
        ),
    },
    "lmcache_hybrid/scheduler/arrivals.py": {
        "prompts shorter than a block are not asked for": (
            "drafter.deepest(request.num_prompt_tokens, unit) if prefix and unit else 0",
            "0",
        ),
    },
    "lmcache_hybrid/scheduler/save_planner.py": {
        "the page inside a block is that of the block before": (
            "block_ids[group][end // size] for group in self._plan.attention",
            "block_ids[group][end // size - 1] for group in self._plan.attention",
        ),
        "a state is stored as that of another boundary in the same block": (
            "by_boundary.setdefault(tokens, {})[group] = block",
            "by_boundary.setdefault(tracker.inner if inside else tokens, {})[group] = block",
        ),
    },
    "lmcache_hybrid/scheduler/load_planner.py": {
        "a hit inside a block leaves its page out": (
            "    last = boundary + bool(result.tail)",
            "    last = boundary",
        ),
    },
    "lmcache_hybrid/scheduler/admission.py": {
        "a hit inside a block is one unit too deep": (
            "        gain = end - num_computed_tokens\n",
            "        gain = end - num_computed_tokens + (self._plan.unit if result.tail else 0)\n",
        ),
    },
    "lmcache_hybrid/protocol/metadata.py": {
        "a partly filled page is stored as the whole one": (
            "            keys = tail_keys(self.prefix, tokens, plan)\n"
            "            pages += zip(keys, (*att",
            "            keys = tail_keys(self.prefix, tokens, plan)\n"
            "            number = tokens // plan.block_size\n"
            "            if number < len(self.prefix.hashes):\n"
            "                size, groups = plan.block_size, plan.attention\n"
            "                full = record_keys(self.prefix, number, size, ATTENTION, "
            "groups)\n                keys[: len(groups)] = full\n"
            "            pages += zip(keys, (*att",
        ),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "what lies behind the boundary in a restored page is trusted": (
            "            self.stored.attention = result.attention  # less than was sent, "
            "where a save failed\n",
            "            self.stored.attention = result.attention + bool(result.tail)\n",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "blocks of an ended request are freed before they are copied": (
            "        return save is not None\n",
            "        return False\n",
        ),
        "what an ended request left is saved after a reset": gone("        self._final.forget()\n"),
    },
    "lmcache_hybrid/connector.py": {
        "ended requests are not reported": (
            "            finished_sending=set(self._metadata.ended),\n",
            "            finished_sending=set(),\n",
        ),
    },
    "lmcache_hybrid/protocol/lookup.py": {
        "a lookup that nobody waits for claims what lies inside a block anew": (
            "replace(self, limit=0, limit_tail=0, states_at=())",
            "replace(self, limit=0, states_at=())",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
