# SPDX-License-Identifier: Apache-2.0
"""Forks vLLM's engine core and ranks from the server that forked the engine.

On CPU vLLM starts each in a new interpreter, which first imports vLLM: longer than all the rest.
Engines that start as a user's do are in test_accept and test_examples, and ranks in test_scale
(``VLLM_WORKER_MULTIPROC_METHOD=spawn``).
"""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import context, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# Not LMCache: it brings numba, and vLLM wants to replace its kernels before that is there.
FORKS.set_forkserver_preload(
    [
        "vllm.entrypoints.llm",
        "vllm.model_executor.layers.mamba.mamba_mixer2",
        "vllm.model_executor.model_loader",
        "vllm.v1.worker.cpu_worker",
    ]
)


def own_core() -> str:
    """The core that this pytest worker computes on, for ``VLLM_CPU_OMP_THREADS_BIND``."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return str(int(worker[2:]) % (os.cpu_count() or 1))


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process, which is about to load it anyway.

    It looks once at each class and keeps what it found, so a new machine would import vLLM in an
    interpreter of its own for each.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def compile_nothing() -> None:
    """Run as written what vLLM compiles even with ``enforce_eager``: it counts better tokens.

    Loading that one kernel takes longer than an engine's first answer.
    """
    import torch._dynamo

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True


class Process(ForkServerProcess):
    """A process of vLLM's, with the environment that vLLM has set when it is started.

    Attributes:
        log: file that all of them append their output to.
    """

    log = ""

    def start(self) -> None:
        self._args = (self.log, os.getpgid(0), {**os.environ}, self._target, *self._args)
        self._target = become
        super().start()


class Context(ForkServerContext):
    """In place of ``multiprocessing.get_context("spawn")``."""

    Process: Any = Process


def fork_what_is_spawned(log: str) -> None:
    """Fork what would be spawned from here on. Call in a process that a fork server made."""
    Process.log = log
    context._concrete_contexts["spawn"] = Context()
    # Its children know where the server listens, and would start another one nonetheless.
    forkserver._forkserver.ensure_running = lambda: None


def become(
    log: str,
    group: int,
    environment: dict[str, str],
    target: Callable[..., None],
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run ``target`` as a new interpreter would: its environment, output and threads.

    Args:
        group: of processes, to join; 0 to begin one. Its parent is the server, whoever started it.
    """
    import torch
    from prometheus_client import values

    os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    values.ValueClass = values.get_value_class()  # several API servers share files
    # OpenMP has read the environment before.
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    gc.freeze()
    gc.collect = lambda generation=2: 0  # vLLM does at start-up and at its end, a second each
    fork_what_is_spawned(log)
    inspect_models_here()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        compile_nothing()
    target(*args, **kwargs)


class Forked:
    """Runs a function as :func:`become` does, in a group of processes of its own.

    Has what is used of ``subprocess.Popen``.

    Args:
        log: file that its output is appended to.
        environment: of the process.
        target: and its arguments, which can be pickled.
    """

    def __init__(
        self, log: Path, environment: Mapping[str, str], target: Callable[..., None], *args: str
    ) -> None:
        arguments = (str(log), 0, dict(environment), target, *args)
        self._process = FORKS.Process(target=become, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode


def run_script(path: str, *arguments: str) -> None:
    """What ``python PATH`` does."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
