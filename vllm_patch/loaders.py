# SPDX-License-Identifier: Apache-2.0
"""Notes which weights, classes and LoRA adapters vLLM has loaded, for the fingerprint.

vLLM reads weights in many ways and from many places. Nearly all end in
``model.load_weights(tensors)``, where they are digested. For adapters see
:mod:`lmcache_hybrid.identity.adapters`.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.identity.model_code import classes_of
from lmcache_hybrid.identity.weights import LOADED, WeightsStream, tensors_identity
from vllm_patch import kimi_k3, partial_hits, sessions, sleep
from vllm_patch.configuration import CONNECTOR, is_ours

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

# Loaders that put all weights into parameters and buffers without ``load_weights``.
_WHOLE = ("TensorizerLoader", "IpcModelLoader")


def install() -> None:
    """Hook vLLM's loaders of models and of adapters. Mutates their base classes."""
    _note_weights()
    _note_adapters()


def _note_weights() -> None:
    """Wrap ``load_model`` of every loader made from now on.

    Weights of a loader that skips ``BaseModelLoader.__init__`` are not noted.
    """
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.__init__

    @functools.wraps(original)
    def __init__(self: BaseModelLoader, load_config: "LoadConfig") -> None:
        original(self, load_config)
        self.load_model = functools.partial(_load_model, self, self.load_model)

    BaseModelLoader.__init__ = __init__


def _note_adapters() -> None:
    """Hook the class that loads adapters on every rank."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    begin, read = WorkerLoRAManager.__init__, WorkerLoRAManager._load_adapter

    @functools.wraps(begin)
    def __init__(
        self: WorkerLoRAManager, vllm_config: "VllmConfig", *args: Any, **kwargs: Any
    ) -> None:
        begin(self, vllm_config, *args, **kwargs)
        if is_ours(vllm_config):
            ADAPTERS.serve(self, read)

    @functools.wraps(read)
    def _load_adapter(self: WorkerLoRAManager, lora_request: "LoRARequest") -> "LoRAModel":
        if not ADAPTERS.serves(self):
            return read(self, lora_request)
        return ADAPTERS.load(lora_request)

    WorkerLoRAManager.__init__ = __init__
    WorkerLoRAManager._load_adapter = _load_adapter


def _load_model(
    loader: "BaseModelLoader",
    load: Callable[..., "nn.Module"],
    vllm_config: "VllmConfig",
    model_config: "ModelConfig",
    prefix: str = "",
) -> "nn.Module":
    """Load the model, and note its weights if this connector is used."""
    if not is_ours(vllm_config):
        return load(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    if model_config is vllm_config.model_config:
        _check_settings(vllm_config)
    # Before the first step; the runner is imported by now.
    partial_hits.copy_whole_pages()
    sessions.forget_columns_of_parts()
    LOADED.note(model_config, None)
    with _noted(loader):
        model = load(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    kimi_k3.write_windows_as_they_are_read(model)
    if LOADED.of(model_config) is None and type(loader).__name__ in _WHOLE:
        LOADED.note(model_config, tensors_identity(model), classes_of(model))
    if hasattr(model, "load_weights"):
        model.load_weights = _changing(model.load_weights)
    _count_reloads()
    return model


def _check_settings(vllm_config: "VllmConfig") -> None:
    """Refuse options before the weights are loaded, which may take minutes.

    Raises:
        ConfigError: they cannot be served.
    """
    # Off for a model that LMCache's own adapter serves.
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    from lmcache_hybrid.config.check import checked_options  # imports LMCache

    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector != CONNECTOR:  # it reads its own part of a MultiConnector's
        children = transfer.kv_connector_extra_config["connectors"]
        ours = next(each for each in children if each.get("kv_connector") == CONNECTOR)
        vllm_config = copy.copy(vllm_config)
        vllm_config.kv_transfer_config = type(transfer)(**ours)
    checked_options(vllm_config)


@functools.cache
def _count_reloads() -> None:
    """Count changes of weights that bypass ``load_weights``.

    Trainers send weights in the kernels' format, written into parameters at once or when the
    update ends.
    """
    from vllm.v1.worker.gpu_worker import Worker  # too much for processes that load no model

    sleep.follow(Worker)
    Worker.reload_weights = _changing(Worker.reload_weights)
    Worker.reset_weights = _changing(Worker.reset_weights, known=False)
    Worker.update_weights = _changing(Worker.update_weights)
    Worker.finish_weight_update = _changing(Worker.finish_weight_update)


def _changing(write: Callable[..., Any], known: bool = True) -> Callable[..., Any]:
    """Wrap a function that writes weights into a loaded model, so that each call is counted.

    Args:
        known: whether weights that a sleep discarded are loaded again after it.
    """

    @functools.wraps(write)
    def counted(*args: Any, **kwargs: Any) -> Any:
        LOADED.changes += 1
        try:
            result = write(*args, **kwargs)
            LOADED.discarded &= not known
            return result
        finally:
            LOADED.changes += 1  # a reset during the write does not count

    return counted


@contextmanager
def _noted(loader: "BaseModelLoader") -> Iterator[None]:
    """Note the weights that ``loader.load_weights`` reads. Mutates the loader meanwhile."""
    load_weights = loader.load_weights

    def noting(model: "nn.Module", model_config: "ModelConfig") -> None:
        stream = WeightsStream()
        with _streamed(model, stream):
            load_weights(model, model_config)
        LOADED.note(model_config, stream.identity(model), classes_of(model))

    loader.load_weights = noting
    try:
        yield
    finally:
        del loader.load_weights


@contextmanager
def _streamed(model: "nn.Module", stream: WeightsStream) -> Iterator[None]:
    """Pass the tensors for ``model.load_weights`` through ``stream``. Mutates the model."""
    load_weights = getattr(model, "load_weights", None)
    if load_weights is None:
        yield
        return
    own = vars(model).get("load_weights")
    is_unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)

    def counting(weights: Iterable[tuple[str, "torch.Tensor"]], *args: Any, **kwargs: Any) -> Any:
        return load_weights(stream.read(weights, is_unused), *args, **kwargs)

    model.load_weights = counting
    try:
        yield
    finally:
        del model.load_weights
        if own is not None:
            model.load_weights = own
