# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` in a process of its own: for engines that ``vllm.LLM`` cannot make."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.request import Request, urlopen

import yaml

from lmcache_hybrid import tools
from tests.e2e.processes import Forked, own_core, run_script
from tests.ports import free_port

COMMAND = Path(tools.__file__).with_name("vllm_command.py")
START_SECONDS, STOP_SECONDS, WRITE_SECONDS = 300, 60, 60


class ApiServer:
    """One server; starts at once, :meth:`wait` before asking. Owned by one thread.

    Args:
        model: folder, or name on the Hub; the server calls its model so.
        log: file that it writes to.
        arguments: of the command line, beside those that all servers have.
        environment: of the process.
        eager: the model is not compiled, which takes a minute.
        folder: that it is started in.

    Attributes:
        url: where it listens.
    """

    def __init__(
        self,
        model: Path | str,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        eager: bool = True,
        folder: Path | None = None,
    ) -> None:
        port = str(free_port())
        self.url, self.log, self._folder = f"http://127.0.0.1:{port}", log, folder
        own = ["serve", str(model), "--host", "127.0.0.1", "--port", port]
        own += ["--enforce-eager"] if eager else []
        self._process = self._start([*own, *arguments], environment)

    def _start(
        self, arguments: list[str], environment: Mapping[str, str]
    ) -> subprocess.Popen | Forked:
        """Start the process, in a group of its own."""
        command = [sys.executable, str(COMMAND), *arguments]
        with self.log.open("wb") as out:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=self._folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return once it is healthy.

        Raises:
            RuntimeError: it ended or took too long; holds the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.log.read_text(errors="replace")
                raise RuntimeError(f"a server did not start:\n{log[-6000:]}")
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            return urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:  # no answer yet, or not 200
            return False

    def post(self, path: str, body: dict, headers: Mapping[str, str] = {}) -> dict:  # noqa: B006
        """The server's answer, in JSON."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return json.load(urlopen(Request(self.url + path, data, {**kind, **headers})))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; an endpoint of its development mode."""
        urlopen(Request(f"{self.url}/reset_prefix_cache", method="POST")).close()

    def metrics(self) -> str:
        return urlopen(f"{self.url}/metrics").read().decode()

    def external_hits(self) -> list[int]:
        """Tokens that the connector has brought so far, by engine."""
        name = "vllm:external_prefix_cache_hits_total"
        found = re.findall(rf'^{name}{{.*engine="(\d+)".*}} (\S+)$', self.metrics(), re.MULTILINE)
        return [int(float(value)) for _, value in sorted(found)]

    def __enter__(self) -> Self:
        return self

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End the server, so that LMCache flushes its writes; returns its exit code."""
        self._process.send_signal(number)
        return self._process.wait(STOP_SECONDS)

    def __exit__(self, *exc) -> None:
        """End the server; what does not end is killed."""
        with suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self.stop()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Server(ApiServer):
    """``with Server(model, lmcache, folder, "--flag") as server``: with LMCache, and healthy.

    Its processes are forked, see :mod:`processes`.

    Args:
        lmcache: LMCache's YAML as a dict.
        folder: for its log and YAML.
        arguments: of the command line, beside those that all servers have.
    """

    def __init__(self, model: Path, lmcache: dict, folder: Path, *arguments: str) -> None:
        self._model = model
        config = folder / "lmcache.yaml"
        config.write_text(yaml.safe_dump({"max_local_cpu_size": 0.5, **lmcache}))
        transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
        ours = ["--max-model-len", "4096", "--shutdown-timeout", "30"]
        ours += ["--kv-transfer-config", json.dumps(transfer)]
        environment = os.environ | {
            "LMCACHE_CONFIG_FILE": str(config),
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Two engines, of which one computes at a time.
            "VLLM_CPU_OMP_THREADS_BIND": f"{own_core()}|{own_core()}",
            "VLLM_NO_USAGE_STATS": "1",
        }
        super().__init__(model, folder / "server.log", [*ours, *arguments], environment)

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> Forked:
        self.log.write_bytes(b"")
        return Forked(self.log, environment, run_script, str(COMMAND), *arguments)

    def __enter__(self) -> Self:
        try:
            self.wait()
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def ask(self, ids: list[int], engine: int) -> dict:
        """Tokens and log-probabilities of a prompt's greedy answer by a data-parallel engine."""
        body = {"model": str(self._model), "prompt": ids, "max_tokens": 8, "temperature": 0}
        body |= {"logprobs": 5, "ignore_eos": True}
        answer = self.post("/v1/completions", body, {"X-data-parallel-rank": str(engine)})
        return answer["choices"][0]["logprobs"]

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait for what the engines do after they have answered: LMCache writes behind."""
        deadline = time.monotonic() + WRITE_SECONDS
        while not done():
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-6000:]
            time.sleep(0.2)
