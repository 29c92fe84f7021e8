# SPDX-License-Identifier: Apache-2.0
"""Pages that all ranks hold alike, and groups that hold scratch only."""

from tests.mutants.defect import one

GROUPS = "lmcache_hybrid/core/groups.py"
FINGERPRINT = "lmcache_hybrid/worker/fingerprint.py"
NAMES = "lmcache_hybrid/storage/record_names.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
DISK = "lmcache_hybrid/storage/disk"

DEFECTS = (
    # Which groups
    one(
        "latent pages count as equal where vLLM does not say so",
        GROUPS,
        "    return latent and spec.max_tp_shards == 1\n",
        "    return latent\n",
    ),
    one(
        "one head per rank counts as the same head",
        GROUPS,
        "    latent = type(spec) is MLAAttentionSpec and spec.num_kv_heads == 1\n",
        "    latent = spec.num_kv_heads == 1\n",
    ),
    one(
        "a group counts as equal for one of its layers",
        GROUPS,
        "            if all(map(_is_replicated, specs)):\n",
        "            if any(map(_is_replicated, specs)):\n",
    ),
    one(
        "sharded groups are stored once, too",
        FINGERPRINT,
        "frozenset(plan.replicated)",
        "frozenset(plan.groups)",
    ),
    # Their name
    one(
        "ranks do not compare what they compute with",
        FINGERPRINT,
        "    if any(other != name for other, _ in ranks):\n",
        "    if any(other is None for other, _ in ranks):\n",
    ),
    one(
        "a page that all ranks share is named by one of them",
        FINGERPRINT,
        '(parallel.world_size, "every rank")',
        "(parallel.world_size, parallel.rank)",
    ),
    one("each rank has a salt of its own", FINGERPRINT, "ranks[0][1])", "own[1])"),
    one(
        "the first rank of all writes the pages of other pipeline stages",
        FINGERPRINT,
        "    owner = parallel.rank - group.rank_in_group\n",
        "    owner = 0\n",
    ),
    one(
        "a page that all ranks share is named without the key",
        "lmcache_hybrid/storage/open_store.py",
        "        replicas = replicas.sealed_with(digester)\n",
        "",
    ),
    one(
        "a page that all ranks share has a rank's key",
        NAMES,
        "            self.writer(key),\n",
        "            self._metadata.worker_id,\n",
    ),
    one(
        "pages that all ranks share keep their names over a reset",
        NAMES,
        "        self.replicas = self.replicas and self.replicas.after_reset(epoch)\n",
        "",
    ),
    one(
        "all engines take the same names at a reset",
        NAMES,
        "        data = self.salt + epoch",
        "        data = epoch",
    ),
    one(
        "all resets take the same names",
        NAMES,
        'epoch.to_bytes(8, "big")',
        "bytes(8)",
    ),
    # Who stores them, and where
    one(
        "only the first rank is asked",
        "lmcache_hybrid/storage/rpc.py",
        "        ranks = range(vllm_config.parallel_config.world_size)\n",
        "        ranks = range(1)\n",
    ),
    one(
        "every rank writes what all share",
        NAMES,
        "        return self.writer(key) == self._metadata.worker_id\n",
        "        return True\n",
    ),
    one(
        "nobody writes what all share",
        STORE,
        "            self._submit(ours, [self._engine.store_location])\n",
        "            self._submit(ours, self._locations(shared=False))\n",
    ),
    one(
        "only one rank keeps what all hold alike in its RAM",
        STORE,
        "            self._submit(others, self._locations(shared=False))\n",
        "",
    ),
    one(
        "RAM and local_disk count as shared",
        "lmcache_hybrid/storage/tiers/base.py",
        "    shared = False\n",
        "    shared = True\n",
    ),
    one(
        "store_location is ignored for what another rank writes",
        STORE,
        ' and wanted in (None, "", name)',
        "",
    ),
    one(
        "a failed write keeps a reference",
        STORE,
        "            except BaseException:\n"
        "                for memory in memories:\n"
        "                    memory.ref_count_down()\n"
        "                raise\n",
        "            except BaseException:\n                raise\n",
    ),
    one(
        "ranks on one disk share a file",
        f"{DISK}/backend.py",
        "        if key.worker_id != self._metadata.worker_id:\n",
        "        if self._metadata is None:\n",
    ),
    one(
        "a restart forgets the pages on disk that all ranks hold alike",
        NAMES,
        "            writers[self.replicas.fingerprint] = self.replicas.owner\n",
        "            writers[self.fingerprint] = self.replicas.owner\n",
    ),
    one(
        "a restart indexes such pages by the rank in the file's name",
        f"{DISK}/index.py",
        "    return key.with_new_worker_id(writer), header\n",
        "    return key, header\n",
    ),
    one(
        "plan counts them per rank in shared stores",
        "lmcache_hybrid/tools/sizing/storage.py",
        "        return 1 if self.shared and group.replicated else ranks\n",
        "        return ranks\n",
    ),
    one(
        "plan counts states once in shared stores",
        "lmcache_hybrid/tools/sizing/blocks.py",
        "latent and kind == ATTENTION)",
        "latent)",
    ),
    # Scratch
    one(
        "scratch is taken for a state",
        GROUPS,
        '        return "scratch"\n',
        '        return "state"\n',
    ),
    one(
        "scratch is taken for attention",
        GROUPS,
        '        return "scratch"\n',
        '        return "attention"\n',
    ),
    one(
        "scratch that vLLM looks for in its cache is left out",
        GROUPS,
        " and not spec.prefix_cacheable",
        "",
    ),
    one(
        "scratch whose blocks move vLLM's hits is accepted",
        GROUPS,
        "    served = common == math.lcm(*(spec.block_size for spec in specs))\n",
        "    served = True\n",
    ),
)
