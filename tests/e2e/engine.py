# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in a process of its own, driven over pipes.

Parent side: :class:`Engine`. Child side: :mod:`engine_child`, with the
arguments of ``vllm.LLM``. The engine core runs inside the child process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that a test can read its counters.

Children are forked from a server that has imported vLLM and done nothing
else: importing takes longer than all the rest of an engine's start.
"""

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from tests.e2e import engine_child, v2
from tests.e2e.processes import FORKS, own_core

CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
# Bytes of vLLM's KV cache and of LMCache's pool: each engine's start writes zeros to all of them.
KV_BYTES, POOL_GB = 1 << 28, 0.2


class EngineDied(RuntimeError):
    """The child ended; the message holds the end of its log."""


@dataclass(frozen=True)
class Answer:
    """One finished request: what was generated and where its prefix came from.

    Attributes:
        tokens: generated token ids.
        logprobs: of each step, {token id: log-probability} of the five best.
        cached: prompt tokens that were not computed, local and external.
        external: of these, the tokens that the connector brought.
        seconds: from request to end.
    """

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int
    external: int
    seconds: float

    @property
    def output(self) -> tuple:
        """Tokens and log-probabilities, which do not depend on where the prefix came from."""
        return self.tokens, self.logprobs


class Engine:
    """``with Engine(model, lmcache={...}) as engine: engine.ask(ids)``.

    Owns its process, its folder and both pipes until ``close``. One thread makes the calls;
    ``kill`` and ``wait`` may come from any.

    Args:
        model: folder of the model.
        lmcache: LMCache's YAML as a dict; None for an engine without a connector,
            ``{}`` for the connector with no configuration at all.
        transfer: added to ``kv_transfer_config``.
        runner: vLLM's model runner; ``v2`` takes the settings in :mod:`v2`.
        prepare: called in the child before the engine is made; can be pickled.
        env: added to the environment.
        options: further arguments of ``vllm.LLM``.

    Attributes:
        info: see :meth:`engine_child.Child.info`.
        rewrites: whether this engine may save what a backend holds; set it where a test means so.
    """

    rewrites = False

    def __init__(
        self,
        model: Path,
        lmcache: dict | None = None,
        transfer: dict | None = None,
        env: dict[str, str] | None = None,
        runner: Literal["v1", "v2"] = "v1",
        prepare: Callable[[], None] | None = None,
        **options,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        self.log_path = Path(self._folder.name, "engine.log")
        # vLLM's CPU platform sets it in each process that has made a configuration.
        inherited = {**os.environ}
        inherited.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
        inherited.pop("LMCACHE_CONFIG_FILE", None)
        environment = {
            **inherited,
            "LMCACHE_LOG_LEVEL": "INFO",  # commands of ours that ran in this process lower it
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # One core each: the reduction order, and with it the last bits, depend on it.
            "VLLM_CPU_OMP_THREADS_BIND": own_core(),
            "LMCACHE_TRACK_USAGE": "false",
            **(v2.ENVIRONMENT if runner == "v2" else {}),
            **(env or {}),
        }
        arguments = {
            "model": str(model),
            "max_model_len": 8192,
            "max_num_batched_tokens": 2048,
            "enforce_eager": True,
            "kv_cache_memory_bytes": KV_BYTES,
            "seed": 0,
            "disable_log_stats": False,
            **(v2.OPTIONS if runner == "v2" else {}),
            **options,
        }
        if lmcache is not None:
            arguments["kv_transfer_config"] = {**CONNECTOR, **(transfer or {})}
            if lmcache:
                config = Path(self._folder.name, "lmcache.yaml")
                config.write_text(yaml.safe_dump({"max_local_cpu_size": POOL_GB, **lmcache}))
                environment["LMCACHE_CONFIG_FILE"] = str(config)
        child_in, to_child = FORKS.Pipe(duplex=False)
        from_child, child_out = FORKS.Pipe(duplex=False)
        self._to_child = engine_child.text_file(to_child, "w")
        self._from_child = engine_child.text_file(from_child, "r")
        self.log_path.touch()
        forks = v2.FORKS if runner == "v2" else FORKS
        self.process = forks.Process(
            target=engine_child.main,
            args=(arguments, environment, prepare, self.log_path, child_in, child_out),
        )
        self.process.start()
        self._waiting = threading.Lock()
        child_in.close()
        child_out.close()
        self.info: dict = {}

    def __enter__(self) -> "Engine":
        try:
            self.info = self._receive()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc) -> None:
        """Close it; nothing that a backend held may have been saved again."""
        rewritten = {}
        asked = not self.rewrites and not self._to_child.closed
        if exc == (None, None, None) and asked:
            with contextlib.suppress(EngineDied):  # killed by its test
                rewritten = self.call("rewritten")
        self.close()
        assert not rewritten, f"saved although the backend held it, in bytes: {rewritten}"

    def close(self) -> None:
        """End the engine as a user's program would, so that LMCache flushes its writes."""
        with contextlib.suppress(OSError):
            self._to_child.close()
        if self.wait(seconds=60) is None:
            self.kill()
        self._from_child.close()

    def kill(self) -> None:
        """End the engine without warning, its core and ranks too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.wait()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code once the engine has ended, negative for a signal; None if it has not."""
        # Of two threads that wait for a forked process only one is told how it ended.
        with self._waiting:
            self.process.join(seconds)
            return self.process.exitcode

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def call(self, verb: str, **arguments):
        """Run one verb of :class:`engine_child.Child` and return its result."""
        try:
            self._to_child.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._to_child.flush()
        except OSError:
            raise EngineDied(self.log[-6000:]) from None
        return self._receive()

    def ask(self, ids: list[int] | dict, max_tokens: int = 8, **sampling) -> Answer:
        """One prompt by itself, greedy; see ``Child.ask`` for prompts that are dicts."""
        return self.ask_many([ids], max_tokens, **sampling)[0]

    def ask_many(
        self, prompts: list[list[int] | dict], max_tokens: int = 8, **sampling
    ) -> list[Answer]:
        """Several prompts at once."""
        answers = self.call("ask", prompts=prompts, max_tokens=max_tokens, sampling=sampling)
        return [Answer(**answer) for answer in answers]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, not the store."""
        assert self.call("forget")

    def counts(self) -> dict[str, dict[str, int]]:
        """Counters of the scheduler and the worker side."""
        return self.call("counts")

    def reads(self) -> dict[str, int]:
        """Records read, by LMCache backend."""
        return self.call("reads")

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, without ``vllm:`` and added up over labels."""
        return self.call("metrics")

    def exported(self) -> str:
        """All metrics of vLLM, of LMCache and of this package, in Prometheus' text format."""
        return self.call("exported")

    def failures(self) -> dict[str, int]:
        """Failed loads by ``reason,record``."""
        return self.call("failures")

    def ask_held(self, ids: list[int], fault: Callable[[], object], max_tokens: int = 8) -> Answer:
        """One prompt; ``fault`` runs after its lookup promised a hit and before the load."""
        self.call("hold")
        held = self.call("ask", prompts=[ids], max_tokens=max_tokens, sampling={})
        assert held == "held", f"nothing was loaded: {held}"
        try:
            fault()
        finally:
            answers = self.call("go")
        return Answer(**answers[0])

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until LMCache's asynchronous writes have ended."""
        deadline, quiet = time.monotonic() + seconds, 0
        while quiet < 2:  # a batch that LMCache's loop has not begun counts nowhere yet
            quiet = 0 if self.call("writing") else quiet + 1
            assert time.monotonic() < deadline, "LMCache's writes do not end"
            time.sleep(0.05)

    def _receive(self):
        line = self._from_child.readline()
        if not line:
            self.wait()
            raise EngineDied(self.log[-6000:])
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]
