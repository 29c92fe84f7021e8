# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server, once for each arm, and what its /metrics counts.

All servers of a run are alive at once and are asked in turns; idle ones sleep. Needs the checkout:
the server is that of ``tests/e2e``.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import yaml

from tests.e2e.api_server import ApiServer

ENVIRONMENT = {
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 1,600 blocks
    "VLLM_CPU_OMP_THREADS_BIND": "0,1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for POST /reset_prefix_cache
}
FORGET_SECONDS = 60.0
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}

COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "vllm_hit_tokens": "vllm:prefix_cache_hits_total",
    "external_hit_tokens": "vllm:external_prefix_cache_hits_total",
    "lmcache_hit_tokens": "vllm:lmcache_hybrid_hit_tokens_total",
    "recomputed_tokens": "vllm:lmcache_hybrid_recomputed_tokens_total",
    "loaded_bytes": "vllm:lmcache_hybrid_loaded_bytes_total",
    "saved_bytes": "vllm:lmcache_hybrid_saved_bytes_total",
    "shared_prefills": "vllm:lmcache_hybrid_shared_prefills_total",
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


@dataclass(frozen=True)
class Arm:
    """What tells one server of a run from the others.

    Attributes:
        blocks: of the KV cache pool; None: all that fit.
        lmcache: LMCache's YAML; None for vLLM alone.
        ours: this package's settings.
    """

    blocks: int | None = None
    lmcache: Mapping[str, Any] | None = None
    ours: Mapping[str, Any] = field(default_factory=dict)


class Counted(ApiServer):
    """A server whose /metrics are read, and whose own cache can be emptied."""

    def reset(self, stores: bool = False) -> bool:
        """Empty vLLM's own prefix cache, and the connector's if so asked; False: not yet."""
        url = f"{self.url}/reset_prefix_cache" + "?reset_external=true" * stores
        return json.load(urlopen(Request(url, method="POST")))["success"]

    def totals(self) -> dict[str, float]:
        """Since the start, by the name in /metrics, over all labels."""
        totals: dict[str, float] = {}
        for line in self.metrics().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def counts(self) -> dict[str, float]:
        """Totals since the start, over all labels; of a histogram sum (seconds) and count."""
        totals = self.totals()
        found = {ours: totals.get(name, 0.0) for ours, name in COUNTERS.items()}
        for ours, name in HISTOGRAMS.items():
            found[f"{ours}_seconds"] = totals.get(f"{name}_sum", 0.0)
            found[f"{ours}_count"] = totals.get(f"{name}_count", 0.0)
        return found


class Server(Counted):
    """The server of one arm.

    Args:
        name: of the arm.
        model: folder of the model.
        folder: for its log and LMCache's YAML.
        options: of ``vllm serve``, beside those of the arm.
    """

    def __init__(
        self, name: str, arm: Arm, model: Path, folder: Path, options: Mapping[str, Any]
    ) -> None:
        arguments = ["--shutdown-timeout", "10", "--disable-uvicorn-access-log"]
        for option, value in options.items():
            arguments += [f"--{option}", str(value)]
        self._stores = arm.lmcache is not None
        environment = os.environ | ENVIRONMENT
        environment.pop("LMCACHE_CONFIG_FILE", None)
        if arm.blocks is not None:
            arguments += ["--num-gpu-blocks-override", str(arm.blocks)]
        if arm.lmcache is not None:
            connector = {**CONNECTOR, "kv_connector_extra_config": dict(arm.ours)}
            arguments += ["--kv-transfer-config", json.dumps(connector)]
            config = folder / f"{name}.yaml"
            config.write_text(yaml.safe_dump(dict(arm.lmcache)))
            environment["LMCACHE_CONFIG_FILE"] = str(config)
        super().__init__(model, folder / f"{name}.log", arguments, environment)

    def forget(self) -> None:
        """Nothing that was asked before is found any more, in vLLM's cache or LMCache's stores.

        Raises:
            TimeoutError: something still holds blocks.
        """
        deadline = time.monotonic() + FORGET_SECONDS
        while not self.reset(self._stores):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.log} is of a server that cannot be reset")
            time.sleep(0.1)
