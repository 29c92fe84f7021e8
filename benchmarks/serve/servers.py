# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server, once for each arm, and what its /metrics counts.

All servers of a run are alive at once and are asked in turns; idle ones sleep.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import yaml

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
ENVIRONMENT = {
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 2,184 blocks
    "VLLM_CPU_OMP_THREADS_BIND": "0,1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = {"max-model-len": 16_384, "max-num-batched-tokens": 2_048}
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
LMCACHE = {"local_cpu": True, "max_local_cpu_size": 4}
ARMS = ("unlimited", "quarter", "ram")
START_SECONDS, STOP_SECONDS = 300, 60

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


class Server:
    """One API server; starts at once, :meth:`wait` before asking. Owned by one thread.

    Args:
        arm: one of :data:`ARMS`.
        model: folder; the server calls its model so.
        folder: for its log and LMCache's YAML.
        blocks: of the KV cache pool in all arms but "unlimited".

    Attributes:
        url: where it listens.
    """

    def __init__(self, arm: str, model: Path, folder: Path, blocks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"{arm}.log"
        command = [sys.executable, "-m", ENTRY, "--model", str(model), "--enforce-eager"]
        command += ["--host", "127.0.0.1", "--port", port]
        command += ["--shutdown-timeout", "10", "--disable-uvicorn-access-log"]
        for name, value in OPTIONS.items():
            command += [f"--{name}", str(value)]
        environment = os.environ | ENVIRONMENT
        environment.pop("LMCACHE_CONFIG_FILE", None)
        if arm != "unlimited":
            command += ["--num-gpu-blocks-override", str(blocks)]
        if arm == "ram":
            command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
            config = folder / "lmcache.yaml"
            config.write_text(yaml.safe_dump(LMCACHE))
            environment["LMCACHE_CONFIG_FILE"] = str(config)
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc) -> None:
        """Stop the server; what does not end by itself is killed, its engine included."""
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> None:
        """Return once it is healthy.

        Raises:
            RuntimeError: it ended or took too long; holds the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")
                raise RuntimeError(f"a server did not start:\n{log[-3000:]}")
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            return urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:  # no answer yet, or not 200
            return False

    def counts(self) -> dict[str, float]:
        """Totals since the start, over all labels; of a histogram sum (seconds) and count."""
        totals: dict[str, float] = {}
        for line in urlopen(f"{self.url}/metrics").read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        found = {ours: totals.get(name, 0.0) for ours, name in COUNTERS.items()}
        for ours, name in HISTOGRAMS.items():
            found[f"{ours}_seconds"] = totals.get(f"{name}_sum", 0.0)
            found[f"{ours}_count"] = totals.get(f"{name}_count", 0.0)
        return found
