# SPDX-License-Identifier: Apache-2.0
"""Identifies a model: a digest of the weights that a rank has loaded, and the files beside them.

Paths do not count: different weights get different names, copies the same.
"""

import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.logger import init_logger

from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.identity.hub_cache import (
    Snapshot,
    are_as_listed,
    content_of,
    snapshot_at,
    snapshot_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_hybrid.identity.weights")

# Files beside the weights that affect results: configurations and code, also in subfolders.
_CODE = "*.py"
_FILES = ("*config*.json", _CODE)
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
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor after adding it: some loaders reuse its memory."""
        for name, tensor in weights:
            if self._problem is None:
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


def files_identity(model_config: Any) -> str:
    """Name the files beside the weights: configurations, processors and code.

    A name on the Hub gives the name and its commit, unless files in the Hub's cache differ from
    those that the Hub listed. So does the name's folder in that cache, if it has all listed files.
    Any other folder (or a weight file's folder) gives a digest of these files, without their paths
    and times.

    Raises:
        UnknownWeightsError: neither files nor commit are known, or a file cannot be read.
    """
    try:
        return _files_identity(model_config)
    except OSError as error:
        raise UnknownWeightsError(
            f"{error.filename or model_config.model} cannot be read ({error.strerror or error}), "
            "and such files beside the weights count: make it readable, or remove it"
        ) from error


def _files_identity(model_config: Any) -> str:
    model, path = model_config.model, Path(model_config.model)
    snapshot: Snapshot | None
    if path.exists():
        files = _files_in(folder_of(model_config))
        snapshot = snapshot_at(path)
        listed = snapshot.listed() if snapshot is not None else None
        # A missing file may be read from another place, or replaced by a default. Code in a
        # subfolder may be missing: if the model's code needs it, the engine does not start.
        whole = listed is not None and _counted(listed) == {n for n in files if "/" not in n}
    else:
        snapshot = snapshot_of(model, _commit(model_config))
        files, listed, whole = _files_in(snapshot.folder), snapshot.listed(), True
    if snapshot is not None and whole and (listed is None or are_as_listed(files, listed)):
        return snapshot.title
    digest = xxhash.xxh3_128()
    for name, file in files.items():
        content = content_of(file)
        digest.update(f"{name} {len(content)}\n".encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def folder_of(model_config: Any) -> Path:
    """Return the folder of the files beside the weights, which may not exist.

    Raises:
        UnknownWeightsError: neither a folder nor a commit is known.
    """
    path = Path(model_config.model)
    if path.exists():
        return path.parent if path.is_file() else path
    return snapshot_of(model_config.model, _commit(model_config)).folder


def _counted(names: Iterable[str]) -> set[str]:
    """Select the names that match :data:`_FILES`, without those in subfolders."""
    return {n for n in names if "/" not in n and any(fnmatch(n, each) for each in _FILES)}


def _files_in(folder: Path) -> dict[str, Path]:
    """Find the files of a folder that match :data:`_FILES`, by name, in fixed order.

    Includes code in subfolders, links followed. Empty if there is no folder.
    """
    found = {file.name: file for pattern in _FILES for file in folder.glob(pattern)}
    seen = {os.path.realpath(folder)}
    for place, inner, names in os.walk(folder, followlinks=True):
        # Links may lead in circles.
        inner[:] = [each for each in sorted(inner) if not _seen(os.path.join(place, each), seen)]
        code = (Path(place, name) for name in names if fnmatch(name, _CODE))
        found.update({file.relative_to(folder).as_posix(): file for file in code})
    return {name: file for name, file in sorted(found.items()) if file.is_file()}


def _seen(folder: str, seen: set[str]) -> bool:
    """Whether a folder was seen before; adds it."""
    real = os.path.realpath(folder)
    known = real in seen
    seen.add(real)
    return known


def _commit(model_config: Any) -> str:
    """Return the commit that vLLM loads, from ``ModelConfig.revision``.

    vLLM resolves the revision once. ``huggingface_hub`` returns a text that reads as the user
    wrote it ("main" by default), with the commit as an attribute.

    Raises:
        UnknownWeightsError: it is not known.
    """
    revision = model_config.revision
    code = model_config.code_revision
    if code is not None and not re.fullmatch("[0-9a-f]{40}", code):
        raise UnknownWeightsError(
            f"code_revision={code!r} may move to another commit, name the commit instead"
        )
    commit = getattr(revision, "resolved", revision)
    if not re.fullmatch("[0-9a-f]{40}", commit or ""):
        raise UnknownWeightsError(
            f"{model_config.model} is neither a local folder nor a name whose commit the Hub or "
            "its cache here could tell, download it and name its folder"
        )
    return commit
