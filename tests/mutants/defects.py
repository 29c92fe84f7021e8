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
RUNS = "lmcache_hybrid/runs.py"
PREFIX = "lmcache_hybrid/prefix.py"
COMPAT = "vllm_patch/compat.py"
COUNTS = "lmcache_hybrid/counts.py"
METRICS = "lmcache_hybrid/metrics.py"
TRANSFERS = "lmcache_hybrid/transfers.py"
PINNED = "lmcache_hybrid/pinned.py"

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
        "        if key.tags:\n",
        "        if False:\n",
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
        "        scheduler._inflight_prefills.discard(request)\n",
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
    # How copies are queued
    _one(
        "a save may read pages before the forward has written them",
        TRANSFERS,
        "is_src_access_order_any=any_order",
        "is_src_access_order_any=True",
    ),
    _one(
        "copies are joined although their sources lie apart",
        TRANSFERS,
        """            if _continues(first_target, length, target) and _continues(
                first_source, length, source
            ):
""",
        "            if _continues(first_target, length, target):\n",
    ),
    _one(
        "one copy spans two allocations",
        TRANSFERS,
        "following.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()",
        "True",
    ),
    _one(
        "a batched copy that was seen to be wrong is used",
        TRANSFERS,
        "            reason = _difference(device, queue_batched)\n",
        "            _difference(device, queue_batched)\n",
    ),
    _one(
        "batches are queued on a stream where vLLM's op ignores errors",
        TRANSFERS,
        "        and torch.cuda.current_stream(device).cuda_stream not in DEFAULT_STREAMS\n",
        "",
    ),
    _one(
        "after a failed batch its copies are missing",
        TRANSFERS,
        "            copy_one_by_one(joined)\n\n\ndef _takes",
        "            copy_one_by_one(joined[:0])\n\n\ndef _takes",
    ),
    # Memory of the pool
    _one(
        "the pool is given back while the device may write to it",
        PINNED,
        "elif self._spec.unpin_memory(ptr):",
        "elif self._spec.unpin_memory(ptr) or True:",
    ),
    _one(
        "a pool that CUDA did not register counts as pinned",
        PINNED,
        "if self._spec.pin_memory(address, len(memory)):",
        "if self._spec.pin_memory(address, len(memory)) or True:",
    ),
    _one(
        "a pool of a power of two is thought not to be rounded",
        PINNED,
        "asked = size + PAGE",
        "asked = size",
    ),
    _one(
        "a fork leaves the device with pages that the pool has left",
        PINNED,
        "    memory.madvise(mmap.MADV_DONTFORK)\n",
        "",
    ),
    # Resets
    _one(
        "records keep their names over a reset",
        STORE,
        "        self._fingerprint = os.urandom(len(self._fingerprint))\n",
        "",
    ),
    _one("a rank that failed to reset counts as reset", RPC, " and all(done)", ""),
    _one(
        "a step that was scheduled before a reset stores after it",
        WORKER,
        "            if metadata.epoch != self._epoch:\n",
        "            if metadata.epoch > self._epoch:\n",
    ),
    _one(
        "what was promised before a reset is loaded after it",
        SCHEDULER,
        "                self._give_up(tracked)\n                del self._tracked[request_id]\n",
        "                pass\n",
    ),
    _one(
        "hits and saves go on after a reset that failed",
        SCHEDULER,
        "        self._closed = not done\n",
        "        self._closed = False\n",
    ),
    # Layouts of the KV cache
    _one(
        "kernel blocks are taken for blocks",
        RUNS,
        "    block_stride = kernel_blocks * strides[0]\n",
        "    block_stride = strides[0]\n",
    ),
    _one(
        "pages are not told how many blocks there are",
        CONNECTOR,
        "GroupPages(groups[index].layer_names, kv_caches, num_blocks)",
        "GroupPages(groups[index].layer_names, kv_caches)",
    ),
    _one(
        "the order of strides is left out of the layout",
        RUNS,
        "in order {tuple(order)} of {dtype}",
        "of {dtype}",
    ),
    _one(
        "the split into kernel blocks is left out of the layout",
        RUNS,
        'f"{shape[0]} x {tuple(shape[1:])}',
        'f"{tuple(shape[1:])}',
    ),
    _one(
        "a merged row is one layer short",
        RUNS,
        "size=merged[-1].size + run.size)",
        "size=merged[-1].size)",
    ),
    _one(
        "rows are merged across padding",
        RUNS,
        "            and self.start + self.size == other.start\n",
        "            and self.start + self.size <= other.start\n",
    ),
    _one(
        "padding is copied",
        RUNS,
        "sum(offsets), size, block_stride)",
        "sum(offsets), size if outer else block_stride, block_stride)",
    ),
    _one(
        "blocks that overlap are taken",
        RUNS,
        "[*inner, (block_stride, num_blocks, -1)]",
        "inner",
    ),
    _one(
        "rows are inference tensors",
        RUNS,
        "        with torch.inference_mode(False):\n",
        "        with torch.inference_mode(torch.is_inference_mode_enabled()):\n",
    ),
    _one(
        "layers that share a KV cache are stored twice",
        PAGES,
        "    return {name: tensors[name] for name in own.values()}\n",
        "    return dict(tensors)\n",
    ),
    _one(
        "a group is judged by its first layer",
        GROUPS,
        "kinds = {_kind(spec) for spec in specs}",
        "kinds = {_kind(spec) for spec in [*specs][:1]}",
    ),
    _one(
        "scales of loaded blocks are reset by the first forward",
        CONNECTOR,
        "        reset_scales(self._kv_cache_config, kv_caches, context)\n",
        "",
    ),
    _one(
        "the acceptance test takes a miss for a hit",
        "lmcache_hybrid/accept/compare.py",
        "        if min(self.cached, self.external) < self.boundary:\n",
        "        if self.boundary < 0:\n",
    ),
    _one(
        "the acceptance test asks vLLM's own cache for what the store should bring",
        "lmcache_hybrid/accept/run.py",
        "                    engine.settle()\n                    engine.forget()\n",
        "                    engine.settle()\n",
    ),
    _one(
        "the acceptance test allows noise where there is none",
        "lmcache_hybrid/accept/compare.py",
        "return Outcome.NOISE if self.difference <= max(allowed, self.slack)",
        "return Outcome.NOISE if self.difference <= max(allowed, self.slack, 0.1)",
    ),
)
