# SPDX-License-Identifier: Apache-2.0
"""Models in the cache of ``huggingface_hub``, whose folders say of which name and commit they are.

With ``HF_HUB_OFFLINE=1`` vLLM takes such a folder in the name's place.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PLACE = re.compile(r"(?:^|/)models--([^/]+)/snapshots/([0-9a-f]{40})$")


@dataclass(frozen=True)
class Snapshot:
    """A model at one commit.

    Attributes:
        name: on the Hub, ``org/name``.
    """

    name: str
    commit: str


def snapshot_at(folder: Path) -> Snapshot | None:
    """What a folder in the cache holds by its path; None for any other folder."""
    place = _PLACE.search(str(folder.resolve()))
    return place and Snapshot(place[1].replace("--", "/"), place[2])


def folder_of(snapshot: Snapshot) -> Path | None:
    """Where the cache of this process has a snapshot; None where it has none."""
    # Not there without vLLM, where records are looked into.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(snapshot.name, "config.json", revision=snapshot.commit)
    except HFValidationError:  # vLLM takes names that the Hub does not have
        return None
    return Path(found).parent if isinstance(found, str) else None


def are_as_downloaded(files: Sequence[Path]) -> bool:
    """Whether files of a snapshot have the content that the Hub named.

    The cache links each to a file that is called by git's SHA-1 of the content, or by a SHA-256
    where the Hub keeps it apart from git. Also False where it holds copies instead of links.
    """
    return all(_is_as_downloaded(file) for file in files)


def were_changed(files: Sequence[Path]) -> bool:
    """Whether files of a snapshot have another content; False where the cache holds copies."""
    return any(file.is_symlink() for file in files) and not are_as_downloaded(files)


def _is_as_downloaded(file: Path) -> bool:
    name, content = file.resolve().name, file.read_bytes()
    if len(name) == 64:
        return hashlib.sha256(content).hexdigest() == name
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest() == name
