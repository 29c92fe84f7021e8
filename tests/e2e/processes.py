# SPDX-License-Identifier: Apache-2.0
"""Forks vLLM's engine core and ranks from the server that forked the engine.

On CPU vLLM starts each in a new interpreter, which first imports vLLM: longer than all the rest.
Engines that start as a user's do are in test_accept, test_data_parallel and test_examples, and
ranks in test_scale (``VLLM_WORKER_MULTIPROC_METHOD=spawn``).
"""

import faulthandler
import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import context, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# Not LMCache: it brings numba, and vLLM wants to replace its kernels before that is there.
FORKS.set_forkserver_preload(["vllm.entrypoints.llm"])


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
        group: of processes, to join. Its parent is the server, whoever started it.
    """
    import torch

    os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    # OpenMP has read the environment before.
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    gc.freeze()
    fork_what_is_spawned(log)
    target(*args, **kwargs)
