# SPDX-License-Identifier: Apache-2.0
"""Events that promise what does not hit, or hide what does."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/scheduler/event_prefixes.py": {
        "a boundary is announced without its states": gone(
            "            and self._holds(node, self._plan.states)\n"
        ),
        "a boundary is announced with one of its states": (
            "            and self._holds(node, self._plan.states)\n",
            "            and self._holds(node, self._plan.states[:1])\n",
        ),
        "a boundary is announced once one rank holds it": (
            "        return all(len(node.tiers.get(group, ())) == self._ranks for group in "
            "groups)\n",
            "        return all(node.tiers.get(group) for group in groups)\n",
        ),
        "a boundary is announced without the pages before it": (
            "        return before and self._holds(node, self._plan.attention)\n",
            "        return self._holds(node, self._plan.attention)\n",
        ),
        "boundaries behind an evicted page stay announced": (
            "                if not (moved or reach > 1):\n",
            "                if not reach > 1:\n",
        ),
        "an evicted window page withdraws no boundary behind it": (
            "                if not (moved or reach > 1):\n",
            "                if not moved:\n",
        ),
        "each boundary is counted in all blocks before it": (
            "            if before and current.below:\n",
            "            if before and current.below and change > 1:\n",
        ),
        "a window counts pages in front of one that is missing": (
            "            return 0\n        return min(most",
            "            pass\n        return min(most",
        ),
        "pages are announced that no boundary needs": (
            "self._refusing or not node.below:",
            "self._refusing:",
        ),
        "states are announced at boundaries that cannot be restored": (
            "        groups = self._groups if node.ready else self._pages\n",
            "        groups = self._groups\n",
        ),
        "the fastest rank decides where a record lies": (
            "return max(tiers.values()) if",
            "return min(tiers.values()) if",
        ),
        "a rank that loads nothing is not heeded": ("        if self._refusing or", "        if"),
        "blocks that nobody holds are remembered for ever": (
            "        while len(self._unheld) > KEPT_UNHELD:\n",
            "        while len(self._unheld) > 1 << 40:\n",
        ),
        "a block is forgotten while what follows it is learned": (
            "            self._unheld[node] = None\n",
            "            self._unheld[node] = None\n"
            "            if len(self._unheld) > KEPT_UNHELD:\n"
            "                self._prune(self._unheld.popitem(last=False)[0])\n",
        ),
    },
    "lmcache_hybrid/scheduler/events.py": {
        "a block is announced by the hash of the one before": (
            "block_hashes=[maybe_convert_block_hash(BlockHash(block.block_hash))],",
            "block_hashes=[maybe_convert_block_hash(BlockHash(parent or block.block_hash))],",
        ),
        "a block is announced with the tokens of the next one": (
            "        start, lora, ahead = at * self._size, request.lora_request, None\n",
            "        start, lora, ahead = (at + 1) * self._size, request.lora_request, None\n",
        ),
        "what is gone from one medium is withdrawn from another": (
            "            medium, locality, ownership = WHERE[tier]\n",
            "            medium, locality, ownership = WHERE[RAM]\n",
        ),
        "reports from before a reset count": (
            "            if report.epoch != self._epoch:\n",
            "            if report.epoch > self._epoch:\n",
        ),
        "records of tagged requests are announced to all": (
            "        if prefix.tags != own:\n",
            "        if prefix.tags != own and not prefix.tags:\n",
        ),
        "a store that hangs keeps an idle engine busy": (
            "return bool(self._writing) and time.monotonic() < self._until",
            "return bool(self._writing)",
        ),
        "the end of an idle engine's writes is not published": (
            "return bool(self._writing) and time.monotonic() < self._until",
            "return False",
        ),
        "what a lookup found is not announced": (
            "        self.learn(request, prefix, result.attention, inner)\n",
            "        self.learn(request, prefix, 0, inner)\n",
        ),
        "an idle engine waits for what ranks find at the start": (
            "        self._writing: set[int] = set()\n        self._until = 0.0\n",
            "        self._writing: set[int] = {0}\n        self._until = time.monotonic() + 1\n",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a reset withdraws nothing": passes("            self.events.reset(self._epoch)\n"),
        "the scheduler takes no report of its ranks": passes(
            "            self.events.receive(output.kv_cache_events)\n"
        ),
        "what is stored is not made known to the events": never(
            "        if save is not None and self.events is not None:\n"
        ),
    },
    "lmcache_hybrid/storage/residency.py": {
        "what a pool evicts is not withdrawn": (
            "            value = super().pop(key, *default)\n            touched.append(key)\n",
            "            value = super().pop(key, *default)\n",
        ),
        "a damaged record stays announced where it cannot be removed": (
            "            self._unconfirmed.pop(key, None)\n            self._lose_remotely(key)\n",
            "            self._unconfirmed.pop(key, None)\n",
        ),
        "what a shared store has lost stays announced": passes(
            "                    self._lose_remotely(key)\n"
        ),
        "a record is announced before a shared store holds it": (
            "                    if key in held:\n"
            "                        self._hold_remotely(key)\n",
            "                    self._hold_remotely(key)\n",
        ),
        "a record that a shared store did not take is asked for for ever": (
            "                    if key in held or self._unconfirmed[key] < time.monotonic():\n",
            "                    if key in held:\n",
        ),
        "an older tier hides the nearer one": (
            "            if key in index:\n                return tier\n",
            "            if key in index and tier is self._indexes[-1][0]:\n"
            "                return tier\n",
        ),
        "a slower write of an evicted record is not noticed": gone(
            "                self._expect(key, name)  # a slower write of it may be under way\n"
        ),
        "what a rank stores after a reset is never announced": gone(
            "            self._epoch = epoch\n"
        ),
        "a restart reports a part of what a large disk holds": (
            "self._expected[key] = RecordName(header.group, header.block_hash, header.tags)\n",
            "self._expect(key, RecordName(header.group, header.block_hash, header.tags))\n",
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "backends that are not read from count": (
            "                if name in (engine.retrieve_locations or (name,)):\n",
            "                if name:\n",
        ),
        "what lies on disk at the start is not reported": (
            "            residency.restored if residency is not None else lambda key, "
            "header: None,\n",
            "            lambda key, header: None,\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "what ranks report does not reach the scheduler": (
            "        return RankReports([report]) if report else None\n",
            "        return None\n",
        ),
        "vLLM gets no events of the store": (
            "        return self._events.drain() if self._events else []\n",
            "        return []\n",
        ),
        "an idle engine publishes nothing more": (
            "        if self._events is not None and self._events.pending:\n",
            "        if False:\n",
        ),
        "a reset of vLLM's own cache hides what the store holds": passes(
            "            self._events.cleared()\n"
        ),
    },
    "lmcache_hybrid/protocol/record_reports.py": {
        "of the ranks' reports only the first one's reaches the scheduler": passes(
            "        self.reports.extend(events)\n"
        ),
    },
}
DEFECTS = each_of(MISTAKES)
