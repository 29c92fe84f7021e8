# SPDX-License-Identifier: Apache-2.0
"""Reuse, counters and resets."""

from tests.mutants.defect import Defect, each_of, gone, never, passes

SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"

MISTAKES = {
    "lmcache_hybrid/scheduler/waits.py": {
        "an empty step waits although other engines wait for its end": (
            "        idle = self._count >= self._batches\n",
            "        idle = self._count > 0\n",
        ),
        "engines that compute in step with others count as alone": (
            "        if parallel.data_parallel_size > 1:\n",
            "        if parallel.data_parallel_size < 1:\n",
        ),
        "an empty step waits while another step of a pipeline computes": (
            "stages + 1 if stages > 1 else 1",
            "stages - stages + 1",
        ),
        "a request waits behind all empty steps of a pipeline": (
            "        self.waits = idle and self._count % self._batches == 0\n",
            "        self.waits = idle\n",
        ),
    },
    "lmcache_hybrid/scheduler/save_planner.py": {
        "a lost hand-off ends the saves of an answer": (
            "request.shared_prefix_boundary > 0:\n            self._reach(tracker, boundary)\n",
            "request.shared_prefix_boundary > 0:\n            pass\n",
        ),
        "a state inside a block is stored as that of the boundary before": (
            "            if misfit or block == NULL_BLOCK or tokens > computed or tokens == 0:\n",
            "            tokens -= misfit\n"
            "            if block == NULL_BLOCK or tokens > computed or tokens == 0:\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "a step is forgotten with its results, before its saves": (
            "        loads = self.worker.results(finished_req_ids, self._metadata.waits)\n",
            "        loads = self.worker.results(finished_req_ids, self._metadata.waits)\n"
            "        self._metadata = NOTHING\n",
        ),
    },
    "lmcache_hybrid/core/groups.py": {
        "a block too few of a window is stored and loaded": (
            "-(-(spec.sliding_window - 1) // spec.block_size)",
            "(spec.sliding_window - 1) // spec.block_size",
        ),
    },
    "lmcache_hybrid/scheduler/prompt.py": {
        "generated blocks go by the hash of the block before": (
            "slice((first + 1) * hashes_per_block - 1, blocks * hashes_per_block, ",
            "slice((first or 1) * hashes_per_block - 1, "
            "(blocks - (first > 0)) * hashes_per_block, ",
        ),
    },
    "lmcache_hybrid/scheduler/admission.py": {
        "the store's junctions are not heeded": (
            "tracker.step_ends.junction = found * self._plan.block_size",
            "pass",
        ),
    },
    "lmcache_hybrid/worker/saver.py": {
        "the beginning of a prefix is evicted first": passes(
            "            self._store.arrange(used, passing, save.request_id)\n"
        ),
        "a step that was scheduled before a reset stores after it": (
            "            if metadata.epoch != self._epoch:\n",
            "            if metadata.epoch > self._epoch:\n",
        ),
        "a save in a sleep is not counted as such": passes(
            '                self._skip("asleep", len(metadata.saves))\n                return\n'
        ),
    },
    "lmcache_hybrid/scheduler/lookup_queue.py": {
        "a lookup that nobody waits for any more keeps its claims": (
            "        if lookup.settle(result):\n",
            "        if lookup.settle(result) or True:\n",
        ),
        "a lookup is taken for answered before it is": (
            "            return None\n        return self.cancel() or UNAVAILABLE",
            "            return UNAVAILABLE\n        return self.cancel() or UNAVAILABLE",
        ),
    },
    "lmcache_hybrid/worker/copy_threads.py": {
        "a failed load is reported while parts of it still copy": (
            "                call.cancel()\n            wait(calls)\n",
            "                call.cancel()\n",
        ),
    },
    "vllm_patch/scheduler_repairs.py": {
        "a restored state is not found again in vLLM's own cache": gone(
            "    publish_restored_states()\n"
        ),
        "loads are promoted by priority, not in order of admission": gone(
            "    promote_loads_in_order()\n"
        ),
        "a failed load keeps its blocks until its turn": gone("    free_failed_loads()\n"),
        "the end of a load is published whether there is room for it or not": gone(
            "    skip_partial_publish_when_full()\n"
        ),
        "a load reserves nothing for its windows": gone("    reserve_windows()\n"),
        "blocks of a step that was taken back can be hit": gone("    unhash_uncomputed_blocks()\n"),
        "a state that is published late must lie where the next step is to end": gone(
            "    publish_where_steps_ended()\n"
        ),
        "a checkpoint inside a chunk is published as the state at its block's end": gone(
            "    publish_checkpoints_once()\n"
        ),
        "a checkpoint whose block's end has no hash yet is not offered": (
            "            if published is not None:\n",
            "            if published is None:\n",
        ),
        "a chunk of two blocks writes a checkpoint over its own end": gone(
            "    part_chunks_of_two_blocks()\n"
        ),
        "a chunk that is shortened for MTP modules may be empty": gone(
            "    leave_no_chunk_empty()\n"
        ),
        "what counts until a state is published counts for ever": (
            "        finally:\n            request.shared_prefix_boundary = boundary\n",
            "        finally:\n            pass\n",
        ),
        "a repair does not say when it can go": (
            "    Remove when: ``Scheduler._preempt_request`` evicts",
            "    Later ``Scheduler._preempt_request`` may evict",
        ),
        "a failed load keeps its reservation": gone(
            "        scheduler._inflight_prefills.discard(request)\n"
        ),
        "a load under way survives a reset": gone(
            "            scheduler.failed_recving_kv_req_ids.add(request.request_id)\n"
        ),
        "hits and saves go on although vLLM's own cache was not emptied": passes(
            "                    connector.reset_failed()\n"
        ),
    },
    "vllm_patch/partial_hits.py": {
        "a chunk that starts inside a block runs past it": gone(
            "    stop_at_the_next_boundary()\n"
        ),
        "a running state is published as that of an earlier token": gone(
            "    publish_no_state_late()\n"
        ),
        "a hit inside a block copies it before it is computed": gone(
            "    copy_what_is_computed()\n"
        ),
        "a block that is being computed counts as uncomputed for ever": passes(
            '        vars(self).pop("_hybrid_uncomputed", None)\n'
        ),
        "every block that a request holds counts as uncomputed": (
            " if block.block_hash != had}",
            "}",
        ),
    },
    "lmcache_hybrid/scheduler/lookup_reports.py": {
        "tokens lost for want of a state are not counted": gone(
            "            counts.lost_tokens += lost\n"
        ),
        "pages that no load could use count as lost": (
            "reach = min(result.attention, asked.limit) * block_size",
            "reach = result.attention * block_size",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "the load of an aborted request stays in flight": (
            "            self._loading.discard(request_id)  # also of a request that was aborted\n",
            "            self._loading.discard(request_id if tracker else None)\n",
        ),
        "hits and saves go on after a reset that failed": (
            "        self.closed = not done\n",
            "        self.closed = False\n",
        ),
    },
    "lmcache_hybrid/metrics.py": {
        "the first rank's numbers stand for all": passes(
            "                self.data[name] = mine + value\n"
        ),
    },
    "lmcache_hybrid/core/counts.py": {
        "each report repeats the ones before": (
            "            before, self._reported = self._reported, self._totals()\n",
            "            before = self._reported\n",
        ),
    },
    "lmcache_hybrid/storage/record_names.py": {
        "records keep their names over a reset": gone(
            "        self.fingerprint = os.urandom(len(self.fingerprint))\n"
        ),
    },
    "lmcache_hybrid/storage/rpc.py": {
        "a rank that failed to reset counts as reset": gone(" and all(done)"),
        "the name of a rank's socket is too long for the folder that a cluster gives a job": (
            "digest_size=8).hexdigest()",
            "digest_size=32).hexdigest()",
        ),
        "a message that is no lookup ends the lookups of a rank": (
            "        except NO_LOOKUP as error:\n",
            "        except KeyError as error:\n",
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "a load that was dropped is taken for done": (
            "        if future.cancelled() or future.exception():\n"
            "            return False, None\n",
            "        if future.cancelled():\n            return True, None\n",
        ),
        "a load goes on while the memory of the KV cache is freed": (
            "                future.result()\n\n    def resume",
            "                pass\n\n    def resume",
        ),
        "a load that a sleep ends goes on to its end": (
            "        if self._asleep:\n            raise LoadError(",
            "        if False:\n            raise LoadError(",
        ),
    },
    "lmcache_hybrid/core/threads.py": {
        "threads are started one by one, after their work was queued": passes(
            "            pool.submit(go_on.wait)\n"
        ),
    },
    "lmcache_hybrid/storage/remote/silent_reads.py": {
        "loads wait for a silent store one after the other": passes(
            "                self._silent = now\n"
        ),
    },
    "lmcache_hybrid/worker/worker.py": {
        "pages are held while their memory is freed": passes("            pages.unmap()\n"),
        "after a sleep copies go on failing": gone(
            "        self.loads.resume()\n        self.saves.resume()\n"
        ),
    },
    "lmcache_hybrid/worker/pages.py": {
        "another layout after a sleep is taken for the one before": never(
            "        if (self.layout, self.block_bytes) != before:\n"
        ),
    },
    "vllm_patch/sleep.py": {
        "vLLM before 0.33 frees the KV cache under a copy": never(
            '    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):\n'
        ),
        "weights that a sleep discarded count as known": (
            "        if level != 1:\n",
            "        if level > 2:\n",
        ),
    },
    "lmcache_hybrid/storage/weights_guard.py": {
        "a reset makes weights known that a sleep discarded": (
            "        if self._loaded.discarded:\n",
            "        if self._loaded.discarded and not self._unused:\n",
        ),
    },
    "vllm_patch/loaders.py": {
        "weights of zeros count as known after a sleep": (
            "_changing(Worker.reset_weights, known=False)",
            "_changing(Worker.reset_weights)",
        ),
    },
}
DEFECTS = (
    *each_of(MISTAKES),
    Defect(
        "what was promised before a reset is loaded after it",
        (
            (
                SCHEDULER,
                "            if not loading:\n                self._lookups.withdraw",
                "            if not loading and tracker.request.num_computed_tokens:\n"
                "                self._lookups.withdraw",
            ),
            (
                SCHEDULER,
                "                del self._trackers[request_id]\n",
                "                pass\n",
            ),
        ),
    ),
)
