# SPDX-License-Identifier: Apache-2.0
"""Identifies the files beside a model's weights: by name and commit on the Hub, or by content."""

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import xxhash

from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.identity.hub_cache import (
    Snapshot,
    are_as_listed,
    content_of,
    snapshot_at,
    snapshot_of,
)

# Files beside the weights that affect results: configurations and code, also in subfolders.
_CODE = "*.py"
_FILES = ("*config*.json", _CODE)


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
