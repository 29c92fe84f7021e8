# SPDX-License-Identifier: Apache-2.0
"""Parses the names under which LMCache stores this package's records."""

import re
from dataclasses import dataclass
from pathlib import Path

from lmcache_hybrid.core.keys import tags_digest
from lmcache_hybrid.identity.hub_cache import snapshot_at

# LMCache's CacheEngineKey with the tag of LMCacheStore.engine_key. Another LMCache user's
# key has no such tag, so it is never taken for ours.
_KEY = re.compile(
    r"(?P<model>[^@]+)@(?P<world>\d{1,9})@(?P<rank>\d{1,9})@(?P<hash>[0-9a-f]{1,16})@uint8"
    r"@hybrid%(?P<label>[as]\d{1,3})-(?P<fingerprint>[0-9a-f]{16})"
    r"(?:@of%(?P<tags>[0-9a-f]{32}))?",
    re.DOTALL,
)
# A file name has at most 255 bytes. The model's part is followed by up to 108, and a suffix.
MODEL_NAME_LENGTH, MODEL_NAME_BYTES = 64, 96
# LMCache's suffix of a value in Redis.
VALUE = "kv_bytes"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A record's name, parsed; the record itself may differ.

    Attributes:
        model: readable name, see :func:`readable_name`.
        world_size, rank: of the engine that wrote it.
        block_hash: first 64 bits of vLLM's block hash.
        label: kind and group, ``a3`` or ``s0``.
        fingerprint: first 8 bytes, in hex.
        tags: digest of the request's own tags, as in the record's header.
    """

    model: str
    world_size: int
    rank: int
    block_hash: int
    label: str
    fingerprint: str
    tags: bytes


def parse_key(text: str) -> StoredKey | None:
    """Parse a name; None if it is not of a record of this package."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    return StoredKey(
        found["model"],
        int(found["world"]),
        int(found["rank"]),
        int(found["hash"], 16),
        found["label"],
        found["fingerprint"],
        bytes.fromhex(found["tags"]) if found["tags"] else tags_digest(()),
    )


def readable_name(model: str) -> str:
    """Shorten a model's name or folder for keys, which become file names.

    A folder in the Hub's cache gets the model's name, as if the model was given by name.
    """
    snapshot = snapshot_at(Path(model))
    name = snapshot.name if snapshot is not None else model
    short = Path(name).name.replace("@", "-")[:MODEL_NAME_LENGTH]
    # Only whole characters, and only valid ones: a folder may have another encoding.
    return short.encode(errors="ignore")[:MODEL_NAME_BYTES].decode(errors="ignore")


def printable(text: str) -> str:
    """Replace characters that could steer a terminal: anybody may have chosen the name."""
    return "".join(char if char.isprintable() else "?" for char in text)
