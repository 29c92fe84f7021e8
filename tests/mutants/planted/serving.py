# SPDX-License-Identifier: Apache-2.0
"""What is stored, hit, loaded and left behind."""

from tests.mutants.defect import Defect, one

SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
CACHED_BLOCKS = "lmcache_hybrid/scheduler/save_planner.py"
WORKER = "lmcache_hybrid/worker/worker.py"
LOAD_PLANNER = "lmcache_hybrid/scheduler/load_planner.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
RECORD = "lmcache_hybrid/storage/record_format.py"
CONNECTOR = "lmcache_hybrid/connector.py"
PAGES = "lmcache_hybrid/worker/pages.py"

DEFECTS = (
    one(
        "a step is to end where vLLM keeps tokens for a drafter of several modules",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "        return not (self.offered and 0 < self.known - boundary < self.drafter.runway)\n",
        "        return True\n",
    ),
    one(
        "windows need the end of a step, as states do",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "return not (self.offered and 0 < ",
        "return not (0 < ",
    ),
    one(
        "the block that vLLM gives up for a drafter does not count",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "        drops = self.offered and self.drafter.drops_block\n",
        "        drops = False\n",
    ),
    one(
        "a drafter for which vLLM gives up a block is not known",
        "lmcache_hybrid/config/drafts.py",
        "        and speculative.use_eagle_block_drop()\n",
        "        and False\n",
    ),
    one(
        "a block is given up although hashes look ahead",
        "lmcache_hybrid/config/drafts.py",
        "        and not hash_look_ahead(config)\n",
        "",
    ),
    one(
        "beside a drafter vLLM gives up a block of each hit of a hybrid model",
        "vllm_patch/look_ahead.py",
        "return 0 if junctions else covered",
        "return 0",
    ),
    one(
        "with several MTP modules vLLM gives up a block of each hit of a hybrid model",
        "vllm_patch/look_ahead.py",
        "return 0 if junctions else covered",
        "return 0 if junctions or covered > 1 else covered",
    ),
    one(
        "with several MTP modules hashes cover what the first one reads",
        "vllm_patch/look_ahead.py",
        "return 0 if junctions else covered",
        "return 0 if junctions else min(1, covered)",
    ),
    one(
        "hashes look ahead where vLLM expects one at each junction",
        "vllm_patch/look_ahead.py",
        "return 0 if junctions else covered",
        "return covered",
    ),
    one(
        "plan does not know that a release gives up the end of each hit",
        "lmcache_hybrid/config/drafts.py",
        "        elif causes:\n",
        "        elif False:\n",
    ),
    one(
        "plan knows vLLM's older names of MTP for other drafters",
        "lmcache_hybrid/config/drafts.py",
        'method = "mtp" if method.endswith("_mtp") else method',
        "method = method",
    ),
    one(
        "plan takes DFlash for a drafter that costs hits on vLLM 0.33",
        "lmcache_hybrid/config/drafts.py",
        '"0.33": ("eagle", "eagle3", "mtp"),',
        '"0.33": ("eagle", "eagle3", "mtp", "dflash"),',
    ),
    one(
        "plan tells of N what a drafter costs at U",
        "lmcache_hybrid/tools/cli/plan.py",
        "planned(drafts, work.unit or sizes.block_size)",
        "planned(drafts, sizes.block_size)",
    ),
    one(
        "plan writes a drafter that a shell takes apart",
        "lmcache_hybrid/tools/sizing/to_write.py",
        "shlex.quote(value)",
        "value",
    ),
    one(
        "states are published where the step before ended, although none is late",
        "vllm_patch/compat.py",
        "            manager.use_eagle and isinstance(manager, MambaManager)\n",
        "            isinstance(manager, MambaManager)\n",
    ),
    one(
        "ends of chunks are stored that vLLM may overwrite",
        "lmcache_hybrid/scheduler_side.py",
        "options.chunk_ends and may_spoil_chunk_ends(kv_cache_config)",
        "False",
    ),
    one(
        "in a MultiConnector hashes are taken for those that look ahead",
        "vllm_patch/look_ahead.py",
        "return BESIDE_KEY not in transfer.kv_connector_extra_config",
        "return True",
    ),
    one(
        "a boundary is wanted before its hash is known",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "return max(1, self.look_ahead)",
        "return 1",
    ),
    one(
        "a full block is taken to have a hash",
        "lmcache_hybrid/scheduler/prompt.py",
        "    blocks = min(blocks, len(request.block_hashes) // hashes_per_block)\n",
        "",
    ),
    one(
        "records of hashes that look ahead have the names of others",
        "lmcache_hybrid/worker/fingerprint.py",
        "ahead = (look_ahead,) if look_ahead else ()",
        "ahead = ()",
    ),
    one(
        "beside a drafter nothing is wanted behind the prompt's last state",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "self.interval)) <= self.last:",
        "self.interval)) <= self.end:",
    ),
    one(
        "a page behind the prompt's last state outlives it",
        "lmcache_hybrid/scheduler/save_planner.py",
        "        if not new and not behind:\n",
        "        if not new:\n",
    ),
    one(
        "the next boundary is wanted only once vLLM has handed the last state off",
        "lmcache_hybrid/scheduler/save_planner.py",
        "        said = bool(self._plan.states) and boundary >= tracker.checkpoints.known\n",
        "        said = bool(self._plan.states)\n",
    ),
    # Ends of chunks
    one(
        "the state in front of a chunk is stored as that of its end",
        CACHED_BLOCKS,
        "blocks = ((g, self._plan.state_block(block_ids[g], g, boundary))",
        "blocks = ((g, self._plan.state_block(block_ids[g], g, max(1, boundary - 1)))",
    ),
    one(
        "ends of chunks are not stored where all pages are stored already",
        "lmcache_hybrid/scheduler/tracker.py",
        "self.next_unoffered > 0 or self.chunks",
        "self.next_unoffered > 0",
    ),
    one(
        "ends of chunks are stored that a drafter of several modules computes again",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "self.chunk_ends and not self.drafter.computes_again and",
        "self.chunk_ends and",
    ),
    one(
        "models with windows store no ends of chunks",
        CACHED_BLOCKS,
        "return [boundary] if 0 < boundary <= len(tracker.prefix.hashes) else [], offers",
        "return [], offers",
    ),
    one(
        "a resumed request stores windows past its prompt",
        CACHED_BLOCKS,
        "return [boundary] if 0 < boundary <= len(tracker.prefix.hashes) else [], offers",
        "return [boundary] if boundary else [], offers",
    ),
    one(
        "ends of chunks are stored by those who asked for the last boundary only",
        "lmcache_hybrid/config/options.py",
        "        chunk_ends=chunk_ends,\n",
        "        chunk_ends=True,\n",
    ),
    one(
        "by default no end of a chunk is stored",
        "lmcache_hybrid/config/own_options.py",
        "OwnOption(CHECKPOINT_KEY, CHUNK_ENDS, _checkpoint)",
        "OwnOption(CHECKPOINT_KEY, 0, _checkpoint)",
    ),
    # What is stored
    one(
        "a state is stored although vLLM has given its block away",
        CACHED_BLOCKS,
        "        return block.block_hash == known_as and block.block_hash_num_tokens == tokens\n",
        "        return True\n",
    ),
    one(
        "a block that is known as another request's is taken for this one's",
        CACHED_BLOCKS,
        "        return block.block_hash == known_as and block.block",
        "        return block.block",
    ),
    one(
        "a block that holds the same tokens' state of another group is taken for this one's",
        CACHED_BLOCKS,
        "        return block.block_hash == known_as and",
        "        return bool(block.block_hash) and block.block_hash[:-4] == known_as[:-4] and",
    ),
    one(
        "states are stored before vLLM's blocks are known",
        CACHED_BLOCKS,
        "        if self._pool is None or",
        "        if self._pool is None:\n            return True\n        if",
    ),
    one(
        "the state of another boundary is stored",
        "lmcache_hybrid/protocol/metadata.py",
        "(end - 1, ids) for end, ids in self.states",
        "(max(0, end - 2), ids) for end, ids in self.states",
    ),
    one(
        "attention pages are off by one block",
        "lmcache_hybrid/scheduler/save_planner.py",
        "plan.pages(block_ids[group], group, first, last)",
        "plan.pages(block_ids[group][:1] + block_ids[group], group, first, last)",
    ),
    one(
        "states are found by their position in the block table, not by vLLM's hand-off",
        "lmcache_hybrid/scheduler/save_planner.py",
        "offered, size = self._states(tracker, computed, offers), self._plan.block_size",
        """table, size = block_state.get_block_ids(rid), self._plan.block_size
        ends = range(1, computed // size + 1)
        found = [(g, table[g][e - 1], e * size) for e in ends for g in self._plan.states]
        offered = self._states(tracker, computed, found)""",
    ),
    one(
        "a boundary is stored that the step does not reach",
        "lmcache_hybrid/scheduler/save_planner.py",
        " or tokens > computed",
        "",
    ),
    one(
        "a state is stored although one group was not offered",
        "lmcache_hybrid/scheduler/save_planner.py",
        "if blocks.keys() >= set(self._plan.states):",
        "if blocks and blocks.setdefault(self._plan.states[0], next(iter(blocks.values()))) "
        "and [blocks.setdefault(g, next(iter(blocks.values()))) for g in self._plan.states]:",
    ),
    one(
        "offers of requests that are not scheduled are stored",
        SCHEDULER,
        "if tracker is None or request_id not in scheduled or not may_save:",
        "scheduled.setdefault(request_id, 0)\n            if tracker is None or not may_save:",
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
    one(
        "a stored boundary is remembered after its load failed",
        "lmcache_hybrid/scheduler/tracker.py",
        "            self.stored.forget()\n",
        "            self.stored.forget(self.stored.attention)\n",
    ),
    one(
        "each step looks again at what is stored",
        SCHEDULER,
        "            else:\n                self._may_store.pop(request_id, None)\n\n",
        "\n",
    ),
    one(
        "what a hand-off adds is stored with the next one only",
        SCHEDULER,
        "                self._may_store[request_id] = None\n            else:",
        "                pass\n            else:",
    ),
    one(
        "what the ranks lack of a resumed request is stored with its next state only",
        "lmcache_hybrid/scheduler/tracker.py",
        "        waits = self.background is not None or self.next_unoffered > 0 or self.chunks\n",
        "        waits = self.next_unoffered > 0 or self.chunks\n",
    ),
    one(
        "each step looks again at a request that stores nothing",
        SCHEDULER,
        "                if tracker is None or not tracker.save:\n",
        "                if tracker is None:\n",
    ),
    # What counts as a hit
    one(
        "the smallest answer of the ranks is taken without agreement",
        "lmcache_hybrid/protocol/agreement.py",
        "if all(result.end == lowest for result in results):",
        "if results:",
    ),
    one(
        "one state group is enough",
        "lmcache_hybrid/storage/rank_lookup.py",
        "            if all(key in self.where for key in self._states(boundary))\n",
        "            if any(key in self.where for key in self._states(boundary) or self.where)\n",
    ),
    one(
        "the last token is loaded too",
        LOAD_PLANNER,
        "    tokens = tracker.request.num_tokens - 1\n",
        "    tokens = tracker.request.num_tokens\n",
    ),
    one(
        "after a failed load the same boundary is promised again",
        "lmcache_hybrid/scheduler/tracker.py",
        "        self.may_load = False\n        if not slow:",
        "        if not slow:",
    ),
    one(
        "the load starts one block early of what vLLM holds",
        SCHEDULER,
        "start = (result.tokens(size) - num_external_tokens) // size",
        "start = max(0, (result.tokens(size) - num_external_tokens) // size - 1)",
    ),
    one(
        "the state goes to the last block of the table",
        LOAD_PLANNER,
        "plan.state_block(block_ids[g], g, last)",
        "block_ids[g][-1]",
    ),
    one(
        "the user's tags are left out of the store's key",
        "lmcache_hybrid/storage/record_names.py",
        "    if tags:\n",
        "    if False:\n",
    ),
    one(
        "groups share one key",
        "lmcache_hybrid/core/keys.py",
        """return f"{'as'[self.kind]}{self.group}\"""",
        """return f"{'as'[self.kind]}\"""",
    ),
    one(
        "scales that DeepGEMM rounds are left out of the fingerprint",
        "lmcache_hybrid/worker/fingerprint.py",
        '    "VLLM_USE_DEEP_GEMM_E8M0",\n',
        "",
    ),
    one(
        "the rank is left out of the fingerprint",
        "lmcache_hybrid/worker/fingerprint.py",
        "(parallel.world_size, parallel.rank)",
        "(parallel.world_size,)",
    ),
    # What reaches the cache
    one(
        "the payload's checksum is not compared",
        RECORD,
        "    if digester.chunk(chunk) != expected:\n",
        "    if not expected:\n",
    ),
    one(
        "chunks may change places",
        RECORD,
        "    if digester.digests(digests) != header.checksum:\n",
        "    if not digests:\n",
    ),
    one(
        "a damaged record stays in the store",
        "lmcache_hybrid/worker/loads.py",
        "                self._store.discard(error.key, claim)\n",
        "",
    ),
    one(
        "a record of another block or request is accepted",
        RECORD,
        "if expected != stored.fields:",
        "if not expected:",
    ),
    one(
        "a cut-off record is accepted",
        RECORD,
        "if len(record) != record_bytes(stored.length):",
        "if not record:",
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
    one(
        "a failed load is reported as a good one",
        "lmcache_hybrid/worker/loads.py",
        "                results.failed_recving.add(request_id)\n",
        "                pass\n",
    ),
    one(
        "the load of an aborted request is never named",
        "lmcache_hybrid/worker/loads.py",
        "            results.finished_recving.add(request_id)\n",
        "            if request_id not in finished:\n"
        "                results.finished_recving.add(request_id)\n",
    ),
    one(
        "pages are scattered one block off",
        PAGES,
        "                page = self._host[run % rows][blocks[run // rows]]\n"
        "                np.copyto(page[at : at + size], source[to : to + size])\n",
        "                page = self._host[run % rows][blocks[run // rows] - 1]\n"
        "                np.copyto(page[at : at + size], source[to : to + size])\n",
    ),
    # What is left behind
    one(
        "a pin is leaked when a load is cancelled",
        "lmcache_hybrid/worker/loads.py",
        "                running.claim.release()  # a cancelled load never ran\n",
        "                pass\n",
    ),
    one(
        "a given-up claim is not released",
        WORKER,
        "            self._lookup.release(request_id, number)\n",
        "            pass\n",
    ),
    one(
        "a late answer keeps its claim",
        "lmcache_hybrid/storage/rank_lookup.py",
        "if self._given_up or time.monotonic() > request.deadline:",
        "if self._given_up:",
    ),
    one(
        "a drop that overtakes its question is forgotten",
        "lmcache_hybrid/storage/rank_lookup.py",
        "            self._given_up |= request_id == answering and latest <= number\n",
        "",
    ),
    one(
        "the buffers of a load are not given back",
        "lmcache_hybrid/worker/loads.py",
        "                stack.callback(buffer.release)\n",
        "                pass\n",
    ),
    one(
        "a damaged record stays and is promised for ever",
        STORE,
        "            self.discard(key, claim)\n            raise Damaged",
        "            raise Damaged",
    ),
    one(
        "claims do not pin",
        "lmcache_hybrid/storage/tiers/ram.py",
        "                memory.ref_count_up()\n"
        "        return functools.partial(unpin_memory, memories)\n",
        "                pass\n        return functools.partial(unpin_memory, ())\n",
    ),
    one(
        "an unhealthy store is read all the same",
        STORE,
        "        return self._engine.is_healthy()\n",
        "        return True\n",
    ),
    one(
        "a reset forgets what a session's first part asked for",
        "lmcache_hybrid/scheduler/scheduler.py",
        "            elif tracker.request.resumable:\n",
        "            elif False:\n",
    ),
)
