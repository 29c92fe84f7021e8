# SPDX-License-Identifier: Apache-2.0
"""What a request asks to be evicted last."""

from tests.mutants.defect import always, each_of, never, passes

MISTAKES = {
    "lmcache_hybrid/storage/keep_shares.py": {
        "the gauge of kept bytes waits for a keep under way": (
            "        now = time.monotonic()\n        sizes = self._bytes_by_end.copy()",
            "        with self._lock:\n            now = time.monotonic()\n"
            "        sizes = self._bytes_by_end.copy()",
        ),
        "kept bytes count past their end": (
            "        return sum(size for until, size in sizes.items() if until > now)\n",
            "        return sum(sizes.values())\n",
        ),
        "a kept record is evicted first": (
            "        if name not in self._kept:\n",
            "        if name in self._kept:\n",
        ),
        "a kept record is evicted like any other": (
            "        if not kept:\n            return list",
            "        if True:\n            return list",
        ),
        "nothing is evicted once only kept records are left": (
            "        if not found:  # only",
            "        if False:  # only",
        ),
        "a record is kept for ever": (
            "        return kept is not None and kept[0] > time.monotonic()\n",
            "        return kept is not None\n",
        ),
        "what has ended takes its share for ever": (
            "        while self._ends and self._ends[0] <= now:\n",
            "        while False:\n",
        ),
        "a shorter time ends a longer one": always("                if ends < until:\n"),
        "a salt may keep more than its share": (
            "            if own > OF_SALT * most:\n",
            "            if own > most:\n",
        ),
        "all salts together may keep more than their share": never(
            "            if self._total + new > most:\n"
        ),
        "what is kept already takes its share twice": (
            "for name, size in records.items() if name not in self._names)",
            "for name, size in records.items())",
        ),
        "an aborted request ends another's keep": never("                if left:\n"),
        "a record that two requests keep is that of the last": (
            "(*others, own) if",
            "(own,) if",
        ),
        "a record that two requests keep is that of the first": (
            "keeps = (*others, own) if",
            "keeps = keeps or (*others, own) if",
        ),
        "a keep whose time is over holds what a later one has named": (
            "each for each in keeps if each[1] > now and number",
            "each for each in keeps if number",
        ),
        "what an aborted keep has named is kept as long as that one": (
            "max(until for _, until in left), salt",
            "_, salt",
        ),
        "a record that two requests keep stays kept once both are aborted": (
            "if len(others) < KEEPS else",
            "if not others else",
        ),
        "a record that many requests keep is let go with the last of them": (
            "if len(others) < KEEPS else ((0, ",
            "if len(others) < KEEPS else ((number, ",
        ),
    },
    "lmcache_hybrid/storage/eviction_order.py": {
        "each eviction walks past all kept records": passes("        policy.postpone(keys)\n"),
        "LFU walks past all kept records with each eviction": passes(
            "            policy.update_on_hit(key, index)\n"
        ),
        "MRU walks past all kept records with each eviction": (
            "last=isinstance(policy, LRUCachePolicy))",
            "last=True)",
        ),
    },
    "lmcache_hybrid/scheduler/keeps.py": {
        "a keep outlives a drop that came between its calls": (
            "        if self._queue.num_drops != drops:",
            "        if False:",
        ),
        "nobody hears of a broken keep that did not end": (
            "        except _RefusedError:\n            logger.warning_once(",
            "        except _RefusedError:\n            logger.debug(",
        ),
        "all salts have one share": (
            'hashlib.blake2b(salt, digest_size=16).digest() if salt else b"",',
            'b"",',
        ),
        "a keep of one rank is done although another has no room": (
            'next((each.full[name] for each in results if each.full[name]), "")',
            "results[0].full[name]",
        ),
        "pages are kept without the states of their deepest hit": (
            "found.boundary * (not found.tail)}",
            "0}",
        ),
        "a boundary that the request will not compute counts as kept": (
            "        computes &= save and start < end and marks.ends_at(end)\n",
            "        computes &= save and marks.ends_at(end)\n",
        ),
        "a keep outlives a reset that comes before its last call": never(
            "        if self._epoch != epoch:\n"
        ),
        "a keep that an aborted request has not made yet takes its share later": (
            "        promised, keep.promised, keep.broken = keep.promised, 0, True\n",
            "        promised, keep.promised, keep.broken = keep.promised, 0, True\n"
            "        if keep.sent is None:\n            return\n",
        ),
        "a request that has not stored its prompt is told that it is kept": (
            "if self.broken and",
            "if False and",
        ),
        "a preempted request asks the ranks again": (
            "        if keep.error or keep.begun:\n",
            "        if keep.error:\n",
        ),
    },
    "lmcache_hybrid/storage/keeps.py": {
        "finding out whether there is room keeps": (
            "    if request.backends is None:\n",
            "    for kept in store.kept.values():\n"
            "        kept.keep(records, request.salt, 60)\n    if request.backends is None:\n",
        ),
        "states of all boundaries are kept": (
            "    wanted = used_keys(prefix, request.boundaries, plan, prefix.inner)\n",
            "    blocks = range(len(prefix.hashes))\n"
            "    wanted = [key for at in blocks for key in block_keys(prefix, at, plan)]\n",
        ),
        "pages that an aborted request has stored are kept no longer": (
            "    for block in range(pages):\n",
            "    for block in range(0):\n",
        ),
        "what was stored before an aborted request is kept no longer": (
            "    stay = set(used_keys(prefix, (boundary,), plan))\n",
            "    stay = set()\n",
        ),
    },
    "lmcache_hybrid/scheduler/step_ends.py": {
        "no step ends where a request keeps its prompt": never(
            "        if computed < self.kept <= self.last:\n"
        ),
    },
    "lmcache_hybrid/scheduler/lookup_queue.py": {
        "a keep's lookup leaves records pinned": (
            "next(self._numbers), claims=False)",
            "next(self._numbers))",
        ),
        "lookups wait until a keep is done": (
            "        if not self._passed and self._ended(self._turns[0]):\n",
            "        if not self._passed:\n"
            "            for _ in self._turns[0]:\n                pass\n",
        ),
        "lookups wait for all keeps": (
            "            first = len(self._turns) == 1\n",
            "            first = True\n",
        ),
        "a keep's next call comes before lookups that wait": (
            "        self._passed = not self._passed and self._begun < self._sent\n",
            "        self._passed = False\n",
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "a keep outlives a drop": passes("            kept.end(engine_keys)\n"),
        "a keep outlives a reset": passes("            kept.clear()\n"),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a request is told that a reset keeps its prompt": passes(
            "                tracker.keep.error = tracker.keep.error or RESET\n"
        ),
        "what an aborted request has not stored is kept until its time is over": never(
            "            if tracker.keep is not None and tracker.keep.promised:\n"
        ),
        "a keep forgets after a preemption what was stored before": (
            "        tracker.settle_keep(self._plan)\n        if save is not None and",
            "        if save is not None and",
        ),
    },
    "lmcache_hybrid/scheduler/request_options.py": {
        "a request may keep for a year": ("not 0 <= seconds <= KEEP_SECONDS:", "not 0 <= seconds:"),
    },
    "lmcache_hybrid/storage/tiers/ram.py": {
        "RAM that LMCache does not use is said to keep": always("        if backend.use_hot:\n"),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "what a request has stored is kept no longer once it ends": passes(
            "            keep.promised = 0\n"
        ),
    },
    "lmcache_hybrid/worker/worker.py": {
        "the gauge of kept bytes never falls": (
            "        if kept != self.counts.kept_bytes:\n",
            "        if any(n > self.counts.kept_bytes[name] for name, n in kept.items()):\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
