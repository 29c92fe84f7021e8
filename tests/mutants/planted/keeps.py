# SPDX-License-Identifier: Apache-2.0
"""What a request asks to be evicted last."""

from tests.mutants.defect import one

KEEPS, NAMES = "lmcache_hybrid/scheduler/keeps.py", "lmcache_hybrid/storage/kept_names.py"
RANK, STORE = "lmcache_hybrid/storage/keeps.py", "lmcache_hybrid/storage/lmcache_store.py"
ORDER = "lmcache_hybrid/storage/eviction_order.py"
CONFIGS = "lmcache_hybrid/scheduler/request_configs.py"
QUEUE = "lmcache_hybrid/scheduler/lookup_queue.py"

DEFECTS = (
    one(
        "the gauge of kept bytes waits for a keep under way",
        NAMES,
        "        now = time.monotonic()\n        sizes = self._bytes_by_end.copy()",
        "        with self._lock:\n            now = time.monotonic()\n"
        "        sizes = self._bytes_by_end.copy()",
    ),
    one(
        "kept bytes count past their end",
        NAMES,
        "        return sum(size for until, size in sizes.items() if until > now)\n",
        "        return sum(sizes.values())\n",
    ),
    one(
        "a kept record is evicted first",
        NAMES,
        "        if name not in self._kept:\n",
        "        if name in self._kept:\n",
    ),
    one(
        "a kept record is evicted like any other",
        NAMES,
        "        if not kept:\n            return list",
        "        if True:\n            return list",
    ),
    one(
        "nothing is evicted once only kept records are left",
        NAMES,
        "        if not found:  # only",
        "        if False:  # only",
    ),
    one(
        "each eviction walks past all kept records",
        ORDER,
        "        policy.postpone(keys)\n",
        "        pass\n",
    ),
    one(
        "LFU walks past all kept records with each eviction",
        ORDER,
        "            policy.update_on_hit(key, index)\n",
        "            pass\n",
    ),
    one(
        "a keep outlives a drop that came between its calls",
        KEEPS,
        "        if self._queue.num_drops != drops:",
        "        if False:",
    ),
    one(
        "nobody hears of a broken keep that did not end",
        KEEPS,
        "        except _RefusedError:\n            logger.warning_once(",
        "        except _RefusedError:\n            logger.debug(",
    ),
    one(
        "MRU walks past all kept records with each eviction",
        ORDER,
        "last=isinstance(policy, LRUCachePolicy))",
        "last=True)",
    ),
    one(
        "a record is kept for ever",
        NAMES,
        "        return kept is not None and kept[0] > time.monotonic()\n",
        "        return kept is not None\n",
    ),
    one(
        "what has ended takes its share for ever",
        NAMES,
        "        while self._ends and self._ends[0] <= now:\n",
        "        while False:\n",
    ),
    one(
        "a shorter time ends a longer one",
        NAMES,
        "                if ends < until:\n",
        "                if True:\n",
    ),
    one(
        "a salt may keep more than its share",
        NAMES,
        "            if own > OF_SALT * most:\n",
        "            if own > most:\n",
    ),
    one(
        "all salts together may keep more than their share",
        NAMES,
        "            if self._total + new > most:\n",
        "            if False:\n",
    ),
    one(
        "what is kept already takes its share twice",
        NAMES,
        "for name, size in records.items() if name not in self._names)",
        "for name, size in records.items())",
    ),
    one(
        "all salts have one share",
        KEEPS,
        'hashlib.blake2b(salt, digest_size=16).digest() if salt else b"",',
        'b"",',
    ),
    one(
        "a keep of one rank is done although another has no room",
        KEEPS,
        'next((each.full[name] for each in results if each.full[name]), "")',
        "results[0].full[name]",
    ),
    one(
        "finding out whether there is room keeps",
        RANK,
        "    if request.backends is None:\n",
        "    for kept in store.kept.values():\n        kept.keep(records, request.salt, 60)\n"
        "    if request.backends is None:\n",
    ),
    one(
        "states of all boundaries are kept",
        RANK,
        "    wanted = used_keys(prefix, request.boundaries, plan, prefix.inner)\n",
        "    blocks = range(len(prefix.hashes))\n"
        "    wanted = [key for at in blocks for key in block_keys(prefix, at, plan)]\n",
    ),
    one(
        "pages are kept without the states of their deepest hit",
        KEEPS,
        "found.boundary * (not found.tail)}",
        "0}",
    ),
    one(
        "a boundary that the request will not compute counts as kept",
        KEEPS,
        "        computes &= save and start < end and marks.ends_at(end)\n",
        "        computes &= save and marks.ends_at(end)\n",
    ),
    one(
        "no step ends where a request keeps its prompt",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "        if computed < self.kept <= self.last:\n",
        "        if False:\n",
    ),
    one(
        "a keep's lookup leaves records pinned",
        QUEUE,
        "next(self._numbers), claims=False)",
        "next(self._numbers))",
    ),
    one(
        "lookups wait until a keep is done",
        QUEUE,
        "            if result.done():\n                with self._lock:\n",
        "            while not result.done():\n"
        "                try:\n                    next(parts)\n"
        "                except StopIteration as end:\n"
        "                    result.set_result(end.value)\n"
        "            if result.done():\n                with self._lock:\n",
    ),
    one(
        "lookups wait for all keeps",
        QUEUE,
        "            first = len(self._turns) == 1\n",
        "            first = True\n",
    ),
    one(
        "a keep's next call comes before lookups that wait",
        QUEUE,
        "        self._passed = not self._passed and self._begun < self._sent\n",
        "        self._passed = False\n",
    ),
    one(
        "a keep outlives a reset that comes before its last call",
        KEEPS,
        "        if self._epoch != epoch:\n",
        "        if False:\n",
    ),
    one(
        "a keep outlives a drop",
        STORE,
        "            kept.end(engine_keys)\n",
        "            pass\n",
    ),
    one(
        "a keep outlives a reset",
        STORE,
        "            kept.clear()\n",
        "            pass\n",
    ),
    one(
        "a request is told that a reset keeps its prompt",
        "lmcache_hybrid/scheduler/scheduler.py",
        "                tracker.keep.error = tracker.keep.error or RESET\n",
        "                pass\n",
    ),
    one(
        "a request may keep for a year",
        CONFIGS,
        "not 0 <= seconds <= KEEP_SECONDS:",
        "not 0 <= seconds:",
    ),
    one(
        "RAM that LMCache does not use is said to keep",
        "lmcache_hybrid/storage/tiers/ram.py",
        "        if backend.use_hot:\n",
        "        if True:\n",
    ),
    one(
        "what an aborted request has not stored is kept until its time is over",
        "lmcache_hybrid/scheduler/scheduler.py",
        "            if tracker.keep is not None and tracker.keep.promised:\n",
        "            if False:\n",
    ),
    one(
        "what a request has stored is kept no longer once it ends",
        "lmcache_hybrid/scheduler/tracker.py",
        "            keep.promised = 0\n",
        "            pass\n",
    ),
    one(
        "a keep forgets after a preemption what was stored before",
        "lmcache_hybrid/scheduler/scheduler.py",
        "        save = self._planner.plan(tracker, computed, held, block_state)\n"
        "        tracker.settle_keep(self._plan)\n",
        "        save = self._planner.plan(tracker, computed, held, block_state)\n",
    ),
    one(
        "an aborted request ends another's keep",
        NAMES,
        '                if not number or self._names.get(name, (0, b"", 0, 0))[3] == number:\n',
        "                if True:\n",
    ),
    one(
        "a record that two requests keep is that of the last",
        NAMES,
        "number if other == number else 0\n",
        "number\n",
    ),
    one(
        "a record that two requests keep is that of the first",
        NAMES,
        "                if other not in (0, number):",
        "                if False:",
    ),
    one(
        "pages that an aborted request has stored are kept no longer",
        RANK,
        "    for block in range(pages):\n",
        "    for block in range(0):\n",
    ),
    one(
        "what was stored before an aborted request is kept no longer",
        RANK,
        "    stay = set(used_keys(prefix, (boundary,), plan))\n",
        "    stay = set()\n",
    ),
    one(
        "a keep that an aborted request has not made yet takes its share later",
        KEEPS,
        "        promised, keep.promised, keep.broken = keep.promised, 0, True\n",
        "        promised, keep.promised, keep.broken = keep.promised, 0, True\n"
        "        if keep.sent is None:\n            return\n",
    ),
    one(
        "a request that has not stored its prompt is told that it is kept",
        KEEPS,
        "if self.broken and",
        "if False and",
    ),
    one(
        "a preempted request asks the ranks again",
        KEEPS,
        "        if keep.error or keep.pending is not None:\n",
        "        if keep.error:\n",
    ),
    one(
        "the gauge of kept bytes never falls",
        "lmcache_hybrid/worker/worker.py",
        "        if kept != self.counts.kept_bytes:\n",
        "        if any(n > self.counts.kept_bytes[name] for name, n in kept.items()):\n",
    ),
)
