# SPDX-License-Identifier: Apache-2.0
"""``vllm serve MODEL FLAGS`` in a process of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from lmcache_hybrid.tools.subprocesses import kill_group

HOST = "127.0.0.1"
COMMAND = Path(__file__).parents[1] / "vllm_command.py"
# STOP_SECONDS includes LMCache's queued writes.
STOP_SECONDS, FORGET_SECONDS, POLL_SECONDS = 120.0, 60.0, 0.5
API_KEY = "VLLM_API_KEY"
# The server is on this machine, whatever proxy the environment names.
urlopen = build_opener(ProxyHandler({})).open
COUNTERS = {
    "prompt": "vllm:prompt_tokens_total",
    "own": "vllm:prefix_cache_hits_total",
    "loaded": "vllm:external_prefix_cache_hits_total",
    "failed": "vllm:lmcache_hybrid_recomputed_tokens_total",
}


class ServerError(RuntimeError):
    """The server did not start, or ended."""


class Server:
    """``with Server(...) as server`` waits until it serves; one thread.

    Attributes:
        url: where it listens.
    """

    def __init__(
        self, model: str, flags: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        """Start it.

        Args:
            log: its output is appended to it.
            environment: of the process, beside this one's.
        """
        with socket.create_server((HOST, 0)) as probe:
            port = str(probe.getsockname()[1])
        self.url = f"http://{HOST}:{port}"
        own = ["--host", HOST, "--port", port, "--shutdown-timeout", "60"]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(COMMAND), "serve", model, *flags, *own],
                # The endpoint that resets vLLM's own cache needs the development mode.
                # It listens on loopback alone, so it is asked without a key.
                env={
                    **{name: value for name, value in os.environ.items() if name != API_KEY},
                    "VLLM_SERVER_DEV_MODE": "1",
                    **environment,
                },
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def __enter__(self) -> "Server":
        try:
            while not self._healthy():
                if (code := self._process.poll()) is not None:
                    raise ServerError(f"vllm serve ended with exit code {code} before it served")
                time.sleep(POLL_SECONDS)
        except BaseException:
            kill_group(self._process)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        kill_group(self._process)

    def _healthy(self) -> bool:
        try:
            return urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:  # no answer yet, or not 200
            return False

    def longest(self) -> tuple[str, int]:
        """Return (the model's name, ``max_model_len``) from the server."""
        (model, *_) = json.load(urlopen(f"{self.url}/v1/models"))["data"]
        return model["id"], model["max_model_len"]

    def forget(self) -> None:
        """Reset vLLM's own prefix cache, not LMCache's stores.

        Raises:
            ServerError: it was not reset in time.
        """
        deadline = time.monotonic() + FORGET_SECONDS
        request = Request(f"{self.url}/reset_prefix_cache", method="POST")
        # It fails while requests or their saves hold blocks.
        while not json.load(urlopen(request))["success"]:
            if time.monotonic() > deadline:
                raise ServerError("vLLM does not empty its own prefix cache")
            time.sleep(POLL_SECONDS)

    def counts(self) -> dict[str, float]:
        """Return tokens so far: of prompts, hit in vLLM's own cache, loaded, failed to load."""
        totals = dict.fromkeys(COUNTERS, 0.0)
        for line in urlopen(f"{self.url}/metrics").read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            for ours, theirs in COUNTERS.items():
                if name.partition("{")[0] == theirs:
                    totals[ours] += float(value)
        return totals
