# SPDX-License-Identifier: Apache-2.0
"""Defects that the fast tests must find. Each is a real mistake somebody could make here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One planted mistake.

    Attributes:
        name: what goes wrong.
        edits: (file, text that must occur exactly once, its replacement).
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]


def _one(name: str, file: str, old: str, new: str) -> Defect:
    return Defect(name, ((file, old, new),))


SCHEDULER = "lmcache_hybrid/scheduler.py"
WORKER = "lmcache_hybrid/worker.py"
LOOKUP = "lmcache_hybrid/lookup.py"
STORE = "lmcache_hybrid/lmcache_store.py"
RECORD = "lmcache_hybrid/record.py"
CONNECTOR = "lmcache_hybrid/connector.py"
RPC = "lmcache_hybrid/rpc.py"
PAGES = "lmcache_hybrid/pages.py"
GROUPS = "lmcache_hybrid/groups.py"
PREFIX = "lmcache_hybrid/prefix.py"
COMPAT = "vllm_patch/compat.py"
COPIES = "lmcache_hybrid/copies.py"
COUNTS = "lmcache_hybrid/counts.py"
METRICS = "lmcache_hybrid/metrics.py"

DEFECTS = (
    # What is stored
    _one(
        "the state of another boundary is stored",
        WORKER,
        "(end - 1, ids) for end, ids in save.states",
        "(max(0, end - 2), ids) for end, ids in save.states",
    ),
    _one(
        "attention pages are off by one block",
        SCHEDULER,
        "tuple(block_ids[group][block] for group in self._plan.attention)",
        "tuple(block_ids[group][max(0, block - 1)] for group in self._plan.attention)",
    ),
    _one(
        "states are found by their position in the block table, not by vLLM's hand-off",
        SCHEDULER,
        "states = self._states_to_save(tracked, computed, offers.get(request_id, ()))",
        """table, size = block_state.get_block_ids(request_id), self._plan.block_size
            ends = range(1, computed // size + 1)
            found = [(g, table[g][e - 1], e * size) for e in ends for g in self._plan.states]
            states = self._states_to_save(tracked, computed, found)""",
    ),
    _one(
        "a boundary is stored that the step does not reach",
        SCHEDULER,
        " or tokens > computed",
        "",
    ),
    _one(
        "a state is stored although one group was not offered",
        SCHEDULER,
        "if blocks.keys() >= set(self._plan.states):",
        "if blocks and blocks.setdefault(self._plan.states[0], next(iter(blocks.values()))) "
        "and [blocks.setdefault(g, next(iter(blocks.values()))) for g in self._plan.states]:",
    ),
    _one(
        "offers of requests that are not scheduled are stored",
        SCHEDULER,
        "if tracked is None or request_id not in scheduled or not tracked.save:",
        "scheduled.setdefault(request_id, 0)\n            if tracked is None or not tracked.save:",
    ),
    Defect(
        "blocks are copied before the forward wrote them",
        (
            (
                CONNECTOR,
                "        self._metadata = metadata\n",
                "        self._metadata = metadata\n"
                "        if self.worker is not None:\n"
                "            self.worker.save(metadata)\n",
            ),
            (CONNECTOR, "            self.worker.save(self._metadata)\n", "            pass\n"),
        ),
    ),
    _one(
        "a stored boundary is remembered after its load failed",
        SCHEDULER,
        "                tracked.saved_states.clear()\n",
        "",
    ),
    # What counts as a hit
    _one(
        "the smallest answer of the ranks is taken without agreement",
        LOOKUP,
        "if all(answer.boundary == lowest for answer in answers):",
        "if answers:",
    ),
    _one(
        "one state group is enough",
        LOOKUP,
        "states = record_keys(prefix, boundary - 1, size, STATE, plan.states)",
        "states = record_keys(prefix, boundary - 1, size, STATE, plan.states[-1:])",
    ),
    _one(
        "the last token is loaded too",
        SCHEDULER,
        "limit = min((request.num_tokens - 1) // size, len(tracked.prefix.hashes))",
        "limit = min(request.num_tokens // size, len(tracked.prefix.hashes))",
    ),
    _one(
        "after a failed load the same boundary is promised again",
        SCHEDULER,
        "                tracked.load_failed = True\n",
        "",
    ),
    _one(
        "the load starts one block early of what vLLM holds",
        SCHEDULER,
        "start = boundary - num_external_tokens // size",
        "start = max(0, boundary - num_external_tokens // size - 1)",
    ),
    _one(
        "the state goes to the last block of the table",
        SCHEDULER,
        "block_ids[g][boundary - 1] if boundary <= len(block_ids[g]) else NULL_BLOCK",
        "block_ids[g][-1]",
    ),
    _one(
        "the user's tags are left out of the store's key",
        STORE,
        "        tags.update((TAG + name, value) for name, value in key.tags)\n",
        "",
    ),
    _one(
        "groups share one key",
        RECORD,
        """return f"{'as'[self.kind]}{self.group}\"""",
        """return f"{'as'[self.kind]}\"""",
    ),
    _one(
        "the rank is left out of the fingerprint",
        "lmcache_hybrid/fingerprint.py",
        "(parallel.world_size, parallel.rank)",
        "(parallel.world_size,)",
    ),
    # What reaches the cache
    _one(
        "the payload's checksum is not compared",
        RECORD,
        "    if digest(chunk) != expected:\n",
        "    if not expected:\n",
    ),
    _one(
        "chunks may change places",
        RECORD,
        "    if xxhash.xxh3_128_digest(digests) != header.checksum:\n",
        "    if not digests:\n",
    ),
    _one(
        "a damaged record stays in the store",
        WORKER,
        "                self._store.discard(error.key)\n",
        "",
    ),
    _one(
        "a record of another block or request is accepted",
        RECORD,
        "if expected != stored.fields:",
        "if not expected:",
    ),
    _one(
        "a cut-off record is accepted",
        RECORD,
        "if len(record) != record_bytes(stored.length):",
        "if not payload:",
    ),
    Defect(
        "a load is reported before its copy ended",
        (
            (
                WORKER,
                "for r, (future, _) in self._loads.items() if future.done()]",
                "for r, (future, _) in self._loads.items()]",
            ),
            (
                WORKER,
                "if not future.cancelled() and future.result() is not None:",
                "if future.done() and not future.cancelled() and future.result() is not None:",
            ),
        ),
    ),
    _one(
        "a failed load is reported as a good one",
        WORKER,
        "                results.failed_recving.add(request_id)\n",
        "                pass\n",
    ),
    _one(
        "the load of an aborted request is never named",
        WORKER,
        "            results.finished_recving.add(request_id)\n",
        "            if request_id not in finished:\n"
        "                results.finished_recving.add(request_id)\n",
    ),
    _one(
        "pages are scattered one block off",
        PAGES,
        "np.copyto(self._host[row][block, at : at + size], source[to : to + size])",
        "np.copyto(self._host[row][block - 1, at : at + size], source[to : to + size])",
    ),
    # What is left behind
    _one(
        "a pin is leaked when a load is cancelled",
        WORKER,
        "                claim.release()  # a cancelled load never ran\n",
        "                pass\n",
    ),
    _one(
        "a given-up claim is not released",
        WORKER,
        "            self._lookup.drop(request_id)\n",
        "            pass\n",
    ),
    _one(
        "a late answer keeps its claim",
        LOOKUP,
        "        if time.monotonic() > question.deadline:\n            return MISS\n",
        "",
    ),
    _one(
        "a drop that overtakes its question is forgotten",
        LOOKUP,
        "            self._given_up |= request_id == self._answering\n",
        "",
    ),
    _one(
        "the buffers of a load are not given back",
        WORKER,
        "                stack.callback(buffer.release)\n",
        "                pass\n",
    ),
    _one(
        "a damaged record stays and is promised for ever",
        STORE,
        "            self.discard(key)\n            raise Damaged",
        "            raise Damaged",
    ),
    _one(
        "claims do not pin",
        STORE,
        "if not self._store.manager.storage_backends[location].pin(engine_key):",
        "if engine_key not in self._store.manager.storage_backends[location].hot_cache:",
    ),
    _one(
        "an unhealthy store is read all the same",
        STORE,
        "        return self._engine.is_healthy()\n",
        "        return True\n",
    ),
    # Reuse
    _one(
        "a block too few of a window is stored and loaded",
        GROUPS,
        "-(-(spec.sliding_window - 1) // spec.block_size)",
        "(spec.sliding_window - 1) // spec.block_size",
    ),
    _one(
        "generated blocks go by the hash of the block before",
        PREFIX,
        "range((first + 1) * hashes_per_block - 1, blocks * hashes_per_block, hashes_per_block)",
        "range(first * hashes_per_block - 1, (blocks - 1) * hashes_per_block, hashes_per_block)",
    ),
    _one(
        "the store's junctions are not heeded",
        SCHEDULER,
        "tracked.stops.junction = tracked.answer.attention * self._plan.block_size",
        "pass",
    ),
    _one(
        "the beginning of a prefix is evicted first",
        WORKER,
        "            self._store.arrange(used_keys(save.prefix, save.boundaries, self._plan))\n",
        "            pass\n",
    ),
    _one(
        "a lookup that nobody waits for any more keeps its claims",
        "lmcache_hybrid/inquiry.py",
        "        if inquiry.settle(answer):\n",
        "        if inquiry.settle(answer) or True:\n",
    ),
    _one(
        "a lookup is taken for answered before it is",
        "lmcache_hybrid/inquiry.py",
        "            return None\n        return self.give_up() or UNAVAILABLE",
        "            return UNAVAILABLE\n        return self.give_up() or UNAVAILABLE",
    ),
    _one(
        "a failed load is reported while parts of it still copy",
        "lmcache_hybrid/copies.py",
        "                call.cancel()\n            wait(calls)\n",
        "                call.cancel()\n",
    ),
    _one(
        "a restored state is not found again in vLLM's own cache",
        COMPAT,
        "    keep_restored_states()\n",
        "",
    ),
    _one(
        "loads are promoted by priority, not in order of admission",
        COMPAT,
        "    promote_loads_in_order()\n",
        "",
    ),
    _one(
        "a failed load keeps its blocks until its turn",
        COMPAT,
        "    free_failed_loads()\n",
        "",
    ),
    _one(
        "a load reserves nothing for its windows",
        COMPAT,
        "    reserve_windows()\n",
        "",
    ),
    _one(
        "blocks of a step that was taken back can be hit",
        COMPAT,
        "    forget_what_did_not_run()\n",
        "",
    ),
    _one(
        "a failed load keeps its reservation",
        COMPAT,
        "            self._inflight_prefills.discard(request)\n",
        "",
    ),
    # What is counted
    _one(
        "tokens lost for want of a state are not counted",
        SCHEDULER,
        "                counts.lost_tokens += lost * size\n",
        "",
    ),
    _one(
        "pages that no load could use count as lost",
        SCHEDULER,
        "lost = min(answer.attention, limit) - ",
        "lost = answer.attention - ",
    ),
    _one(
        "the load of an aborted request stays in flight",
        SCHEDULER,
        "            self._loading.discard(request_id)  # also of a request that was aborted\n",
        "            self._loading.discard(request_id if tracked else None)\n",
    ),
    _one(
        "the first rank's numbers stand for all",
        METRICS,
        "                self.data[name] = mine + value\n",
        "                pass\n",
    ),
    _one(
        "each report repeats the ones before",
        COUNTS,
        "            before, self._reported = self._reported, self._totals()\n",
        "            before = self._reported\n",
    ),
    # The order of copies on a device
    _one(
        "a load does not wait for its mark",
        COPIES,
        "        stream.wait_event(after.event)\n",
        "",
    ),
    _one(
        "a load waits for the mark of an earlier step",
        WORKER,
        "            after = self._copies.mark()\n",
        "            mark = self._copies.mark()\n"
        '            after, self._mark = getattr(self, "_mark", mark), mark\n',
    ),
    Defect(
        "the mark is taken before the step zeroes blocks and saves",
        (
            (
                WORKER,
                "            after = self._copies.mark()\n",
                '            after = getattr(self, "_mark", None) or self._copies.mark()\n',
            ),
            (
                WORKER,
                "        results = KVConnectorTransferResults()\n",
                "        results = KVConnectorTransferResults()\n"
                "        self._mark = self._copies.mark()\n",
            ),
        ),
    ),
    Defect(
        "the mark is taken by the loading thread, on a stream of its own",
        (
            (
                WORKER,
                "            after = self._copies.mark()\n",
                "            after = Mark(None)\n",
            ),
            (
                WORKER,
                "size = self._restore(load, claim, after)",
                "size = self._restore(load, claim, self._copies.mark())",
            ),
        ),
    ),
    _one(
        "the mark is on the thread's current device, whichever that is",
        COPIES,
        "self._module.current_stream(self._device)",
        "self._module.current_stream()",
    ),
    _one(
        "one event is recorded for every mark",
        COPIES,
        "        event = self._module.Event(**blocking)\n",
        '        event = self.__dict__.setdefault("_event", self._module.Event(**blocking))\n',
    ),
    _one(
        "a load is reported before the device has copied it",
        COPIES,
        "            self._wait(self._record(stream))\n",
        "            pass\n",
    ),
    Defect(
        "saves are copied on another stream",
        (
            (
                COPIES,
                "            self._transfer([(part, page) for item in items for page, part in "
                "item.pieces()])\n",
                "            with self._module.stream(self._stream()):\n"
                "                self._transfer([(b, a) for i in items for a, b in i.pieces()])\n",
            ),
            (
                COPIES,
                "        copied = self.mark()\n",
                "        copied = self._record(self._stream())\n",
            ),
        ),
    ),
    _one(
        "the checksum of a save is computed before the device has copied it",
        COPIES,
        "            self._wait(copied)\n",
        "",
    ),
    _one(
        "the buffers of a save go to the store before the device has copied them",
        WORKER,
        "                rest()\n",
        "                pass\n",
    ),
    _one(
        "all restoring threads share a stream",
        COPIES,
        "        self._restoring = threading.local()\n",
        '        self._restoring = type("Shared", (), {})()\n',
    ),
    _one(
        "a load that fails leaves copies in flight",
        COPIES,
        "        finally:\n            # Also after an error",
        "        except ZeroDivisionError:\n            raise\n"
        "        else:\n            # Not after one",
    ),
    _one(
        "a save that fails leaves copies in flight",
        COPIES,
        "            self._wait(self.mark())\n            raise\n",
        "            raise\n",
    ),
    _one(
        "who waits for the device keeps a core busy",
        COPIES,
        '{"blocking": True} if',
        "{} if",
    ),
    _one(
        "a new thread waits with another device current",
        COPIES,
        "it would make a context.\n        self._module.set_device(self._device.index or 0)\n",
        "it would make a context.\n",
    ),
)
