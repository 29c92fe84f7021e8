# SPDX-License-Identifier: Apache-2.0
"""Models in the cache of ``huggingface_hub``: at which commit they are, and whether unchanged.

With ``HF_HUB_OFFLINE=1`` vLLM takes a folder of this cache in the name's place.
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
        """Hashes that the Hub gave of the files at the commit, by path; None if not kept here.

        Git's SHA-1 of a file, or the SHA-256 of one that the Hub keeps apart from git.
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
            return None  # also a name that the Hub cannot have
        return {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}


def snapshot_at(folder: Path) -> Snapshot | None:
    """The snapshot whose place in a cache a folder is; None for any other folder."""
    try:
        found = folder.resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all, or links in a circle
        return None
    place = _PLACE.search(str(found))
    return place and Snapshot(place[1].replace("--", "/"), place[2], found)


def snapshot_of(name: str, commit: str) -> Snapshot:
    """The snapshot of a model in this process' own cache."""
    from huggingface_hub import constants

    place = f"models--{name.replace('/', '--')}", "snapshots", commit
    return Snapshot(name, commit, Path(constants.HF_HUB_CACHE).joinpath(*place))


def main_commit(name: str) -> str | None:
    """The commit that a name's main branch was last seen at; None where none of it is cached."""
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
    """Read a file. An OSError names it, also where reading fails and not opening."""
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
