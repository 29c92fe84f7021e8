# SPDX-License-Identifier: Apache-2.0
"""Reuse, counters and resets."""

from tests.mutants.defect import Defect, one

ACCOUNTS = "lmcache_hybrid/scheduler/lookup_metrics.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
ADMISSION = "lmcache_hybrid/scheduler/admission.py"
PATIENCE = "lmcache_hybrid/scheduler/waits.py"
WORKER = "lmcache_hybrid/worker/worker.py"
SLEEP = "vllm_patch/sleep.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
RPC = "lmcache_hybrid/storage/rpc.py"
GROUPS = "lmcache_hybrid/core/groups.py"
PREFIX = "lmcache_hybrid/scheduler/prompt.py"
COMPAT = "vllm_patch/compat.py"
PARTIAL_HITS = "vllm_patch/partial_hits.py"
COUNTS = "lmcache_hybrid/core/counts.py"
METRICS = "lmcache_hybrid/metrics.py"

DEFECTS = (
    one(
        "an empty step waits although other engines wait for its end",
        PATIENCE,
        "        idle = self._count >= self._batches\n",
        "        idle = self._count > 0\n",
    ),
    one(
        "engines that compute in step with others count as alone",
        PATIENCE,
        "        if parallel.data_parallel_size > 1:\n",
        "        if parallel.data_parallel_size < 1:\n",
    ),
    one(
        "an empty step waits while another step of a pipeline computes",
        PATIENCE,
        "stages + 1 if stages > 1 else 1",
        "stages - stages + 1",
    ),
    one(
        "a request waits behind all empty steps of a pipeline",
        PATIENCE,
        "        self.waits = idle and self._count % self._batches == 0\n",
        "        self.waits = idle\n",
    ),
    # Reuse
    one(
        "a state inside a block is stored as that of the boundary before",
        "lmcache_hybrid/scheduler/save_planner.py",
        "            if misfit or block == NULL_BLOCK or tokens > computed or tokens == 0:\n",
        "            tokens -= misfit\n"
        "            if block == NULL_BLOCK or tokens > computed or tokens == 0:\n",
    ),
    one(
        "a step is forgotten with its results, before its saves",
        "lmcache_hybrid/connector.py",
        "        loads = self.worker.results(finished_req_ids, self._metadata.waits)\n",
        "        loads = self.worker.results(finished_req_ids, self._metadata.waits)\n"
        "        self._metadata = NOTHING\n",
    ),
    one(
        "a block too few of a window is stored and loaded",
        GROUPS,
        "-(-(spec.sliding_window - 1) // spec.block_size)",
        "(spec.sliding_window - 1) // spec.block_size",
    ),
    one(
        "generated blocks go by the hash of the block before",
        PREFIX,
        "range((first + 1) * hashes_per_block - 1, blocks * hashes_per_block, hashes_per_block)",
        "range(first * hashes_per_block - 1, (blocks - 1) * hashes_per_block, hashes_per_block)",
    ),
    one(
        "the store's junctions are not heeded",
        ADMISSION,
        "tracker.checkpoints.junction = found * self._plan.block_size",
        "pass",
    ),
    one(
        "the beginning of a prefix is evicted first",
        "lmcache_hybrid/worker/saver.py",
        "            self._store.arrange(used, passing, save.request_id)\n",
        "            pass\n",
    ),
    one(
        "a lookup that nobody waits for any more keeps its claims",
        "lmcache_hybrid/scheduler/lookup_queue.py",
        "        if lookup.settle(result):\n",
        "        if lookup.settle(result) or True:\n",
    ),
    one(
        "a lookup is taken for answered before it is",
        "lmcache_hybrid/scheduler/lookup_queue.py",
        "            return None\n        return self.cancel() or UNAVAILABLE",
        "            return UNAVAILABLE\n        return self.cancel() or UNAVAILABLE",
    ),
    one(
        "a failed load is reported while parts of it still copy",
        "lmcache_hybrid/worker/copies.py",
        "                call.cancel()\n            wait(calls)\n",
        "                call.cancel()\n",
    ),
    one(
        "a restored state is not found again in vLLM's own cache",
        COMPAT,
        "    publish_restored_states()\n",
        "",
    ),
    one(
        "loads are promoted by priority, not in order of admission",
        COMPAT,
        "    promote_loads_in_order()\n",
        "",
    ),
    one(
        "a failed load keeps its blocks until its turn",
        COMPAT,
        "    free_failed_loads()\n",
        "",
    ),
    one(
        "the end of a load is published whether there is room for it or not",
        COMPAT,
        "    skip_partial_publish_when_full()\n",
        "",
    ),
    one(
        "a load reserves nothing for its windows",
        COMPAT,
        "    reserve_windows()\n",
        "",
    ),
    one(
        "blocks of a step that was taken back can be hit",
        COMPAT,
        "    unhash_uncomputed_blocks()\n",
        "",
    ),
    one(
        "a chunk that starts inside a block runs past it",
        PARTIAL_HITS,
        "    stop_at_the_next_boundary()\n",
        "",
    ),
    one(
        "a state that is published late must lie where the next step is to end",
        COMPAT,
        "    publish_where_steps_ended()\n",
        "",
    ),
    one(
        "a checkpoint inside a chunk is published as the state at its block's end",
        COMPAT,
        "    publish_checkpoints_once()\n",
        "",
    ),
    one(
        "a checkpoint whose block's end has no hash yet is not offered",
        COMPAT,
        "            if published is not None:\n",
        "            if published is None:\n",
    ),
    one(
        "a chunk that is shortened for MTP modules may be empty",
        COMPAT,
        "    leave_no_chunk_empty()\n",
        "",
    ),
    one(
        "a running state is published as that of an earlier token",
        PARTIAL_HITS,
        "    publish_no_state_late()\n",
        "",
    ),
    one(
        "a hit inside a block copies it before it is computed",
        PARTIAL_HITS,
        "    copy_what_is_computed()\n",
        "",
    ),
    one(
        "a block that is being computed counts as uncomputed for ever",
        PARTIAL_HITS,
        '        vars(self).pop("_hybrid_uncomputed", None)\n',
        "        pass\n",
    ),
    one(
        "every block that a request holds counts as uncomputed",
        PARTIAL_HITS,
        " if block.block_hash != had}",
        "}",
    ),
    one(
        "what counts until a state is published counts for ever",
        COMPAT,
        "        finally:\n            request.shared_prefix_boundary = boundary\n",
        "        finally:\n            pass\n",
    ),
    one(
        "a repair does not say when it can go",
        COMPAT,
        "    Remove when: ``Scheduler._preempt_request`` evicts",
        "    Later ``Scheduler._preempt_request`` may evict",
    ),
    one(
        "a failed load keeps its reservation",
        COMPAT,
        "        scheduler._inflight_prefills.discard(request)\n",
        "",
    ),
    # What is counted
    one(
        "tokens lost for want of a state are not counted",
        ACCOUNTS,
        "            counts.lost_tokens += lost\n",
        "",
    ),
    one(
        "pages that no load could use count as lost",
        ACCOUNTS,
        "reach = min(result.attention, asked.limit) * block_size",
        "reach = result.attention * block_size",
    ),
    one(
        "the load of an aborted request stays in flight",
        SCHEDULER,
        "            self._loading.discard(request_id)  # also of a request that was aborted\n",
        "            self._loading.discard(request_id if tracker else None)\n",
    ),
    one(
        "the first rank's numbers stand for all",
        METRICS,
        "                self.data[name] = mine + value\n",
        "                pass\n",
    ),
    one(
        "each report repeats the ones before",
        COUNTS,
        "            before, self._reported = self._reported, self._totals()\n",
        "            before = self._reported\n",
    ),
    # Resets
    one(
        "records keep their names over a reset",
        "lmcache_hybrid/storage/record_names.py",
        "        self.fingerprint = os.urandom(len(self.fingerprint))\n",
        "",
    ),
    one("a rank that failed to reset counts as reset", RPC, " and all(done)", ""),
    one(
        "the name of a rank's socket is too long for the folder that a cluster gives a job",
        RPC,
        "digest_size=8).hexdigest()",
        "digest_size=32).hexdigest()",
    ),
    one(
        "a step that was scheduled before a reset stores after it",
        "lmcache_hybrid/worker/saver.py",
        "            if metadata.epoch != self._epoch:\n",
        "            if metadata.epoch > self._epoch:\n",
    ),
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
    one(
        "hits and saves go on after a reset that failed",
        SCHEDULER,
        "        self.closed = not done\n",
        "        self.closed = False\n",
    ),
    one(
        "a load under way survives a reset",
        COMPAT,
        "            scheduler.failed_recving_kv_req_ids.add(request.request_id)\n",
        "",
    ),
    one(
        "hits and saves go on although vLLM's own cache was not emptied",
        COMPAT,
        "                    connector.reset_failed()\n",
        "                    pass\n",
    ),
    # Threads
    one(
        "a load that was dropped is taken for done",
        "lmcache_hybrid/worker/loads.py",
        "        if future.cancelled() or future.exception():\n            return False, None\n",
        "        if future.cancelled():\n            return True, None\n",
    ),
    one(
        "threads are started one by one, after their work was queued",
        "lmcache_hybrid/core/threads.py",
        "            pool.submit(go_on.wait)\n",
        "            pass\n",
    ),
    one(
        "a message that is no lookup ends the lookups of a rank",
        RPC,
        "        except NO_LOOKUP as error:\n",
        "        except KeyError as error:\n",
    ),
    one(
        "loads wait for a silent store one after the other",
        "lmcache_hybrid/storage/remote/reader.py",
        "                self._silent = now\n",
        "                pass\n",
    ),
    # Sleep mode
    one(
        "a load goes on while the memory of the KV cache is freed",
        "lmcache_hybrid/worker/loads.py",
        "                future.result()\n\n    def resume",
        "                pass\n\n    def resume",
    ),
    one(
        "pages are held while their memory is freed",
        WORKER,
        "            pages.unmap()\n",
        "            pass\n",
    ),
    one(
        "a save in a sleep is not counted as such",
        "lmcache_hybrid/worker/saver.py",
        '                self._skip("asleep", len(metadata.saves))\n                return\n',
        "                pass\n",
    ),
    one(
        "a load that a sleep ends goes on to its end",
        "lmcache_hybrid/worker/loads.py",
        "        if self._asleep:\n            raise LoadError(",
        "        if False:\n            raise LoadError(",
    ),
    one(
        "another layout after a sleep is taken for the one before",
        "lmcache_hybrid/worker/pages.py",
        "        if (self.layout, self.block_bytes) != before:\n",
        "        if False:\n",
    ),
    one(
        "vLLM before 0.33 frees the KV cache under a copy",
        SLEEP,
        '    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):\n',
        "    if False:\n",
    ),
    one(
        "weights that a sleep discarded count as known",
        SLEEP,
        "        if level != 1:\n",
        "        if level > 2:\n",
    ),
    one(
        "a reset makes weights known that a sleep discarded",
        "lmcache_hybrid/storage/weights_guard.py",
        "        if self._loaded.discarded:\n",
        "        if self._loaded.discarded and not self._unused:\n",
    ),
    one(
        "weights of zeros count as known after a sleep",
        "vllm_patch/loaders.py",
        "_changing(Worker.reset_weights, known=False)",
        "_changing(Worker.reset_weights)",
    ),
    one(
        "after a sleep copies go on failing",
        WORKER,
        "        self.loads.resume()\n        self.saves.resume()\n",
        "",
    ),
)
