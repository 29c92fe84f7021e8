# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server, once for each arm, and what its /metrics counts.

All servers of a run are alive at once and are asked in turns; idle ones sleep. Needs the checkout:
the server is that of ``tests/e2e``.
"""

import json
import os
import sys
from pathlib import Path

import yaml

from benchmarks.performance.model import DTYPE

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "e2e"))
from api_server import ApiServer  # noqa: E402

ENVIRONMENT = {
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 1,600 blocks
    "VLLM_CPU_OMP_THREADS_BIND": "0,1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = {"dtype": DTYPE, "max-model-len": 16_384, "max-num-batched-tokens": 2_048}
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
LMCACHE = {"local_cpu": True, "max_local_cpu_size": 4}
ARMS = ("unlimited", "quarter", "ram")

COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "vllm_hit_tokens": "vllm:prefix_cache_hits_total",
    "external_hit_tokens": "vllm:external_prefix_cache_hits_total",
    "lmcache_hit_tokens": "vllm:lmcache_hybrid_hit_tokens_total",
    "recomputed_tokens": "vllm:lmcache_hybrid_recomputed_tokens_total",
    "loaded_bytes": "vllm:lmcache_hybrid_loaded_bytes_total",
    "saved_bytes": "vllm:lmcache_hybrid_saved_bytes_total",
    "preemptions": "vllm:num_preemptions_total",
}
HISTOGRAMS = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
    "lookup": "vllm:lmcache_hybrid_lookup_seconds",
    "load": "vllm:lmcache_hybrid_load_seconds",
    "load_wait": "vllm:lmcache_hybrid_load_wait_seconds",
    "save": "vllm:lmcache_hybrid_save_seconds",
}


class Server(ApiServer):
    """The server of one arm.

    Args:
        arm: one of :data:`ARMS`.
        folder: for its log and LMCache's YAML.
        blocks: of the KV cache pool in all arms but "unlimited".
    """

    def __init__(self, arm: str, model: Path, folder: Path, blocks: int) -> None:
        arguments = ["--shutdown-timeout", "10", "--disable-uvicorn-access-log"]
        for name, value in OPTIONS.items():
            arguments += [f"--{name}", str(value)]
        environment = os.environ | ENVIRONMENT
        environment.pop("LMCACHE_CONFIG_FILE", None)
        if arm != "unlimited":
            arguments += ["--num-gpu-blocks-override", str(blocks)]
        if arm == "ram":
            arguments += ["--kv-transfer-config", json.dumps(CONNECTOR)]
            config = folder / "lmcache.yaml"
            config.write_text(yaml.safe_dump(LMCACHE))
            environment["LMCACHE_CONFIG_FILE"] = str(config)
        super().__init__(model, folder / f"{arm}.log", arguments, environment)

    def counts(self) -> dict[str, float]:
        """Totals since the start, over all labels; of a histogram sum (seconds) and count."""
        totals: dict[str, float] = {}
        for line in self.metrics().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        found = {ours: totals.get(name, 0.0) for ours, name in COUNTERS.items()}
        for ours, name in HISTOGRAMS.items():
            found[f"{ours}_seconds"] = totals.get(f"{name}_sum", 0.0)
            found[f"{ours}_count"] = totals.get(f"{name}_count", 0.0)
        return found
