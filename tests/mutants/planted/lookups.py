# SPDX-License-Identifier: Apache-2.0
"""Lookups, claims and what a request remembers."""

from tests.mutants.defect import Defect, one

RAM = "lmcache_hybrid/storage/tiers/ram.py"

WORKER = "lmcache_hybrid/worker/worker.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
ADMISSION = "lmcache_hybrid/scheduler/admission.py"
LOOKUP = "lmcache_hybrid/protocol/lookup.py"

DEFECTS = (
    one(
        "an error while a cancelled lookup's claims are dropped leaves them for ever",
        "lmcache_hybrid/scheduler/lookup_queue.py",
        '        except Exception as error:\n            later = "the claims',
        '        except TimeoutError as error:\n            later = "the claims',
    ),
    one(
        "a store is blamed for a question that began too late",
        "lmcache_hybrid/storage/silent_stores.py",
        "        return seconds > 0 and seconds >= FAIR_PART * self._longest\n",
        "        return seconds >= 0 * FAIR_PART\n",
    ),
    Defect(
        "a claim pins with what LMCache's pin monitor takes away",
        (
            (RAM, "                memory.ref_count_up()\n", "                memory.pin()\n"),
            (RAM, "        memory.ref_count_down()\n", "        memory.unpin()\n"),
        ),
    ),
    one(
        "a claim unpins the file that came after its own",
        "lmcache_hybrid/storage/tiers/disk.py",
        "                for entry in entries:\n                    entry.unpin()\n",
        "                for key in keys:\n                    self._index[key].unpin()\n",
    ),
    one(
        "each boundary is asked for by itself",
        "lmcache_hybrid/storage/rank_lookup.py",
        "ends, batch = ends[batch:], CANDIDATES",
        "ends, batch = ends[batch:], 1",
    ),
    one(
        "the deepest boundary is asked for in a call of its own",
        "lmcache_hybrid/storage/rank_lookup.py",
        "self._add([*keys, *self._needs(self._blocks(ends), self._floor), *more])",
        "self._add(keys)",
    ),
    one(
        "the last state of a prompt of whole blocks is saved at every repeat",
        "lmcache_hybrid/scheduler/load_planner.py",
        "    behind = (last,) if max(limit, unread) < last else ()\n",
        "    behind = ()\n",
    ),
    one(
        "a state that one rank lacks counts as stored",
        "lmcache_hybrid/protocol/agreement.py",
        "set.intersection(*(set(result.states) for result in results))",
        "set(results[0].states)",
    ),
    one(
        "a state without its window pages counts as stored",
        "lmcache_hybrid/storage/rank_lookup.py",
        "for end in self._whole(ends, 0)}",
        "for end in ends if all(key in self.where for key in self._states(end))}",
    ),
    one(
        "a state counts as stored although it has just been evicted",
        "lmcache_hybrid/storage/rank_lookup.py",
        "                states.discard(boundary)  # some of it has just been evicted\n",
        "                pass\n",
    ),
    one(
        "a state that no hit may end at is evicted as if it had not been used",
        "lmcache_hybrid/storage/rank_lookup.py",
        "                whole = past if tail else {boundary, *past}\n",
        "                whole = () if tail else {boundary}\n",
    ),
    one(
        "one state is enough inside a block",
        "lmcache_hybrid/storage/rank_lookup.py",
        "            if end in whole or all(key in self.where for key in tails[end]):\n",
        "            if end in whole or end in tails:\n",
    ),
    one(
        "what a lookup found is evicted as if it had not been used",
        "lmcache_hybrid/storage/rpc.py",
        "        self._refresh()\n",
        "",
    ),
    one(
        "a lookup forgets what the one before it used",
        "lmcache_hybrid/storage/rank_lookup.py",
        "        self.refresh()\n        started = ",
        "        started = ",
    ),
    one(
        "of a window only the last page is looked at",
        "lmcache_hybrid/storage/rank_lookup.py",
        "                gap[boundary] < window.first(floor, boundary)\n",
        "                gap[boundary] < boundary - 1\n",
    ),
    one(
        "the end of a lookup's time is not seen between its questions",
        "lmcache_hybrid/storage/rank_lookup.py",
        "        self._check_wanted(request)\n        return self._store.locate",
        "        return self._store.locate",
    ),
    one(
        "a claim is made when nobody waits for it any more",
        "lmcache_hybrid/storage/rank_lookup.py",
        "            self._check_wanted(request)\n            claim = ",
        "            claim = ",
    ),
    one(
        "a store that is slow takes all the time of a lookup",
        "lmcache_hybrid/storage/tier_lookup.py",
        "max(0.0, deadline - time.monotonic()) / 2",
        "max(0.0, deadline - time.monotonic())",
    ),
    one(
        "every lookup waits for a store that does not answer",
        "lmcache_hybrid/storage/tier_lookup.py",
        "    if name in silent:\n        return [False] * len(keys)\n",
        "",
    ),
    one(
        "a store that answers again is left alone as long as before",
        "lmcache_hybrid/storage/tier_lookup.py",
        "        silent.answered(name)\n",
        "",
    ),
    one(
        "each lookup in a store that fails is a line of the log",
        "lmcache_hybrid/storage/silent_stores.py",
        "            return False\n        said.fail()\n",
        "            pass\n        said.fail()\n",
    ),
    one(
        "a rank answers when nobody waits any more",
        "lmcache_hybrid/storage/rpc.py",
        "ANSWER_WITHIN * self._timeout_ms",
        "self._timeout_ms",
    ),
    one(
        "one lookup without an answer pauses all others for the longest time",
        "lmcache_hybrid/core/backoff.py",
        "        seconds = min(self._next, self._longest)\n",
        "        seconds = self._longest\n",
    ),
    one(
        "the load of an aborted request runs to its end",
        "lmcache_hybrid/worker/loads.py",
        "        def restore(part: list[tuple[RecordKey, Block]]) -> None:\n"
        "            self._check_wanted(load)\n",
        "        def restore(part: list[tuple[RecordKey, Block]]) -> None:\n",
    ),
    one(
        "the load of an aborted request retries parts that found no room",
        "lmcache_hybrid/worker/loads.py",
        "                self._check_wanted(load)\n                pace.check()\n"
        "                self._restore_part(claim, piece, after, pace)\n",
        "                pace.check()\n"
        "                self._restore_part(claim, piece, after, pace)\n",
    ),
    one(
        "a request's next load is stopped with the one before",
        "lmcache_hybrid/worker/loads.py",
        "            self._unwanted.discard(request_id)\n",
        "",
    ),
    one(
        "what a failed save left out is never stored",
        "lmcache_hybrid/scheduler/tracker.py",
        "            self.stored.attention = result.attention  #",
        "            self.stored.attention = max(self.stored.attention, result.attention)  #",
    ),
    one(
        "a state whose save failed is never stored",
        "lmcache_hybrid/scheduler/tracker.py",
        "        self.stored.forget(self.stored.attention)\n",
        "",
    ),
    one(
        "a claim that a load took stays filed",
        "lmcache_hybrid/storage/rank_lookup.py",
        "self._claims.pop(request_id, (0, None))[1]",
        "self._claims.get(request_id, (0, None))[1]",
    ),
    one(
        "a drop takes the claim of a later question",
        "lmcache_hybrid/storage/rank_lookup.py",
        "            if claim is None or claimed_by > number:\n",
        "            if claim is None:\n",
    ),
    one(
        "a drop gives up a later question that is being answered",
        "lmcache_hybrid/storage/rank_lookup.py",
        "request_id == answering and latest <= number",
        "request_id == answering",
    ),
    one(
        "every pass waits anew for a store that is slow",
        "lmcache_hybrid/scheduler/waits.py",
        "if waits else 0.0",
        "if True else 0.0",
    ),
    one(
        "no pass waits for its second question for a request",
        "lmcache_hybrid/scheduler/waits.py",
        "lookup.sent >= self._began",
        "lookup.sent >= self._began and lookup.request.number < 2",
    ),
)
