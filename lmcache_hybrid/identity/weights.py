# SPDX-License-Identifier: Apache-2.0
"""Identifies a model's weights: a digest of those that a rank has loaded.

Paths do not count: different weights get different names, copies the same.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.logger import init_logger

from lmcache_hybrid.core.errors import UnknownWeightsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_hybrid.identity.weights")

# Errors of tensors whose bytes cannot be read.
UNREADABLE = (RuntimeError, TypeError, ValueError, NotImplementedError, OSError, MemoryError)


class TensorDigest:
    """Digests named tensors, in any order. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add all bytes of a tensor; copies one on a device to the host."""
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                self.add(f"{name}.{part}", getattr(tensor, part))
            return
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest = xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy())
        self.add_digest(name, f"{tensor.dtype} {tuple(tensor.shape)} {digest}")

    def add_digest(self, name: str, digest: str) -> None:
        """Add a tensor by its digest."""
        self._lines.append(f"{name} {digest}\n")

    def hexdigest(self) -> str | None:
        """Return the digest of all tensors so far; None without any."""
        lines = "".join(sorted(self._lines))
        return xxhash.xxh3_128_hexdigest(lines.encode()) if lines else None


class WeightsStream:
    """Digests the tensors that a loader reads, and passes them on. Not thread-safe."""

    def __init__(self) -> None:
        self._digest = TensorDigest()
        self._problem: Exception | None = None

    def read(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        is_unused: Callable[[str], bool] = lambda name: False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor after adding it: some loaders reuse its memory.

        Args:
            is_unused: whether the model skips the tensor of a name. It is not read from the disk:
                a drafter's checkpoint is its whole target's, whose digest has the rest.
        """
        for name, tensor in weights:
            if self._problem is None and not is_unused(name):
                try:
                    self._digest.add(name, tensor)
                except UNREADABLE as error:
                    self._problem = error
                    logger.warning("Cannot read the bytes of weight %s: %r.", name, error)
            yield name, tensor

    def identity(self, model: nn.Module) -> str | None:
        """Name the streamed tensors, or the model's if none were streamed.

        Returns:
            None if a tensor could not be read.
        """
        if self._problem is not None:
            return None
        streamed = self._digest.hexdigest()
        return f"checkpoint {streamed}" if streamed else tensors_identity(model)


def tensors_identity(model: nn.Module) -> str | None:
    """Name a model's tensors; None if one cannot be read.

    For loaders that write into a model's tensors themselves; call it before these are converted
    for kernels.
    """
    # Imported here, as most processes do not need it.
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    tensors = TensorDigest()
    try:
        digests = compute_tensor_digests(model)
        for name, digest in digests.items():
            tensors.add_digest(name, digest)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, tensor in model.state_dict().items():
            if name not in parameters and isinstance(tensor, torch.Tensor):
                tensors.add(name, tensor)
    except UNREADABLE as error:
        logger.warning("Cannot read the tensors of the model: %r.", error)
        return None
    found = tensors.hexdigest()
    return found and f"tensors {found}"


class _Loaded(NamedTuple):
    """See :meth:`LoadedWeights.note`."""

    owner: weakref.ref
    identity: str
    classes: frozenset[type]


class LoadedWeights:
    """The weights and classes that this process has loaded, by vLLM's ``ModelConfig`` object.

    Written by the thread that loads and runs the model; any thread may read. An entry lives as
    long as its configuration. A reload in place does not change it, see
    :mod:`lmcache_hybrid.storage.weights_guard`.

    Attributes:
        changes: counts writes of weights into a loaded model.
        discarded: a sleep discarded the weights, and none were loaded since.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.discarded = False
        self._loaded: dict[int, _Loaded] = {}

    def note(
        self, model_config: Any, identity: str | None, classes: frozenset[type] = frozenset()
    ) -> None:
        """Note the identity of a loaded model; None forgets it.

        Args:
            classes: those of the model's modules.
        """
        self._loaded.pop(id(model_config), None)
        if identity is not None:
            loaded = _Loaded(weakref.ref(model_config), identity, classes)
            self._loaded[id(model_config)] = loaded

    def of(self, model_config: Any) -> str | None:
        """Return the identity noted for this very object; None if none."""
        loaded = self._of(model_config)
        return loaded and loaded.identity

    def classes_of(self, model_config: Any) -> frozenset[type]:
        """Return the classes noted for this very object; empty if none."""
        loaded = self._of(model_config)
        return loaded.classes if loaded is not None else frozenset()

    def _of(self, model_config: Any) -> _Loaded | None:
        loaded = self._loaded.get(id(model_config))
        return loaded if loaded is not None and loaded.owner() is model_config else None


LOADED = LoadedWeights()
# Key under which a rank sends its problem instead of its weights, in _of_all_ranks.
_PROBLEM = "problem"


def models_of(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Return the configurations of the model and of the draft model, if any."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    return {"model": vllm_config.model_config, **({"draft model": draft} if draft else {})}


def weights_identity(
    vllm_config: "VllmConfig",
    problem: str | None = None,
    code: Mapping[str, list[str]] = MappingProxyType({}),
) -> dict[str, list[str]]:
    """Name the weights of model and draft model on all ranks, and the code that computes with them.

    A rank's pages also depend on the other ranks' weights. A collective call: every rank makes it
    once, after its model is loaded, even one with a problem: the others would wait for ever.

    Args:
        problem: why this rank can serve nothing, as a part of a sentence.
        code: this rank's code from outside vLLM, see :func:`.model_code`.

    Raises:
        UnknownWeightsError: on every rank, if any rank has a problem or does not know its
            weights.
    """
    models = models_of(vllm_config)
    # A rank that joins later gets its weights from others after it has loaded dummy ones.
    elastic = vllm_config.parallel_config.enable_elastic_ep
    own = {label: None if elastic else LOADED.of(config) for label, config in models.items()}
    for label, names in code.items():
        own[label] = own[label] and f"{own[label]} by {', '.join(names)}"
    ranks = _of_all_ranks(own if problem is None else {_PROBLEM: problem})
    for rank, said in enumerate(ranks):
        if said.get(_PROBLEM) is not None:
            which = f"on rank {rank} " if len(ranks) > 1 else ""
            raise UnknownWeightsError(f"{which}{said[_PROBLEM]}")
    found: dict[str, list[str]] = {}
    for label, config in models.items():
        identities = [rank[label] for rank in ranks]
        known = [identity for identity in identities if identity is not None]
        if len(known) < len(identities):
            cause = "enable_elastic_ep" if elastic else f"load_format={_format(vllm_config)}"
            raise UnknownWeightsError(
                f"{cause} does not tell which weights the {label} {config.model} has got, "
                "use another one"
            )
        # One name if all are equal: some loaders read the whole checkpoint on every rank.
        found[label] = known if len(set(known)) > 1 else known[:1]
    return found


def _format(vllm_config: "VllmConfig") -> str:
    return str(vllm_config.load_config.load_format)


def _of_all_ranks(own: dict[str, str | None]) -> list[dict[str, str | None]]:
    if not torch.distributed.is_initialized():
        return [own]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    ranks = [own] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    return ranks
