# SPDX-License-Identifier: Apache-2.0
"""Finds models in the cache of ``huggingface_hub``: their commit, and whether they are unchanged.

With ``HF_HUB_OFFLINE=1`` vLLM uses a folder of this cache in place of the name.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PLACE = re.compile(r"(?:^|/)models--([^/]+)/snapshots/([0-9a-f]{40})$")


@dataclass(frozen=True)
class Snapshot:
    """A model at one commit.

    Attributes:
        name: on the Hub, ``org/name``.
        folder: where the cache has its files, if it has any.
    """

    name: str
    commit: str
    folder: Path

    @property
    def title(self) -> str:
        return f"{self.name}@{self.commit}"

    def listed(self) -> dict[str, str] | None:
        """Return the Hub's hashes of the files at the commit, by path; None if not cached here.

        Git's SHA-1 of a file, or the SHA-256 of one that the Hub stores outside of git.
        """
        try:
            from huggingface_hub import get_cached_repo_tree
            from huggingface_hub.errors import CachedRepoTreeNotFoundError
        except ImportError:  # without vLLM, or an older one
            return None
        cache = self.folder.parents[2]
        try:
            files = get_cached_repo_tree(self.name, revision=self.commit, cache_dir=cache)
        except (CachedRepoTreeNotFoundError, ValueError, OSError):
            return None  # includes invalid names
        return {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}


def snapshot_at(folder: Path) -> Snapshot | None:
    """Return the snapshot that a folder of a cache holds; None for any other folder."""
    try:
        found = folder.resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all, or links in a circle
        return None
    place = _PLACE.search(str(found))
    return place and Snapshot(place[1].replace("--", "/"), place[2], found)


def snapshot_of(name: str, commit: str) -> Snapshot:
    """Return the snapshot of a model in this process' own cache."""
    from huggingface_hub import constants

    place = f"models--{name.replace('/', '--')}", "snapshots", commit
    return Snapshot(name, commit, Path(constants.HF_HUB_CACHE).joinpath(*place))


def main_commit(name: str) -> str | None:
    """Return the last known commit of a name's main branch; None if not cached."""
    from huggingface_hub import constants

    place = f"models--{name.replace('/', '--')}", "refs", "main"
    try:
        return Path(constants.HF_HUB_CACHE).joinpath(*place).read_text().strip()
    except FileNotFoundError:
        return None


def are_as_listed(files: Mapping[str, Path], listed: Mapping[str, str]) -> bool:
    """Whether files of a snapshot, by their paths in it, have the content that the Hub listed."""
    return all(_has(file, listed.get(name, "")) for name, file in files.items())


def content_of(file: Path) -> bytes:
    """Read a file. An OSError names it even if reading fails, not opening."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _has(file: Path, digest: str) -> bool:
    content = content_of(file)
    if len(digest) == 64:
        return hashlib.sha256(content).hexdigest() == digest
    git = hashlib.sha1(f"blob {len(content)}\0".encode(), usedforsecurity=False)
    git.update(content)
    return git.hexdigest() == digest
