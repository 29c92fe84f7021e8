# SPDX-License-Identifier: Apache-2.0
"""Names a rank's records: fingerprints, and LMCache's keys.

A record that all tensor-parallel ranks hold alike has one name on all of them, so that the stores
they share get it once.
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from lmcache.utils import CacheEngineKey

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.core.keys import RecordKey, tags_digest

if TYPE_CHECKING:
    from lmcache.v1.metadata import LMCacheMetadata

TAG = "lmcache.tag."
# LMCache's keys to keep: lookup, pin, read and refresh of a prefix need the same ones.
KEPT_KEYS = 1 << 14
# Groups and tags whose part of a key is kept.
KEPT_TAGS = 1 << 10


@dataclass(frozen=True)
class Replicas:
    """Groups whose pages all tensor-parallel ranks hold alike; all these ranks have equal objects.

    One of them, the owner, writes their records to the stores that ranks share, and all read them
    there. What only one rank sees, its RAM and ``local_disk``, each rank fills for itself.

    Attributes:
        groups: indices of the groups.
        fingerprint: 16 bytes naming model and layout, and no rank.
        owner: the rank whose number is in the keys.
        salt: random bytes of this start of the engine.
    """

    groups: frozenset[int]
    fingerprint: bytes
    owner: int
    salt: bytes

    def sealed_with(self, digester: Digester) -> "Replicas":
        """Rename as :meth:`.Digester.name` does."""
        return replace(self, fingerprint=digester.name(self.fingerprint))

    def after_reset(self, epoch: int) -> "Replicas":
        """Rename so that no other engine has the name, and all ranks of this one do.

        Args:
            epoch: number of the reset, which the scheduler tells all ranks.
        """
        data = self.salt + epoch.to_bytes(8, "big")
        name = hashlib.blake2b(data, digest_size=len(self.fingerprint))
        return replace(self, fingerprint=name.digest())


class RecordNames:
    """The names that one rank uses now; any thread may ask.

    Attributes:
        fingerprint: of the records that only this rank has.
        replicas: those that other ranks have, too; None where there are none.
    """

    def __init__(
        self,
        model_name: str,
        metadata: "LMCacheMetadata",
        fingerprint: bytes,
        replicas: Replicas | None,
    ) -> None:
        self._model_name, self._metadata = model_name, metadata
        self.fingerprint, self.replicas = fingerprint, replicas
        self._keys = functools.lru_cache(KEPT_KEYS)(self._make_key)

    def fingerprint_of(self, key: RecordKey) -> bytes:
        replicas = self.replicas
        if replicas is not None and key.group in replicas.groups:
            return replicas.fingerprint
        return self.fingerprint

    def writer(self, key: RecordKey) -> int:
        """The rank that writes a record to stores that ranks share."""
        replicas = self.replicas
        if replicas is not None and key.group in replicas.groups:
            return replicas.owner
        return self._metadata.worker_id

    def writers(self) -> dict[bytes, int]:
        """The fingerprints of this rank's records, and the rank in the keys of each."""
        writers = {self.fingerprint: self._metadata.worker_id}
        if self.replicas is not None:
            writers[self.replicas.fingerprint] = self.replicas.owner
        return writers

    def is_written_here(self, key: RecordKey) -> bool:
        """Whether this rank is the writer."""
        return self.writer(key) == self._metadata.worker_id

    def engine_key(self, key: RecordKey) -> CacheEngineKey:
        """Make LMCache's key: model, writer, 64 bits of the block hash, and one or two tags.

        One tag carries group and fingerprint, the other a digest of the request's own tags,
        which may have any name and length. The record's header has the full hash.
        """
        return self._keys(self.fingerprint_of(key), key)

    def _make_key(self, fingerprint: bytes, key: RecordKey) -> CacheEngineKey:
        tags = dict(_engine_tags(fingerprint, key.label, key.tags))
        return CacheEngineKey(
            self._model_name,
            self._metadata.world_size,
            self.writer(key),
            int.from_bytes(key.block_hash[:8], "big"),
            torch.uint8,
            tags,
        )

    def reset(self, epoch: int) -> None:
        """Take names that no other engine has, see :meth:`Replicas.after_reset`."""
        self.fingerprint = os.urandom(len(self.fingerprint))
        self.replicas = self.replicas and self.replicas.after_reset(epoch)
        self._keys.cache_clear()


@functools.lru_cache(KEPT_TAGS)
def _engine_tags(
    fingerprint: bytes, label: str, tags: tuple[tuple[str, str], ...]
) -> Mapping[str, str]:
    """What :meth:`RecordNames.engine_key` says of the tags; all keys of a group share it."""
    made = {f"{TAG}hybrid": f"{label}-{fingerprint.hex()[:16]}"}
    if tags:
        made[f"{TAG}of"] = tags_digest(tags).hex()
    return made
