# SPDX-License-Identifier: Apache-2.0
"""Ranks, stages and engines side by side, and connectors beside ours."""

from tests.mutants.defect import Defect, one

PARALLEL = "lmcache_hybrid/config/parallel.py"
CONFIGURATION = "vllm_patch/configuration.py"
UNSOUND = "vllm_patch/unsound.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "context parallelism is served",
        PARALLEL,
        "        if size > 1:\n",
        "        if size > 2:\n",
    ),
    one(
        "stages that never save are served",
        PARALLEL,
        "vllm_config.speculative_config and not vllm_config.use_v2_model_runner",
        "False",
    ),
    one(
        "data-parallel engines share a folder",
        PARALLEL,
        "if not config.local_disk or not engine:",
        "if not config.local_disk or engine:",
    ),
    one(
        "the folder of the first data-parallel engine moves",
        PARALLEL,
        "if not config.local_disk or not engine:",
        "if not config.local_disk:",
    ),
    one(
        "a stage counts the bytes of layers that other stages have",
        "lmcache_hybrid/core/groups.py",
        "    names = group.layer_names if layers is None else layers\n",
        "    names = layers or specs\n",
    ),
    one(
        "a stage without a layer of a group takes the KV cache for freed",
        "lmcache_hybrid/worker/pages.py",
        "        if not self._mapped:\n",
        "        if not self.rows:\n",
    ),
    one(
        "a stage without attention tells LMCache of no layer",
        "lmcache_hybrid/storage/service_factory.py",
        "max(1, self._num_attention_layers)",
        "self._num_attention_layers",
    ),
    one(
        "LMCache looks for the device of a data-parallel engine in another one's",
        "lmcache_hybrid/storage/service_factory.py",
        'self.vllm_config, "scheduler")',
        "self.vllm_config, self.role)",
    ),
    one(
        "LMCache takes a worker for the scheduler",
        "lmcache_hybrid/storage/service_factory.py",
        "                role=self.role,\n",
        "",
    ),
    one(
        "stages cache adapters that other stages may have lost",
        "lmcache_hybrid/identity/adapters.py",
        "        if self.stages > 1:\n",
        "        if self.stages > 2:\n",
    ),
    one(
        "a worker does not know that it is a stage",
        "lmcache_hybrid/connector.py",
        "                ADAPTERS.stages = parallel.pipeline_parallel_size\n",
        "",
    ),
    one(
        "a worker takes another engine's folder",
        "lmcache_hybrid/connector.py",
        "        settle_disk_folder(config, parallel)\n",
        "",
    ),
    one(
        "what a request ends with is kept although another connector may report it first",
        SCHEDULER,
        "        if not self._options.alone:\n",
        "        if False:\n",
    ),
    one(
        "another connector's failed loads count as ours",
        SCHEDULER,
        "self._loading & set(output.failed_recving or ())",
        "set(output.failed_recving or ())",
    ),
    one(
        "two of our connectors share one LMCache engine",
        CONFIGURATION,
        "    if len(own) > 1:\n",
        "    if len(own) > 2:\n",
    ),
    one(
        "a connector that knows one group is beside ours",
        CONFIGURATION,
        "        if not KVConnectorFactory.supports_hma_config(",
        "        if not bool(",
    ),
    one(
        "beside others the failure policy is read where nobody writes it",
        CONFIGURATION,
        "wanted = load_failure_policy(own)",
        "wanted = load_failure_policy(transfer.kv_connector_extra_config)",
    ),
    one(
        "our connector is not told of others",
        CONFIGURATION,
        "    extra[BESIDE_KEY] = len(children) > 1\n",
        "    extra[BESIDE_KEY] = False\n",
    ),
    one(
        "an engine goes on with blocks that a failed step left",
        UNSOUND,
        "    if parallel.enable_fault_tolerance:\n",
        "    if False:\n",
    ),
    one(
        "a lost expert is told after its blocks were stored",
        UNSOUND,
        'if parallel.all2all_backend == "nixl_ep" and parallel.data_parallel_size > 1:',
        "if False:",
    ),
    one(
        "each rank schedules by itself",
        UNSOUND,
        'if launched and (parallel.world_size > 1 or int(os.environ.get("RANK", "0"))):',
        "if False:",
    ),
    one(
        "vLLM 0.32 is asked for the experts of a hit's tokens",
        UNSOUND,
        "config.aux_output_config.enabled and not _caps_hits()",
        "False",
    ),
    one(
        "a prefix cache that is off after all is served",
        PARALLEL,
        "    if not vllm_config.cache_config.enable_prefix_caching:\n",
        "    if False:\n",
    ),
)
