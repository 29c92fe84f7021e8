# SPDX-License-Identifier: Apache-2.0
"""Engines on vLLM's V2 model runner, which vLLM takes on a GPU.

vLLM takes it wherever Triton works. Here Triton works in its interpreter, for which it
needs no more than a driver that says that a CPU is there. Both, and vLLM's choice, are
made at import; so these engines are forked from a server of their own, which
imported vLLM after :func:`use_interpreter`.
"""

import os
import threading
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests import ROOT

ENVIRONMENT = {"TRITON_INTERPRET": "1"}
# Added where ranks are processes of their own, which know of the interpreter only by this.
OF_RANKS = {
    "PYTHONPATH": os.pathsep.join(
        [f"{ROOT}/tests/e2e/interpreted", str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
}
# Start-up runs as many tokens as a step may hold, and the interpreter runs each kernel's
# programs one after the other: both small, and no more memory to zero than is used.
OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 4,
    "async_scheduling": True,
    "num_gpu_blocks_override": 64,
}


class CpuDriver:
    """What Triton asks of the device's driver when it only interprets."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch=0, warp_size=1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        """Times nothing: of an autotuned kernel's configurations the first is taken."""
        return lambda kernel, quantiles: [0.0] * len(quantiles)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    @property
    def utils(self) -> SimpleNamespace:
        properties = {"max_shared_mem": 1 << 20, "multiprocessor_count": 1}
        return SimpleNamespace(get_device_properties=lambda _: properties)


def use_interpreter() -> None:
    """Let Triton interpret kernels. Call before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=CpuDriver)


def run_fewer_programs() -> None:
    """The same work in fewer programs of a kernel: here they do not run side by side.

    Call after vLLM is imported.
    """
    from vllm.v1.worker import mamba_utils

    mamba_utils._TEMPORAL_TILES = 1


def split_blocks(size: int) -> None:
    """Let attention kernels take blocks of ``size`` tokens, as FlashInfer's do.

    vLLM's block of N tokens then is N / size of them.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [size]
    )


def allow_drafts() -> None:
    """Let drafts run, which the connector refuses on vLLM's CPU backend.

    Triton's interpreter keeps some masks as integers and then refuses them.
    """
    from triton.language import int1
    from triton.runtime import interpreter

    from vllm_patch import unsound

    unsound.refuse = lambda config: None
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), int1)

    builder.create_masked_load = lambda self, pointers, mask, *rest: load(
        self, pointers, boolean(mask), *rest
    )
    builder.create_masked_store = lambda self, pointers, value, mask, *rest: store(
        self, pointers, value, boolean(mask), *rest
    )


class Server(forkserver.ForkServer):
    """A fork server beside the one that multiprocessing has; started by its first child."""

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(["tests.e2e.preload_v2"])

    def ensure_running(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # It drops what it is told of sys.path.
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            super().ensure_running()


_server = Server()
_starting = threading.Lock()


class Process(ForkServerProcess):
    """A child of :class:`Server`."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        # It asks multiprocessing's one server for a child. So do other threads meanwhile,
        # which must not start engines on V1 then.
        ask = mock.patch.object(
            forkserver, "connect_to_new_process", _server.connect_to_new_process
        )
        with _starting, ask:
            return ForkServerProcess._Popen(process)


class Context(ForkServerContext):
    """In place of ``multiprocessing.get_context("forkserver")``."""

    Process = Process


FORKS = Context()
