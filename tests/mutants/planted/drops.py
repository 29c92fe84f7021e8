# SPDX-License-Identifier: Apache-2.0
"""What a request asks to be removed."""

from tests.mutants.defect import always, each_of, never, passes

MISTAKES = {
    "lmcache_hybrid/scheduler/drops.py": {
        "a drop lists its prompt's boundaries on the scheduler's thread": (
            "        inner = partial(inner_hashes, request, past, plan)\n",
            "        inner = inner_hashes(request, past, plan).copy\n",
        ),
        "a drop holds its prompt until the next one": never("        if self._turn is pending:\n"),
        "a drop leaves what ends in a partly filled block": (
            "*(-(-boundary // size) for",
            "*(boundary // size for",
        ),
        "a drop does not wait for what this step still saves": (
            "self._awaited = self._step + 2\n",
            "self._awaited = self._step + 1\n",
        ),
        "a drop does not look again for claims that were made while it waited": (
            "        if reached is not None and reached > self._first:\n",
            "        if reached is not None:\n",
        ),
        "a drop ends where the first rank is done": (
            "min(each.block for each in results)",
            "max(each.block for each in results)",
        ),
        "lookups wait for all drops at once": never(
            "            if self._turn is not None and not self._turn.poll(0.0, self._ledger):\n"
        ),
        "a drop's time begins with its turn": (
            "        drop.ends = drop.ends or time.monotonic() + DROP_SECONDS\n",
            "        if drop.pending is None:\n"
            "            drop.ends = time.monotonic() + DROP_SECONDS\n",
        ),
        "a drop waits for its turn for ever": always(
            "                if time.monotonic() <= drop.ends:\n"
        ),
        "a drop waits for a call without an answer for ever": (
            "        elif time.monotonic() > self._ends:",
            "        elif called and time.monotonic() > self._ends:",
        ),
        "a drop of many records takes as long as it likes": (
            "        elif time.monotonic() > self._ends:",
            "        elif not called and time.monotonic() > self._ends:",
        ),
        "a drop removes records after it was answered": (
            "        if self._over:\n            return\n        if self._request",
            "        if self._request",
        ),
        "a drop that was stopped half way says that nothing was removed": never(
            "        if why and self._begun:\n"
        ),
        "a drop that fails is said to be done": ('"failed" if error else "done"', '"done"'),
    },
    "lmcache_hybrid/worker/saver.py": {
        "a drop does not wait for copies of a device": passes(
            "            self._finisher.submit(int).result(seconds)\n"
        ),
    },
    "lmcache_hybrid/storage/drops.py": {
        "records that another request loads are removed": (
            '        return DropResult(first, refusal=IN_USE if used else "")\n',
            "        return DropResult(first)\n",
        ),
        "a drop removes the block before its offset": (
            "            if key.boundary > request.start\n",
            "            if key.boundary >= request.start\n",
        ),
        "addresses of a store are told to clients": (
            '            failure = f"{error.backend} could not',
            '            failure = f"{error} could not',
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "a claim that was released holds up drops for ever": (
            "            claims = [claim for claim in self._claims if claim.held]\n",
            "            claims = list(self._claims)\n",
        ),
        "a drop is refused for the claims of a prompt with other tags": (
            "any(key.block_hash in hashes and key.tags == tags for key in keys)",
            "any(key.block_hash in hashes for key in keys)",
        ),
        "records that were dropped from a remote store are still announced": passes(
            "                    self._residency.discarded(key)\n"
        ),
    },
    "lmcache_hybrid/protocol/hit_records.py": {
        "a drop leaves boundaries inside a block": (
            "            if tokens in prefix.inner:\n",
            "            if tokens not in prefix.inner:\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/remote.py": {
        "a drop does not wait for writes to a remote store": (
            "        return self._connector.in_flight.any_of(self._names(keys))\n",
            "        return False\n",
        ),
    },
    "lmcache_hybrid/storage/remote/record_connector.py": {
        "a write that failed is in flight for ever": (
            "            self._writes[key] -= 1\n",
            "            self._writes[key] -= 0\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/disk.py": {
        "a drop does not wait for writes to local_disk": (
            "            return not self.backend.put_tasks.isdisjoint(keys)\n",
            "            return False\n",
        ),
    },
    "lmcache_hybrid/storage/remote/redis.py": {
        "a drop fails where Redis has closed an idle connection": (
            "        again = [key for key, each in zip(keys, answers) if",
            "        again = [_checked(each) for key, each in zip(keys, answers) if",
        ),
        "one node of a cluster that is lost makes all a miss": (
            "        if lost and len(lost) == len(answers):\n",
            "        if lost:\n",
        ),
    },
    "lmcache_hybrid/scheduler/arrivals.py": {
        "a request that drops its records stores them again": (
            "steered = drop is not None or prefetch is not None",
            "steered = prefetch is not None",
        ),
        "a request that prefetches stores its prompt": (
            "steered = drop is not None or prefetch is not None",
            "steered = drop is not None",
        ),
        "a prefetch whose load failed is said to be done": (
            "failed=not tracker.may_load",
            "failed=False",
        ),
    },
    "lmcache_hybrid/scheduler/request_options.py": {
        "true counts as one token": (
            "    if type(start) is not int or start < 0:\n",
            "    if not isinstance(start, int) or start < 0:\n",
        ),
        "a wrong offset drops all of a prompt": (
            "    if type(start) is not int or start < 0:\n",
            "    if type(start) is int and start < 0:\n",
        ),
        "a drop is done although a prefetch was asked beside it": never(
            "    if len(several) > 1:\n"
        ),
    },
    "lmcache_hybrid/scheduler/admission.py": {
        "a prefetch is computed where that is faster": always(
            "            if tracker.prefetch is None:\n"
        ),
    },
    "lmcache_hybrid/scheduler/prefetches.py": {
        "a prefetch forgets what it has loaded once that has ended": (
            "        self.local = self.asked\n        if result is None:\n",
            "        self.local = self.asked\n        self.loaded.clear()\n"
            "        if result is None:\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
