# SPDX-License-Identifier: Apache-2.0
"""Finds the records in the folders of ``local_disk``."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache.utils import CacheEngineKey
from vllm.logger import init_logger

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.storage.disk.files import open_regular
from lmcache_hybrid.storage.key_names import parse_key
from lmcache_hybrid.storage.record_format import HEADER_BYTES, Header, read_header, record_bytes

if TYPE_CHECKING:
    from lmcache.v1.metadata import LMCacheMetadata

logger = init_logger("vllm.lmcache_hybrid.storage.disk.index")

SUFFIX = ".pt"
EVICTED = ".evicted"
_NAME = re.compile(r"(.+)\.pt(\.\d+\.\d+\.evicted)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A record's file.

    Attributes:
        path: of the file.
        size: in bytes.
        device: number of its file system.
        written: its time of modification, in seconds since the epoch.
        key: LMCache's key where this is a whole record of the asking rank; None for one of
            another model, fingerprint or number of ranks, or a damaged one.
        header: of such a record.
    """

    path: str
    size: int
    device: int
    written: float
    key: CacheEngineKey | None
    header: Header | None = None


def find(
    folders: Sequence[str],
    model_name: str,
    writers: Mapping[bytes, int],
    metadata: "LMCacheMetadata",
) -> list[Found]:
    """Find the files that count towards this rank's size limit, the oldest first.

    Ranks share folders, each with a size limit of its own. A rank counts the files of its own
    number, and its share of those of ranks that this engine does not have. Files that are not
    named like a record stay and do not count.

    Deletes files that an engine had evicted and not yet deleted. Header and length of this rank's
    records are checked here, payload digests at the load.

    Args:
        folders: each of them once.
        writers: this rank's fingerprints, and the rank in the keys of each.
    """
    found = []
    model = model_name.replace("/", "-")
    prefix = f"{model}@{metadata.world_size}@{metadata.worker_id}@"
    for entry in itertools.chain.from_iterable(map(_entries, folders)):
        name = _NAME.fullmatch(entry.name)
        if name is None:
            continue
        # Our model's name may contain any character.
        own = name[1].startswith(prefix)
        stored = parse_key("model" + name[1][len(model) :] if own else name[1])
        if stored is None or stored.rank % metadata.world_size != metadata.worker_id:
            continue
        try:
            if not entry.is_file(follow_symlinks=False):
                continue
            if name[2] and _deleted(entry.path):
                continue
            status = entry.stat(follow_symlinks=False)
            own = own and not name[2]
            record = _own(entry, model_name, writers, status.st_size) if own else (None,)
            found.append(Found(entry.path, status.st_size, status.st_dev, status.st_mtime, *record))
        except OSError as error:  # gone meanwhile, or not accessible
            logger.debug("Left %s alone: %s", entry.name, error)
    return sorted(found, key=lambda file: file.written)


def _entries(folder: str) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        yield from entries


def _deleted(path: str) -> bool:
    """Delete a file; False if it stays and still takes its space."""
    try:
        os.unlink(path)
    except OSError as error:
        logger.debug("%s stays: %s", path, error)
        return isinstance(error, FileNotFoundError)
    return True


def _own(
    file: "os.DirEntry[str]", model_name: str, writers: Mapping[bytes, int], size: int
) -> tuple[CacheEngineKey | None, Header | None]:
    rest = file.name[len(model_name) :].removesuffix(SUFFIX)
    try:
        key = CacheEngineKey.from_string("model" + rest)
        with open_regular(file.path) as data:
            header = read_header(data.read(HEADER_BYTES))
    except (OSError, RecordError, ValueError, KeyError) as error:
        logger.debug("%s is no record: %s", file.name, error)
        return None, None
    key.model_name = model_name
    writer = writers.get(header.fingerprint)
    if writer is None or size != record_bytes(header.length):
        return None, None
    return key.with_new_worker_id(writer), header
