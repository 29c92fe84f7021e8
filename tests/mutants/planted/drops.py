# SPDX-License-Identifier: Apache-2.0
"""What a request asks to be removed."""

from tests.mutants.defect import one

DROPS, RANK = "lmcache_hybrid/scheduler/drops.py", "lmcache_hybrid/storage/drops.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
REMOTE = "lmcache_hybrid/storage/tiers/remote.py"
REDIS = "lmcache_hybrid/storage/remote/redis.py"
CONFIGS = "lmcache_hybrid/scheduler/request_configs.py"

DEFECTS = (
    one(
        "a drop does not wait for what this step still saves",
        DROPS,
        "self._awaited = self._step + 2\n",
        "self._awaited = self._step + 1\n",
    ),
    one(
        "a drop does not wait for copies of a device",
        "lmcache_hybrid/worker/saver.py",
        "            self._finisher.submit(int).result(seconds)\n",
        "            pass\n",
    ),
    one(
        "a drop does not look again for claims that were made while it waited",
        DROPS,
        "        if reached is not None and reached > self._first:\n",
        "        if reached is not None:\n",
    ),
    one(
        "records that another request loads are removed",
        RANK,
        '        return DropResult(first, refusal=IN_USE if used else "")\n',
        "        return DropResult(first)\n",
    ),
    one(
        "a claim that was released holds up drops for ever",
        STORE,
        "            claims = [claim for claim in self._claims if claim.held]\n",
        "            claims = list(self._claims)\n",
    ),
    one(
        "a drop is refused for the claims of a prompt with other tags",
        STORE,
        "any(key.block_hash in hashes and key.tags == tags for key in keys)",
        "any(key.block_hash in hashes for key in keys)",
    ),
    one(
        "a drop removes the block before its offset",
        RANK,
        "            if key.boundary > request.start\n",
        "            if key.boundary >= request.start\n",
    ),
    one(
        "a drop leaves boundaries inside a block",
        "lmcache_hybrid/protocol/prefix.py",
        "            if tokens in prefix.inner:\n",
        "            if tokens not in prefix.inner:\n",
    ),
    one(
        "a drop ends where the first rank is done",
        DROPS,
        "min(each.block for each in results)",
        "max(each.block for each in results)",
    ),
    one(
        "lookups wait for all drops at once",
        "lmcache_hybrid/scheduler/drops.py",
        "            if self._turn is not None and not self._turn.poll(0.0, self._ledger):\n",
        "            if False:\n",
    ),
    one(
        "a drop's time begins with its turn",
        DROPS,
        "        drop.ends = drop.ends or time.monotonic() + DROP_SECONDS\n",
        "        if drop.pending is None:\n"
        "            drop.ends = time.monotonic() + DROP_SECONDS\n",
    ),
    one(
        "a drop waits for its turn for ever",
        DROPS,
        "                if time.monotonic() <= drop.ends:\n",
        "                if True:\n",
    ),
    one(
        "a drop waits for a call without an answer for ever",
        DROPS,
        "        elif time.monotonic() > self._ends:",
        "        elif called and time.monotonic() > self._ends:",
    ),
    one(
        "a drop of many records takes as long as it likes",
        DROPS,
        "        elif time.monotonic() > self._ends:",
        "        elif not called and time.monotonic() > self._ends:",
    ),
    one(
        "a drop removes records after it was answered",
        DROPS,
        "        if self._over:\n            return\n        if self._request",
        "        if self._request",
    ),
    one(
        "a drop that was stopped half way says that nothing was removed",
        "lmcache_hybrid/scheduler/drops.py",
        "        if why and self._begun:\n",
        "        if False:\n",
    ),
    one(
        "a drop does not wait for writes to a remote store",
        REMOTE,
        "        return self._connector.in_flight.any_of(self._names(keys))\n",
        "        return False\n",
    ),
    one(
        "a write that failed is in flight for ever",
        "lmcache_hybrid/storage/remote/record_connector.py",
        "            self._writes[key] -= 1\n",
        "            self._writes[key] -= 0\n",
    ),
    one(
        "a drop does not wait for writes to local_disk",
        "lmcache_hybrid/storage/tiers/disk.py",
        "            return not self.backend.put_tasks.isdisjoint(keys)\n",
        "            return False\n",
    ),
    one(
        "records that were dropped from a remote store are still announced",
        STORE,
        "                    self._residency.discarded(key)\n",
        "                    pass\n",
    ),
    one(
        "a drop fails where Redis has closed an idle connection",
        REDIS,
        "            answers = [failure] * len(keys)\n",
        "            raise failure\n",
    ),
    one(
        "a request that drops its records stores them again",
        "lmcache_hybrid/scheduler/arrivals.py",
        "steered = drop is not None or prefetch is not None",
        "steered = prefetch is not None",
    ),
    one(
        "true counts as one token",
        CONFIGS,
        "    if type(start) is not int or start < 0:\n",
        "    if not isinstance(start, int) or start < 0:\n",
    ),
    one(
        "a wrong offset drops all of a prompt",
        CONFIGS,
        "    if type(start) is not int or start < 0:\n",
        "    if type(start) is int and start < 0:\n",
    ),
    one(
        "a drop that fails is said to be done",
        DROPS,
        '"failed" if error else "done"',
        '"done"',
    ),
    one(
        "addresses of a store are told to clients",
        RANK,
        '            failure = f"{error.backend} could not',
        '            failure = f"{error} could not',
    ),
    one(
        "a request that prefetches stores its prompt",
        "lmcache_hybrid/scheduler/arrivals.py",
        "steered = drop is not None or prefetch is not None",
        "steered = drop is not None",
    ),
    one(
        "a prefetch is computed where that is faster",
        "lmcache_hybrid/scheduler/admission.py",
        "            if tracker.prefetch is None:\n",
        "            if True:\n",
    ),
    one(
        "a prefetch forgets what it has loaded once that has ended",
        "lmcache_hybrid/scheduler/prefetches.py",
        "        self.local = self.asked\n        if result is None:\n",
        "        self.local = self.asked\n        self.loaded.clear()\n"
        "        if result is None:\n",
    ),
    one(
        "a prefetch whose load failed is said to be done",
        "lmcache_hybrid/scheduler/arrivals.py",
        "failed=not tracker.may_load",
        "failed=False",
    ),
    one(
        "a drop is done although a prefetch was asked beside it",
        CONFIGS,
        "    if len(several) > 1:\n",
        "    if False:\n",
    ),
)
