# SPDX-License-Identifier: Apache-2.0
"""Ranks, stages and engines side by side, and connectors beside ours."""

from tests.mutants.defect import each_of, gone, never

MISTAKES = {
    "lmcache_hybrid/config/folders.py": {
        "data-parallel engines share a folder": (
            "if not config.local_disk or not engine:",
            "if not config.local_disk or engine:",
        ),
        "the folder of the first data-parallel engine moves": (
            "if not config.local_disk or not engine:",
            "if not config.local_disk:",
        ),
    },
    "lmcache_hybrid/config/parallel.py": {
        "prompts that are split over ranks are served": (
            '"prefill_context_parallel_size", 1)) > 1:',
            '"prefill_context_parallel_size", 1)) > 2:',
        ),
        "a drafter beside decode context parallelism is served": (
            "    if size > 1 and vllm_config.speculative_config:\n",
            "    if size > 2 and vllm_config.speculative_config:\n",
        ),
        "stages that never save are served": (
            "vllm_config.speculative_config and not vllm_config.use_v2_model_runner",
            "False",
        ),
        "a prefix cache that is off after all is served": never(
            "    if not vllm_config.cache_config.enable_prefix_caching:\n"
        ),
    },
    "lmcache_hybrid/core/groups.py": {
        "a stage counts the bytes of layers that other stages have": (
            "    names = group.layer_names if layers is None else layers\n",
            "    names = layers or specs\n",
        ),
        "a block that ranks share counts as if each had all of its tokens": (
            "[spec.block_size * (dcp if spec.dcp_sharded else 1) for",
            "[spec.block_size for",
        ),
        "groups that ranks share otherwise than attention are served": (
            "        if dcp > 1 and not (",
            "        if False and not (",
        ),
        "a drafter's layers that ranks do not share are taken for shared ones": (
            'return kinds == {"attention"} and all(spec.dcp_sharded for spec in specs)',
            'return kinds == {"attention"}',
        ),
        "latent pages of which each rank has other tokens are stored once": (
            "            if dcp == 1 and all(map(_is_replicated, specs)):\n",
            "            if all(map(_is_replicated, specs)):\n",
        ),
        "a chunk that ends inside a block that ranks share leaves no state": (
            "return self.state_tokens if self.dcp > 1 and",
            "return self.state_tokens if False and",
        ),
        "blocks that ranks share are hit as a whole only": (
            "uneven = self.split and self.dcp == 1",
            "uneven = self.split",
        ),
    },
    "lmcache_hybrid/scheduler/load_planner.py": {
        "inside a block that ranks share the state goes to the block of its end": (
            "plan.state_block(block_ids[g], g, end)",
            "plan.state_block(block_ids[g], g, last * plan.block_size)",
        ),
    },
    "lmcache_hybrid/worker/fingerprint.py": {
        "how many tokens a rank holds in turn is not in a record's name": (
            "    turns = parallel.cp_kv_cache_interleave_size, ",
            "    turns = (); _ = ",
        ),
        "which tokens of a block a rank holds is not in a record's name": gone(
            "*get_dcp_world_size_and_rank(), "
        ),
    },
    "lmcache_hybrid/worker/pages.py": {
        "a stage without a layer of a group takes the KV cache for freed": (
            "        if not self._mapped:\n",
            "        if not self.rows:\n",
        ),
    },
    "lmcache_hybrid/storage/service_factory.py": {
        "a stage without attention tells LMCache of no layer": (
            "max(1, self._num_attention_layers)",
            "self._num_attention_layers",
        ),
        "LMCache looks for the device of a data-parallel engine in another one's": (
            'self.vllm_config, "scheduler")',
            "self.vllm_config, self.role)",
        ),
        "LMCache takes a worker for the scheduler": gone("                role=self.role,\n"),
    },
    "lmcache_hybrid/identity/adapters.py": {
        "stages cache adapters that other stages may have lost": (
            "        if self.stages > 1:\n",
            "        if self.stages > 2:\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "a worker does not know that it is a stage": gone(
            "                ADAPTERS.stages = parallel.pipeline_parallel_size\n"
        ),
        "a worker takes another engine's folder": gone(
            "        settle_disk_folder(config, parallel)\n"
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "what a request ends with is kept although another connector may report it first": never(
            "        if not self._options.alone:\n"
        ),
        "another connector's failed loads count as ours": (
            "self._loading & set(output.failed_recving or ())",
            "set(output.failed_recving or ())",
        ),
    },
    "vllm_patch/configuration.py": {
        "two of our connectors share one LMCache engine": (
            "    if len(own) > 1:\n",
            "    if len(own) > 2:\n",
        ),
        "a connector that knows one group is beside ours": (
            "        if not KVConnectorFactory.supports_hma_config(",
            "        if not bool(",
        ),
        "beside others the failure policy is read where nobody writes it": (
            "wanted = load_failure_policy(own)",
            "wanted = load_failure_policy(transfer.kv_connector_extra_config)",
        ),
        "our connector is not told of others": (
            "    extra[BESIDE_KEY] = len(children) > 1\n",
            "    extra[BESIDE_KEY] = False\n",
        ),
    },
    "vllm_patch/unsound.py": {
        "an engine goes on with blocks that a failed step left": never(
            "    if parallel.enable_fault_tolerance:\n"
        ),
        "a lost expert is told after its blocks were stored": (
            'if parallel.all2all_backend == "nixl_ep" and parallel.data_parallel_size > 1:',
            "if False:",
        ),
        "each rank schedules by itself": (
            'if launched and (parallel.world_size > 1 or int(os.environ.get("RANK", "0"))):',
            "if False:",
        ),
        "vLLM 0.32 is asked for the experts of a hit's tokens": (
            "config.aux_output_config.enabled and not _caps_hits()",
            "False",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
