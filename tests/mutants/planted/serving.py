# SPDX-License-Identifier: Apache-2.0
"""What is stored, hit, loaded and left behind."""

from tests.mutants.defect import Defect, each_of, gone, never, passes

CONNECTOR = "lmcache_hybrid/connector.py"

MISTAKES = {
    "lmcache_hybrid/scheduler/step_ends.py": {
        "a step is to end where vLLM keeps tokens for a drafter of several modules": (
            "        return not (self.offered and 0 < self.known - boundary < "
            "self.drafter.runway)\n",
            "        return True\n",
        ),
        "windows need the end of a step, as states do": (
            "return not (self.offered and 0 < ",
            "return not (0 < ",
        ),
        "the block that vLLM gives up for a drafter does not count": (
            "        drops = self.offered and self.drafter.drops_block\n",
            "        drops = False\n",
        ),
        "where blocks of states are smaller, no step ends at the last boundary": (
            "        step = self.offered and self.state_tokens or size\n",
            "        step = size\n",
        ),
        "a boundary is wanted before its hash is known": (
            "return max(1, self.look_ahead)",
            "return 1",
        ),
        "beside a drafter nothing is wanted behind the prompt's last state": (
            "self.interval)) <= self.last:",
            "self.interval)) <= self.end:",
        ),
        "ends of chunks are stored that a drafter of several modules computes again": (
            "self.chunk_ends and not self.drafter.computes_again and",
            "self.chunk_ends and",
        ),
    },
    "lmcache_hybrid/config/drafts.py": {
        "a drafter for which vLLM gives up a block is not known": (
            "        and speculative.use_eagle_block_drop()\n",
            "        and False\n",
        ),
        "a block is given up although hashes look ahead": gone(
            "        and not hash_look_ahead(config)\n"
        ),
        "plan does not know that a release gives up the end of each hit": (
            "        elif causes:\n",
            "        elif False:\n",
        ),
        "plan knows vLLM's older names of MTP for other drafters": (
            'method = "mtp" if method.endswith("_mtp") else method',
            "method = method",
        ),
        "plan takes DFlash for a drafter that costs hits on vLLM 0.33": (
            '"0.33": ("eagle", "eagle3", "mtp"),',
            '"0.33": ("eagle", "eagle3", "mtp", "dflash"),',
        ),
    },
    "vllm_patch/look_ahead.py": {
        "beside a drafter vLLM gives up a block of each hit of a hybrid model": (
            "return 0 if junctions else covered",
            "return 0",
        ),
        "with several MTP modules vLLM gives up a block of each hit of a hybrid model": (
            "return 0 if junctions else covered",
            "return 0 if junctions or covered > 1 else covered",
        ),
        "with several MTP modules hashes cover what the first one reads": (
            "return 0 if junctions else covered",
            "return 0 if junctions else min(1, covered)",
        ),
        "hashes look ahead where vLLM expects one at each junction": (
            "return 0 if junctions else covered",
            "return covered",
        ),
        "in a MultiConnector hashes are taken for those that look ahead": (
            "return BESIDE_KEY not in transfer.kv_connector_extra_config",
            "return True",
        ),
    },
    "lmcache_hybrid/tools/cli/plan.py": {
        "plan tells of N what a drafter costs at U": (
            "planned(drafts, work.unit or sizes.block_size)",
            "planned(drafts, sizes.block_size)",
        ),
    },
    "lmcache_hybrid/tools/sizing/to_write.py": {
        "plan writes a drafter that a shell takes apart": ("shlex.quote(value)", "value"),
    },
    "vllm_patch/scheduler_repairs.py": {
        "states are published where the step before ended, although none is late": (
            "            manager.use_eagle and isinstance(manager, MambaManager)\n",
            "            isinstance(manager, MambaManager)\n",
        ),
    },
    "lmcache_hybrid/scheduler/prompt.py": {
        "a full block is taken to have a hash": gone(
            "    blocks = min(blocks, len(request.block_hashes) // hashes_per_block)\n"
        ),
    },
    "lmcache_hybrid/worker/fingerprint.py": {
        "records of hashes that look ahead have the names of others": (
            "ahead = (look_ahead,) if look_ahead else ()",
            "ahead = ()",
        ),
        "scales that DeepGEMM rounds are left out of the fingerprint": gone(
            '    "VLLM_USE_DEEP_GEMM_E8M0",\n'
        ),
        "the rank is left out of the fingerprint": (
            "(parallel.world_size, parallel.rank)",
            "(parallel.world_size,)",
        ),
    },
    "lmcache_hybrid/scheduler/save_planner.py": {
        "a page behind the prompt's last state outlives it": (
            "        if not new and not behind:\n",
            "        if not new:\n",
        ),
        "the next boundary is wanted only once vLLM has handed the last state off": (
            "        said = bool(self._plan.states) and boundary >= tracker.step_ends.known\n",
            "        said = bool(self._plan.states)\n",
        ),
        "the state in front of a chunk is stored as that of its end": (
            "blocks = ((g, plan.state_block(block_ids[g], g, computed))",
            "blocks = ((g, plan.state_block(block_ids[g], g, max(1, computed - 1)))",
        ),
        "models with windows store no ends of chunks": (
            "return [boundary] if 0 < boundary <= len(tracker.prefix.hashes) else [], offers",
            "return [], offers",
        ),
        "a resumed request stores windows past its prompt": (
            "return [boundary] if 0 < boundary <= len(tracker.prefix.hashes) else [], offers",
            "return [boundary] if boundary else [], offers",
        ),
        "a state is stored although vLLM has given its block away": (
            "        return block.block_hash == known_as and block.block_hash_num_tokens == "
            "tokens\n",
            "        return True\n",
        ),
        "a block that is known as another request's is taken for this one's": (
            "        return block.block_hash == known_as and block.block",
            "        return block.block",
        ),
        "a block that holds the same tokens' state of another group is taken for this one's": (
            "        return block.block_hash == known_as and",
            "        return bool(block.block_hash) and block.block_hash[:-4] == known_as[:-4] and",
        ),
        "states are stored before vLLM's blocks are known": (
            "        if self._pool is None or",
            "        if self._pool is None:\n            return True\n        if",
        ),
        "attention pages are off by one block": (
            "plan.pages(block_ids[group], group, first, last)",
            "plan.pages(block_ids[group][:1] + block_ids[group], group, first, last)",
        ),
        "states are found by their position in the block table, not by vLLM's hand-off": (
            "offered, size = self._states(tracker, computed, offers), self._plan.block_size",
            "table, size = block_state.get_block_ids(rid), self._plan.block_size\n"
            "        ends = range(1, computed // size + 1)\n"
            "        found = [(g, table[g][e - 1], e * size) for e in ends for g in "
            "self._plan.states]\n        offered = self._states(tracker, computed, found)",
        ),
        "a boundary is stored that the step does not reach": gone(" or tokens > computed"),
        "a state is stored although one group was not offered": (
            "if blocks.keys() >= set(self._plan.states):",
            "if blocks and blocks.setdefault(self._plan.states[0], "
            "next(iter(blocks.values()))) and [blocks.setdefault(g, "
            "next(iter(blocks.values()))) for g in self._plan.states]:",
        ),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "ends of chunks are not stored where all pages are stored already": (
            "self.next_unoffered > 0 or self.chunks",
            "self.next_unoffered > 0",
        ),
        "a stored boundary is remembered after its load failed": (
            "            self.stored.forget()\n",
            "            self.stored.forget(self.stored.attention)\n",
        ),
        "what the ranks lack of a resumed request is stored with its next state only": (
            "        waits = self.background is not None or self.next_unoffered > 0 or "
            "self.chunks\n",
            "        waits = self.next_unoffered > 0 or self.chunks\n",
        ),
        "after a failed load the same boundary is promised again": (
            "        self.may_load = False\n        if not slow:",
            "        if not slow:",
        ),
    },
    "lmcache_hybrid/config/options.py": {
        "ends of chunks are stored by those who asked for the last boundary only": (
            "        chunk_ends=chunk_ends,\n",
            "        chunk_ends=True,\n",
        ),
    },
    "lmcache_hybrid/config/own_options.py": {
        "by default no end of a chunk is stored": (
            "OwnOption(CHECKPOINT_KEY, CHUNK_ENDS, _checkpoint)",
            "OwnOption(CHECKPOINT_KEY, 0, _checkpoint)",
        ),
    },
    "lmcache_hybrid/protocol/metadata.py": {
        "the state of another boundary is stored": (
            "(end - 1, ids) for end, ids in self.states",
            "(max(0, end - 2), ids) for end, ids in self.states",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "offers of requests that are not scheduled are stored": (
            "if tracker is None or request_id not in scheduled or not may_save:",
            "scheduled.setdefault(request_id, 0)\n            if tracker is None or not may_save:",
        ),
        "each step looks again at what is stored": (
            "            else:\n                self._may_store.pop(request_id, None)\n\n",
            "\n",
        ),
        "what a hand-off adds is stored with the next one only": (
            "                self._may_store[request_id] = None\n            else:",
            "                pass\n            else:",
        ),
        "each step looks again at a request that stores nothing": (
            "                if tracker is None or not tracker.save:\n",
            "                if tracker is None:\n",
        ),
        "the load starts one block early of what vLLM holds": (
            "start = (result.tokens(size) - num_external_tokens) // size",
            "start = max(0, (result.tokens(size) - num_external_tokens) // size - 1)",
        ),
        "a reset forgets what a session's first part asked for": (
            "            elif tracker.request.resumable:\n",
            "            elif False:\n",
        ),
    },
    "lmcache_hybrid/protocol/agreement.py": {
        "the smallest answer of the ranks is taken without agreement": (
            "if all(result.end == lowest for result in results):",
            "if results:",
        ),
    },
    "lmcache_hybrid/storage/rank_lookup.py": {
        "one state group is enough": (
            "            if all(key in self.where for key in self._states(boundary))\n",
            "            if any(key in self.where for key in self._states(boundary) or "
            "self.where)\n",
        ),
        "a late answer keeps its claim": (
            "if self._given_up or time.monotonic() > request.deadline:",
            "if self._given_up:",
        ),
        "a drop that overtakes its question is forgotten": gone(
            "            self._given_up |= request_id == answering and latest <= number\n"
        ),
    },
    "lmcache_hybrid/scheduler/load_planner.py": {
        "the last token is loaded too": (
            "    tokens = tracker.request.num_tokens - 1\n",
            "    tokens = tracker.request.num_tokens\n",
        ),
        "the state goes to the last block of the table": (
            "plan.state_block(block_ids[g], g, end)",
            "block_ids[g][-1]",
        ),
    },
    "lmcache_hybrid/storage/record_names.py": {
        "the user's tags are left out of the store's key": never("    if tags:\n"),
    },
    "lmcache_hybrid/core/keys.py": {
        "groups share one key": (
            """return f"{'as'[self.kind]}{self.group}\"""",
            """return f"{'as'[self.kind]}\"""",
        ),
    },
    "lmcache_hybrid/storage/record_format.py": {
        "the payload's checksum is not compared": (
            "    if digester.chunk(chunk) != expected:\n",
            "    if not expected:\n",
        ),
        "chunks may change places": (
            "    if digester.digests(digests) != header.checksum:\n",
            "    if not digests:\n",
        ),
        "a record of another block or request is accepted": (
            "if expected != stored.fields:",
            "if not expected:",
        ),
        "a cut-off record is accepted": (
            "if len(record) != record_bytes(stored.length):",
            "if not record:",
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "a damaged record stays in the store": gone(
            "                self._store.discard(error.key, claim)\n"
        ),
        "a failed load is reported as a good one": passes(
            "                results.failed_recving.add(request_id)\n"
        ),
        "the load of an aborted request is never named": (
            "            results.finished_recving.add(request_id)\n",
            "            if request_id not in finished:\n"
            "                results.finished_recving.add(request_id)\n",
        ),
        "a pin is leaked when a load is cancelled": passes(
            "                running.claim.release()  # a cancelled load never ran\n"
        ),
        "the buffers of a load are not given back": passes(
            "                stack.callback(buffer.release)\n"
        ),
    },
    "lmcache_hybrid/worker/pages.py": {
        "pages are scattered one block off": (
            "                page = self._host[run % rows][blocks[run // rows]]\n"
            "                np.copyto(page[at : at + size], source[to : to + size])\n",
            "                page = self._host[run % rows][blocks[run // rows] - 1]\n"
            "                np.copyto(page[at : at + size], source[to : to + size])\n",
        ),
    },
    "lmcache_hybrid/worker/worker.py": {
        "a given-up claim is not released": passes(
            "            self._lookup.release(request_id, number)\n"
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "a damaged record stays and is promised for ever": (
            "            self.discard(key, claim)\n            raise Damaged",
            "            raise Damaged",
        ),
        "an unhealthy store is read all the same": (
            "        return self._engine.is_healthy()\n",
            "        return True\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/ram.py": {
        "claims do not pin": (
            "                memory.ref_count_up()\n"
            "        return functools.partial(unpin_memory, memories)\n",
            "                pass\n        return functools.partial(unpin_memory, ())\n",
        ),
    },
}
DEFECTS = (
    *each_of(MISTAKES),
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
    Defect(
        "a load is reported before its copy ended",
        (
            (
                "lmcache_hybrid/worker/loads.py",
                "for r, each in self._running.items() if each.future.done()]",
                "for r, each in self._running.items()]",
            ),
            (
                "lmcache_hybrid/worker/loads.py",
                "        if future.cancelled() or future.exception():\n",
                "        if not future.done():\n            return True, None\n"
                "        if future.cancelled() or future.exception():\n",
            ),
        ),
    ),
)
