# SPDX-License-Identifier: Apache-2.0
"""Layouts of the KV cache."""

from tests.mutants.defect import one

WORKER_SIDE = "lmcache_hybrid/worker_side.py"
PAGES = "lmcache_hybrid/worker/pages.py"
GROUPS = "lmcache_hybrid/core/groups.py"
RUNS = "lmcache_hybrid/worker/layout.py"

DEFECTS = (
    # Layouts of the KV cache
    one(
        "kernel blocks are taken for blocks",
        RUNS,
        "    block_stride = kernel_blocks * strides[0]\n",
        "    block_stride = strides[0]\n",
    ),
    one(
        "pages are not told how many blocks there are",
        WORKER_SIDE,
        "GroupPages(groups[index].layer_names, kv_caches, num_blocks, count(index))",
        "GroupPages(groups[index].layer_names, kv_caches, None, count(index))",
    ),
    one(
        "the order of strides is left out of the layout",
        RUNS,
        "in order {tuple(order)} of {dtype}",
        "of {dtype}",
    ),
    one(
        "the split into kernel blocks is left out of the layout",
        RUNS,
        'f"{shape[0]} x {tuple(shape[1:])}',
        'f"{tuple(shape[1:])}',
    ),
    one(
        "a merged row is one layer short",
        RUNS,
        "size=merged[-1].size + run.size)",
        "size=merged[-1].size)",
    ),
    one(
        "rows are merged across padding",
        RUNS,
        "            and self.start + self.size == other.start\n",
        "            and self.start + self.size <= other.start\n",
    ),
    one(
        "padding is copied",
        RUNS,
        "sum(offsets), size, block_stride)",
        "sum(offsets), size if outer else block_stride, block_stride)",
    ),
    one(
        "blocks that overlap are taken",
        RUNS,
        "[*inner, (block_stride, num_blocks, -1)]",
        "inner",
    ),
    one(
        "rows are inference tensors",
        RUNS,
        "        with torch.inference_mode(False):\n",
        "        with torch.inference_mode(torch.is_inference_mode_enabled()):\n",
    ),
    one(
        "layers that share a KV cache are stored twice",
        PAGES,
        "    return {name: tensors[name] for name in own.values()}\n",
        "    return dict(tensors)\n",
    ),
    one(
        "a group is judged by its first layer",
        GROUPS,
        "kinds = {_kind(spec) for spec in specs}",
        "kinds = {_kind(spec) for spec in [*specs][:1]}",
    ),
    one(
        "scales of loaded blocks are reset by the first forward",
        WORKER_SIDE,
        "    reset_scales(kv_cache_config, kv_caches, context)\n",
        "",
    ),
    one(
        "the acceptance test takes a miss for a hit",
        "lmcache_hybrid/tools/accept/compare.py",
        "        if min(self.cached, self.external) < self.boundary:\n",
        "        if self.boundary < 0:\n",
    ),
    one(
        "the acceptance test asks vLLM's own cache for what the store should bring",
        "lmcache_hybrid/tools/accept/run.py",
        "                    self._engine.settle()\n                    self._engine.forget()\n",
        "                    self._engine.settle()\n",
    ),
    one(
        "the acceptance test allows noise where there is none",
        "lmcache_hybrid/tools/accept/compare.py",
        "        limit = max(allowed, self.slack)\n",
        "        limit = max(allowed, self.slack, 0.1)\n",
    ),
    one(
        "the acceptance test takes a fault of saving for noise",
        "lmcache_hybrid/tools/accept/result.py",
        "zip(each.own, each.again, strict=False)]\n",
        "zip(each.own, each.again, strict=False)]\n"
        "        pairs += [(t.own[0], t.restored[0]) for t in self.told if t.restored]\n",
    ),
    one(
        "the acceptance test loads while it asks vLLM's own cache",
        "lmcache_hybrid/tools/accept/run.py",
        "        engine.use(())  # nothing may be loaded, whatever is stored\n",
        "",
    ),
    one(
        "the acceptance test passes although a tier's hits were not compared",
        "lmcache_hybrid/tools/accept/result.py",
        "            hits[tier] = hits.get(tier, False) or bool(compared)\n",
        "            hits[tier] = True\n",
    ),
    one(
        "the acceptance test passes although it cannot see a lost block",
        "lmcache_hybrid/tools/accept/result.py",
        "        if hidden or not noise.lost:\n",
        "        if not noise.lost:\n",
    ),
    one(
        "the acceptance test loses nothing where it means to",
        "lmcache_hybrid/tools/accept/worker.py",
        '    vars(worker.loads)["_restore"] = restore_and_lose\n',
        "",
    ),
    one(
        "the acceptance test forgives a difference that came back",
        "lmcache_hybrid/tools/accept/compare.py",
        "        if self.others and max(self.others) <= limit < self.difference:\n",
        "        if self.others and limit < self.difference:\n",
    ),
    one(
        "the acceptance test does not see that drafts are worse behind a load",
        "lmcache_hybrid/tools/accept/drafts.py",
        '        return text if enough and restored < LEAST_SHARE * own else ""\n',
        '        return ""\n',
    ),
    one(
        "the acceptance test takes one draft less for noise where there is none",
        "lmcache_hybrid/tools/accept/drafts.py",
        "        if self.differ:\n",
        "        if self.differ > 1:\n",
    ),
    one(
        "the acceptance test finds bad drafts and passes",
        "lmcache_hybrid/tools/accept/result.py",
        "        if self.all_problems or any(",
        "        if self.problems or any(",
    ),
    # Groups with blocks of different sizes
    one(
        "a boundary is one block of the smallest group",
        GROUPS,
        "    common = math.lcm(*sizes)\n",
        "    common = min(sizes)\n",
    ),
    one(
        "a boundary is one block of the largest group",
        GROUPS,
        "    common = math.lcm(*sizes)\n",
        "    common = max(sizes)\n",
    ),
    one(
        "of several blocks in a record only the first one is stored, again and again",
        PAGES,
        "        target, digests, rows = out.numpy(), [], len(self._host)\n",
        "        target, digests, rows = out.numpy(), [], len(self._host)\n"
        "        blocks = blocks[:1] * len(blocks)\n",
    ),
    one(
        "a device's copies take only the first of several blocks in a record",
        PAGES,
        "for each in blocks for row in self.rows)",
        "for each in blocks[:1] * len(blocks) for row in self.rows)",
    ),
    one(
        "several blocks in a record are those of the block before",
        GROUPS,
        "ids[at * count : (at + 1) * count]) for at",
        "ids[max(0, at * count - 1) :][:count]) for at",
    ),
    one(
        "a state is put where a boundary of larger blocks would be",
        GROUPS,
        "        at = boundary * self.blocks_in(group) - 1\n",
        "        at = boundary - 1\n",
    ),
    one(
        "blocks of several sizes are served beside windows",
        GROUPS,
        "        served &= not windows and {",
        "        served &= {",
    ),
    one(
        "states may have larger blocks than attention",
        GROUPS,
        " for index in states} == {min(sizes)}",
        " for index in states} <= sizes",
    ),
    one(
        "records of several blocks have the names of those of one",
        "lmcache_hybrid/worker/fingerprint.py",
        '**({"split": plan.split} if plan.split else {})',
        "**{}",
    ),
    one(
        "hits inside a block are looked for beside blocks of several sizes",
        GROUPS,
        "not (self.windows or self.split)",
        "not self.windows",
    ),
    # A drafter's layers
    one(
        "the last layer of a group, a drafter's, is not restored",
        PAGES,
        "                np.copyto(page[at : at + size], source[to : to + size])\n",
        "                if rows == 1 or run % rows < rows - 1:\n"
        "                    np.copyto(page[at : at + size], source[to : to + size])\n",
    ),
)
