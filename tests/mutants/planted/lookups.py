# SPDX-License-Identifier: Apache-2.0
"""Lookups, claims and what a request remembers."""

from tests.mutants.defect import Defect, each_of, gone, passes

RAM = "lmcache_hybrid/storage/tiers/ram.py"


MISTAKES = {
    "lmcache_hybrid/scheduler/lookup_queue.py": {
        "an error while a cancelled lookup's claims are dropped leaves them for ever": (
            '        except Exception as error:\n            later = "the claims',
            '        except TimeoutError as error:\n            later = "the claims',
        ),
    },
    "lmcache_hybrid/storage/silent_lookups.py": {
        "a store is blamed for a question that began too late": (
            "        return seconds > 0 and seconds >= FAIR_PART * self._longest\n",
            "        return seconds >= 0 * FAIR_PART\n",
        ),
        "each lookup in a store that fails is a line of the log": (
            "        return self._said.setdefault((name, kind), LessOften()).is_news()\n",
            "        return True\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/disk.py": {
        "a claim unpins the file that came after its own": (
            "                for entry in entries:\n                    entry.unpin()\n",
            "                for key in keys:\n                    self._index[key].unpin()\n",
        ),
    },
    "lmcache_hybrid/storage/rank_lookup.py": {
        "each boundary is asked for by itself": (
            "ends, batch = ends[batch:], CANDIDATES",
            "ends, batch = ends[batch:], 1",
        ),
        "the deepest boundary is asked for in a call of its own": (
            "self._add([*keys, *self._needs(self._blocks(ends), self._floor), *more])",
            "self._add(keys)",
        ),
        "a state without its window pages counts as stored": (
            "for end in self._whole(ends, 0)}",
            "for end in ends if all(key in self.where for key in self._states(end))}",
        ),
        "a state counts as stored although it has just been evicted": passes(
            "                states.discard(boundary)  # some of it has just been evicted\n"
        ),
        "a state that no hit may end at is evicted as if it had not been used": (
            "                whole = past if tail else {boundary, *past}\n",
            "                whole = () if tail else {boundary}\n",
        ),
        "one state is enough inside a block": (
            "            if end in whole or all(key in self.where for key in tails[end]):\n",
            "            if end in whole or end in tails:\n",
        ),
        "a lookup forgets what the one before it used": (
            "        self.refresh()\n        started = ",
            "        started = ",
        ),
        "of a window only the last page is looked at": (
            "                gap[boundary] < window.first(floor, boundary)\n",
            "                gap[boundary] < boundary - 1\n",
        ),
        "the end of a lookup's time is not seen between its questions": (
            "        self._check_wanted(request)\n        return self._store.locate",
            "        return self._store.locate",
        ),
        "a claim is made when nobody waits for it any more": (
            "            self._check_wanted(request)\n            claim = ",
            "            claim = ",
        ),
        "a claim that a load took stays filed": (
            "self._claims.pop(request_id, (0, None))[1]",
            "self._claims.get(request_id, (0, None))[1]",
        ),
        "a drop takes the claim of a later question": (
            "            if claim is None or claimed_by > number:\n",
            "            if claim is None:\n",
        ),
        "a drop gives up a later question that is being answered": (
            "request_id == answering and latest <= number",
            "request_id == answering",
        ),
    },
    "lmcache_hybrid/scheduler/load_planner.py": {
        "the last state of a prompt of whole blocks is saved at every repeat": (
            "    behind = (last,) if max(limit, unread) < last else ()\n",
            "    behind = ()\n",
        ),
    },
    "lmcache_hybrid/protocol/agreement.py": {
        "a state that one rank lacks counts as stored": (
            "set.intersection(*(set(result.states) for result in results))",
            "set(results[0].states)",
        ),
    },
    "lmcache_hybrid/storage/rpc.py": {
        "what a lookup found is evicted as if it had not been used": gone(
            "        self._refresh()\n"
        ),
        "a rank answers when nobody waits any more": (
            "ANSWER_WITHIN * self._timeout_ms",
            "self._timeout_ms",
        ),
    },
    "lmcache_hybrid/storage/tier_lookup.py": {
        "a store that is slow takes all the time of a lookup": (
            "max(0.0, deadline - time.monotonic()) / 2",
            "max(0.0, deadline - time.monotonic())",
        ),
        "every lookup waits for a store that does not answer": gone(
            "    if name in silent:\n        return [False] * len(keys)\n"
        ),
        "a store that answers again is left alone as long as before": gone(
            "        silent.answered(name)\n"
        ),
    },
    "lmcache_hybrid/core/backoff.py": {
        "one lookup without an answer pauses all others for the longest time": (
            "        seconds = min(self._next, self._longest)\n",
            "        seconds = self._longest\n",
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "the load of an aborted request runs to its end": (
            "        def restore(part: list[tuple[RecordKey, Block]]) -> None:\n"
            "            self._check_wanted(load)\n",
            "        def restore(part: list[tuple[RecordKey, Block]]) -> None:\n",
        ),
        "the load of an aborted request retries parts that found no room": (
            "                self._check_wanted(load)\n                pace.check()\n"
            "                self._restore_part(claim, piece, after, pace)\n",
            "                pace.check()\n"
            "                self._restore_part(claim, piece, after, pace)\n",
        ),
        "a request's next load is stopped with the one before": gone(
            "            self._unwanted.discard(request_id)\n"
        ),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "what a failed save left out is never stored": (
            "            self.stored.attention = result.attention  #",
            "            self.stored.attention = max(self.stored.attention, result.attention)  #",
        ),
        "a state whose save failed is never stored": gone(
            "        self.stored.forget(self.stored.attention)\n"
        ),
    },
    "lmcache_hybrid/scheduler/waits.py": {
        "every pass waits anew for a store that is slow": ("if waits else 0.0", "if True else 0.0"),
        "no pass waits for its second question for a request": (
            "lookup.sent >= self._began",
            "lookup.sent >= self._began and lookup.request.number < 2",
        ),
    },
}
DEFECTS = (
    *each_of(MISTAKES),
    Defect(
        "a claim pins with what LMCache's pin monitor takes away",
        (
            (RAM, "                memory.ref_count_up()\n", "                memory.pin()\n"),
            (RAM, "        memory.ref_count_down()\n", "        memory.unpin()\n"),
        ),
    ),
)
