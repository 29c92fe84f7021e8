# SPDX-License-Identifier: Apache-2.0
"""Boundaries inside a block: what is stored, hit and loaded there."""

from tests.mutants.defect import Defect, one

SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
ADMISSION = "lmcache_hybrid/scheduler/admission.py"
SAVE_PLANNER = "lmcache_hybrid/scheduler/save_planner.py"
LOAD_PLANNER = "lmcache_hybrid/scheduler/load_planner.py"
METADATA = "lmcache_hybrid/protocol/metadata.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a unit is advised where it has no effect",
        "lmcache_hybrid/scheduler/short_prompts.py",
        "plan.with_unit(1).unit and not plan.unit",
        "plan.states and not plan.unit",
    ),
    one(
        "prompts shorter than a block are not asked for",
        "lmcache_hybrid/scheduler/arrivals.py",
        "drafter.deepest(request.num_prompt_tokens, unit) if prefix and unit else 0",
        "0",
    ),
    one(
        "the page inside a block is that of the block before",
        SAVE_PLANNER,
        "block_ids[group][end // size] for group in self._plan.attention",
        "block_ids[group][end // size - 1] for group in self._plan.attention",
    ),
    one(
        "a hit inside a block leaves its page out",
        LOAD_PLANNER,
        "    last = boundary + bool(result.tail)",
        "    last = boundary",
    ),
    one(
        "a hit inside a block is one unit too deep",
        ADMISSION,
        "        gain = end - num_computed_tokens\n",
        "        gain = end - num_computed_tokens + (self._plan.unit if result.tail else 0)\n",
    ),
    one(
        "a state is stored as that of another boundary in the same block",
        SAVE_PLANNER,
        "by_boundary.setdefault(tokens, {})[group] = block",
        "by_boundary.setdefault(tracker.inner if inside else tokens, {})[group] = block",
    ),
    one(
        "a partly filled page is stored as the whole one",
        METADATA,
        "            keys = tail_keys(self.prefix, tokens, plan)\n"
        "            pages += zip(keys, (*att",
        "            keys = tail_keys(self.prefix, tokens, plan)\n"
        "            number = tokens // plan.block_size\n"
        "            if number < len(self.prefix.hashes):\n"
        "                size, groups = plan.block_size, plan.attention\n"
        "                full = record_keys(self.prefix, number, size, ATTENTION, groups)\n"
        "                keys[: len(groups)] = full\n"
        "            pages += zip(keys, (*att",
    ),
    one(
        "what lies behind the boundary in a restored page is trusted",
        "lmcache_hybrid/scheduler/tracker.py",
        "            self.stored.attention = result.attention  # less than was sent, "
        "where a save failed\n",
        "            self.stored.attention = result.attention + bool(result.tail)\n",
    ),
    one(
        "blocks of an ended request are freed before they are copied",
        SCHEDULER,
        "        return save is not None\n",
        "        return False\n",
    ),
    one(
        "what an ended request left is saved after a reset",
        SCHEDULER,
        "        self._final.forget()\n",
        "",
    ),
    one(
        "ended requests are not reported",
        "lmcache_hybrid/connector.py",
        "            finished_sending=set(self._metadata.ended),\n",
        "            finished_sending=set(),\n",
    ),
    one(
        "a lookup that nobody waits for claims what lies inside a block anew",
        "lmcache_hybrid/protocol/lookup.py",
        "replace(self, limit=0, limit_tail=0, states_at=())",
        "replace(self, limit=0, states_at=())",
    ),
)
