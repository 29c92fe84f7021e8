# SPDX-License-Identifier: Apache-2.0
"""Identifies a model's code from outside vLLM.

vLLM's own classes count with vLLM's version, torch's change at most the order of sums, and code
beside the weights counts with those files (:mod:`lmcache_hybrid.identity.model_files`). The rest is
code of plugins, of transformers, and of other repositories than the model's.
"""

import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lmcache_hybrid.core.errors import UnknownCodeError
from lmcache_hybrid.identity.code import code_identity, homes
from lmcache_hybrid.identity.hub_cache import main_commit, snapshot_at
from lmcache_hybrid.identity.model_files import folder_of
from lmcache_hybrid.identity.weights import LOADED, models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VLLM = frozenset({"vllm", "torch", *sys.stdlib_module_names})
# The same functions in every version; many of vLLM's own vision towers use them.
_ACTIVATIONS = "transformers.activations"
# Package of code that comes with models (`auto_map`): of a repository at a commit, or of a
# folder, with a digest of the file and of its imports beside it.
_REMOTE = "transformers_modules"
_OF_REPOSITORY = re.compile(rf"{_REMOTE}\.(.+)\.([0-9a-f]{{40}})\.")
_OF_FOLDER = re.compile(rf"{_REMOTE}\.([^.]+)\.([0-9a-f]{{16}})\.")
# Keys of `auto_map` for media processors.
_PROCESSORS = frozenset(
    {"AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor"}
)


def classes_of(model: nn.Module) -> frozenset[type]:
    """Return the classes of all modules of a model, and of their quantisation methods."""
    parts = list(model.modules())
    methods = (getattr(part, "quant_method", None) for part in parts)
    return frozenset(map(type, parts)) | {type(each) for each in methods if each is not None}


def model_code(vllm_config: "VllmConfig") -> dict[str, list[str]]:
    """Identify the code from outside vLLM of the models that this process has loaded.

    Packages count with distribution and version, or by content, see :func:`.code_identity`; code
    of another repository than the model's with its commit; code of another folder by content.

    Returns:
        Names by ``model`` and ``draft model``; no entry for one that is all vLLM's.

    Raises:
        UnknownCodeError: some of the code cannot be identified.
    """
    models = models_of(vllm_config)
    known = {commit for config in models.values() for commit in _commits(config)}
    found = {label: _names(config, known) for label, config in models.items()}
    return {label: sorted(names) for label, names in found.items() if names}


def _commits(config: Any) -> Iterator[str | None]:
    """Yield commits that the fingerprint already has: of the model's files and of its code."""
    yield getattr(config.revision, "resolved", config.revision)
    yield config.code_revision
    snapshot = snapshot_at(Path(config.model))
    if snapshot is not None:
        yield snapshot.commit


def _names(config: Any, known: Collection[str | None]) -> set[str]:
    """Names for one model."""
    names: set[str] = set()
    modules: dict[str, str] = {}
    computing = set(_homes(LOADED.classes_of(config)))
    # The fingerprint has the values of transformers' own configurations, so their code is left out.
    reading = {
        (module, code)
        for module, code in _homes(map(type, _configurations(config.hf_config)))
        if module.partition(".")[0] != "transformers"
    }
    for module, code in computing | reading:
        top = module.partition(".")[0]
        if top == _REMOTE:
            names |= _remote(module, code, config, known)
        elif top not in _VLLM and module != _ACTIVATIONS:
            modules[module] = code
    if config.multimodal_config is not None and config.trust_remote_code:
        names |= set(_processors(config, known))
    for module, code in modules.items():
        identity = code_identity(module)
        if identity is None:
            raise UnknownCodeError(
                f"the code of {code}, which {config.model} is made of, belongs to no package and "
                "no file; put it into a module of its own"
            )
        names.add(identity)
    return names


def _homes(classes: Iterable[type]) -> Iterator[tuple[str, str]]:
    """Yield the modules that classes and their bases are written in, with each class's name."""
    for code in classes:
        for base in code.__mro__:
            for module in homes(base):
                yield module, f"{base.__module__}.{base.__qualname__}"


def _configurations(config: Any) -> Iterator[Any]:
    """Yield a configuration and those within it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _configurations(value)


def _processors(config: Any, known: Collection[str | None]) -> Iterator[str]:
    """Name other repositories of processors, which prepare media in any process.

    Which commit was imported there is not reported: transformers takes that of the main branch,
    whose last one is in the Hub's cache.
    """
    for file in folder_of(config).glob("*config*.json"):
        try:
            places = json.loads(file.read_bytes()).get("auto_map", {})
        except (ValueError, AttributeError):  # no class is read from it
            continue
        for kind in _PROCESSORS & places.keys():
            name = places[kind].rpartition("--")[0]
            commit = main_commit(name) if name else None
            if commit is not None and commit not in known:
                yield f"{name}@{commit}"


def _remote(module: str, code: str, config: Any, known: Collection[str | None]) -> set[str]:
    """Name code that came with a model; empty if it counts with the model's files.

    Raises:
        UnknownCodeError: the module's name is not one that transformers gives.
    """
    if found := _OF_REPOSITORY.match(module):
        return set() if found[2] in known else {f"{found[1]}@{found[2]}"}
    folder = os.path.basename(os.path.normpath(config.model))
    # Another folder (of --hf-config-path, or named with "--") may have the same name.
    references = (getattr(config.hf_config, "auto_map", None) or {}).values()
    elsewhere = config.hf_config_path is not None or any("--" in str(each) for each in references)
    if not elsewhere and module.startswith(f"{_REMOTE}.{_module_name(folder)}."):
        return set()
    if found := _OF_FOLDER.match(module):
        return {f"code {found[2]}"}
    raise UnknownCodeError(
        f"nobody knows where {code}, which {config.model} is made of, comes from; put that code "
        "into the model's folder"
    )


def _module_name(folder: str) -> str:
    """Convert a folder's name as transformers does for module names."""
    name = folder.replace(".", "_dot_").replace("-", "_hyphen_")
    return f"_{name}" if name[:1].isdigit() else name
