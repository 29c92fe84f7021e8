# SPDX-License-Identifier: Apache-2.0
"""Layouts of the KV cache."""

from tests.mutants.defect import each_of, gone

MISTAKES = {
    "lmcache_hybrid/worker/layout.py": {
        "kernel blocks are taken for blocks": (
            "    block_stride = kernel_blocks * strides[0]\n",
            "    block_stride = strides[0]\n",
        ),
        "the order of strides is left out of the layout": (
            "in order {tuple(order)} of {dtype}",
            "of {dtype}",
        ),
        "the split into kernel blocks is left out of the layout": (
            'f"{shape[0]} x {tuple(shape[1:])}',
            'f"{tuple(shape[1:])}',
        ),
        "a merged row is one layer short": (
            "size=merged[-1].size + run.size)",
            "size=merged[-1].size)",
        ),
        "rows are merged across padding": (
            "            and self.start + self.size == other.start\n",
            "            and self.start + self.size <= other.start\n",
        ),
        "padding is copied": (
            "sum(offsets), size, block_stride)",
            "sum(offsets), size if outer else block_stride, block_stride)",
        ),
        "blocks that overlap are taken": ("[*inner, (block_stride, num_blocks, -1)]", "inner"),
        "rows are inference tensors": (
            "        with torch.inference_mode(False):\n",
            "        with torch.inference_mode(torch.is_inference_mode_enabled()):\n",
        ),
    },
    "lmcache_hybrid/worker_side.py": {
        "pages are not told how many blocks there are": (
            "GroupPages(groups[index].layer_names, kv_caches, num_blocks, count(index))",
            "GroupPages(groups[index].layer_names, kv_caches, None, count(index))",
        ),
        "scales of loaded blocks are reset by the first forward": gone(
            "    reset_scales(kv_cache_config, kv_caches, context)\n"
        ),
    },
    "lmcache_hybrid/worker/pages.py": {
        "layers that share a KV cache are stored twice": (
            "    return {name: tensors[name] for name in own.values()}\n",
            "    return dict(tensors)\n",
        ),
        "of several blocks in a record only the first one is stored, again and again": (
            "        target, digests, rows = out.numpy(), [], len(self._host)\n",
            "        target, digests, rows = out.numpy(), [], len(self._host)\n"
            "        blocks = blocks[:1] * len(blocks)\n",
        ),
        "a device's copies take only the first of several blocks in a record": (
            "for each in blocks for row in self.rows)",
            "for each in blocks[:1] * len(blocks) for row in self.rows)",
        ),
        "the last layer of a group, a drafter's, is not restored": (
            "                np.copyto(page[at : at + size], source[to : to + size])\n",
            "                if rows == 1 or run % rows < rows - 1:\n"
            "                    np.copyto(page[at : at + size], source[to : to + size])\n",
        ),
    },
    "lmcache_hybrid/core/groups.py": {
        "a group is judged by its first layer": (
            "kinds = {_kind(spec) for spec in specs}",
            "kinds = {_kind(spec) for spec in [*specs][:1]}",
        ),
        "a boundary is one block of the smallest group": (
            "    common = math.lcm(*sizes)\n",
            "    common = min(sizes)\n",
        ),
        "a boundary is one block of the largest group": (
            "    common = math.lcm(*sizes)\n",
            "    common = max(sizes)\n",
        ),
        "several blocks in a record are those of the block before": (
            "ids[at * count : (at + 1) * count]) for at",
            "ids[max(0, at * count - 1) :][:count]) for at",
        ),
        "a state is put where a boundary of larger blocks would be": (
            "        at = -(-tokens * self.blocks_in(group) // self.block_size) - 1\n",
            "        at = -(-tokens // self.block_size) - 1\n",
        ),
        "blocks of several sizes are served beside windows": (
            "        served &= not windows and {",
            "        served &= {",
        ),
        "states may have larger blocks than attention": (
            " for index in states} == {min(sizes)}",
            " for index in states} <= sizes",
        ),
        "hits inside a block are looked for beside blocks of several sizes": (
            "uneven = self.split and self.dcp == 1",
            "uneven = False",
        ),
    },
    "lmcache_hybrid/tools/accept/compare.py": {
        "the acceptance test takes a miss for a hit": (
            "        if min(self.cached, self.external) < self.boundary:\n",
            "        if self.boundary < 0:\n",
        ),
        "the acceptance test allows noise where there is none": (
            "        limit = max(allowed, self.slack)\n",
            "        limit = max(allowed, self.slack, 0.1)\n",
        ),
        "the acceptance test forgives a difference that came back": (
            "        if self.others and max(self.others) <= limit < self.difference:\n",
            "        if self.others and limit < self.difference:\n",
        ),
    },
    "lmcache_hybrid/tools/accept/run.py": {
        "the acceptance test asks vLLM's own cache for what the store should bring": (
            "                    self._engine.settle()\n"
            "                    self._engine.forget()\n",
            "                    self._engine.settle()\n",
        ),
        "the acceptance test loads while it asks vLLM's own cache": gone(
            "        engine.use(())  # nothing may be loaded, whatever is stored\n"
        ),
    },
    "lmcache_hybrid/tools/accept/result.py": {
        "the acceptance test takes a fault of saving for noise": (
            "zip(each.own, each.again, strict=False)]\n",
            "zip(each.own, each.again, strict=False)]\n"
            "        pairs += [(t.own[0], t.restored[0]) for t in self.told if t.restored]\n",
        ),
        "the acceptance test passes although a tier's hits were not compared": (
            "            hits[tier] = hits.get(tier, False) or bool(compared)\n",
            "            hits[tier] = True\n",
        ),
        "the acceptance test passes although it cannot see a lost block": (
            "        if hidden or not noise.lost:\n",
            "        if not noise.lost:\n",
        ),
        "the acceptance test finds bad drafts and passes": (
            "        if self.all_problems or any(",
            "        if self.problems or any(",
        ),
    },
    "lmcache_hybrid/tools/accept/worker.py": {
        "the acceptance test loses nothing where it means to": gone(
            '    vars(worker.loads)["_restore"] = restore_and_lose\n'
        ),
    },
    "lmcache_hybrid/tools/accept/drafts.py": {
        "the acceptance test does not see that drafts are worse behind a load": (
            '        return text if enough and restored < LEAST_SHARE * own else ""\n',
            '        return ""\n',
        ),
        "the acceptance test takes one draft less for noise where there is none": (
            "        if self.differ:\n",
            "        if self.differ > 1:\n",
        ),
    },
    "lmcache_hybrid/worker/fingerprint.py": {
        "records of several blocks have the names of those of one": (
            '**({"split": plan.split} if plan.split else {})',
            "**{}",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
