# SPDX-License-Identifier: Apache-2.0
"""Notes what vLLM loads as LoRA adapters, see :mod:`lmcache_hybrid.identity.adapters`."""

import functools
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.identity.adapters import ADAPTERS
from vllm_patch.config_hooks import CONNECTOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest


def install() -> None:
    """Hook the class that loads adapters on every rank. Mutates it."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    begin, read = WorkerLoRAManager.__init__, WorkerLoRAManager._load_adapter

    @functools.wraps(begin)
    def __init__(
        self: WorkerLoRAManager, vllm_config: "VllmConfig", *args: Any, **kwargs: Any
    ) -> None:
        begin(self, vllm_config, *args, **kwargs)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.has_connector(CONNECTOR):
            ADAPTERS.serve(self, read)

    @functools.wraps(read)
    def _load_adapter(self: WorkerLoRAManager, lora_request: "LoRARequest") -> "LoRAModel":
        if not ADAPTERS.serves(self):
            return read(self, lora_request)
        return ADAPTERS.load(lora_request)

    WorkerLoRAManager.__init__ = __init__
    WorkerLoRAManager._load_adapter = _load_adapter
