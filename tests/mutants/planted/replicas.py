# SPDX-License-Identifier: Apache-2.0
"""Pages that all ranks hold alike, and groups that hold scratch only."""

from tests.mutants.defect import each_of, gone

MISTAKES = {
    "lmcache_hybrid/core/groups.py": {
        "latent pages count as equal where vLLM does not say so": (
            "    return latent and spec.max_tp_shards == 1\n",
            "    return latent\n",
        ),
        "one head per rank counts as the same head": (
            "    latent = type(spec) is MLAAttentionSpec and spec.num_kv_heads == 1\n",
            "    latent = spec.num_kv_heads == 1\n",
        ),
        "a group counts as equal for one of its layers": (
            "            if dcp == 1 and all(map(_is_replicated, specs)):\n",
            "            if dcp == 1 and any(map(_is_replicated, specs)):\n",
        ),
        "scratch is taken for a state": ('        return "scratch"\n', '        return "state"\n'),
        "scratch is taken for attention": (
            '        return "scratch"\n',
            '        return "attention"\n',
        ),
        "scratch that vLLM looks for in its cache is left out": gone(
            " and not spec.prefix_cacheable"
        ),
        "scratch whose blocks move vLLM's hits is accepted": (
            "    served = common == math.lcm(*every)\n",
            "    served = True\n",
        ),
    },
    "lmcache_hybrid/worker/fingerprint.py": {
        "sharded groups are stored once, too": (
            "frozenset(plan.replicated)",
            "frozenset(plan.groups)",
        ),
        "ranks do not compare what they compute with": (
            "    if any(other != name for other, _ in ranks):\n",
            "    if any(other is None for other, _ in ranks):\n",
        ),
        "a page that all ranks share is named by one of them": (
            '(parallel.world_size, "every rank")',
            "(parallel.world_size, parallel.rank)",
        ),
        "each rank has a salt of its own": ("ranks[0][1])", "own[1])"),
        "the first rank of all writes the pages of other pipeline stages": (
            "    owner = parallel.rank - group.rank_in_group\n",
            "    owner = 0\n",
        ),
    },
    "lmcache_hybrid/storage/open_store.py": {
        "a page that all ranks share is named without the key": gone(
            "        replicas = replicas.sealed_with(digester)\n"
        ),
    },
    "lmcache_hybrid/storage/record_names.py": {
        "a page that all ranks share has a rank's key": (
            "            self.writer(key),\n",
            "            self._metadata.worker_id,\n",
        ),
        "pages that all ranks share keep their names over a reset": gone(
            "        self.replicas = self.replicas and self.replicas.after_reset(epoch)\n"
        ),
        "all engines take the same names at a reset": (
            "        data = self.salt + epoch",
            "        data = epoch",
        ),
        "all resets take the same names": ('epoch.to_bytes(8, "big")', "bytes(8)"),
        "every rank writes what all share": (
            "        return self.writer(key) == self._metadata.worker_id\n",
            "        return True\n",
        ),
        "a restart forgets the pages on disk that all ranks hold alike": (
            "            writers[self.replicas.fingerprint] = self.replicas.owner\n",
            "            writers[self.fingerprint] = self.replicas.owner\n",
        ),
    },
    "lmcache_hybrid/storage/rpc.py": {
        "only the first rank is asked": (
            "        ranks = range(vllm_config.parallel_config.world_size)\n",
            "        ranks = range(1)\n",
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "nobody writes what all share": (
            "            self._submit(ours, [self._engine.store_location])\n",
            "            self._submit(ours, self._locations(shared=False))\n",
        ),
        "only one rank keeps what all hold alike in its RAM": gone(
            "            self._submit(others, self._locations(shared=False))\n"
        ),
        "store_location is ignored for what another rank writes": gone(
            ' and wanted in (None, "", name)'
        ),
        "a failed write keeps a reference": (
            "            except BaseException:\n                for memory in memories:\n"
            "                    memory.ref_count_down()\n                raise\n",
            "            except BaseException:\n                raise\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/base.py": {
        "RAM and local_disk count as shared": ("    shared = False\n", "    shared = True\n"),
    },
    "lmcache_hybrid/storage/disk/backend.py": {
        "ranks on one disk share a file": (
            "        if key.worker_id != self._metadata.worker_id:\n",
            "        if self._metadata is None:\n",
        ),
    },
    "lmcache_hybrid/storage/disk/index.py": {
        "a restart indexes such pages by the rank in the file's name": (
            "    return key.with_new_worker_id(writer), header\n",
            "    return key, header\n",
        ),
    },
    "lmcache_hybrid/tools/sizing/storage.py": {
        "plan counts them per rank in shared stores": (
            "        return 1 if self.shared and group.replicated else ranks\n",
            "        return ranks\n",
        ),
    },
    "lmcache_hybrid/tools/sizing/blocks.py": {
        "query heads that ranks cannot share are planned": (
            "shape.attention.queries) % dcp and not latent:",
            "shape.attention.queries) % dcp and latent:",
        ),
        "plan counts states once in shared stores": (
            "latent and kind == ATTENTION and dcp == 1",
            "latent and dcp == 1",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
