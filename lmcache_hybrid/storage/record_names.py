# SPDX-License-Identifier: Apache-2.0
"""Names a rank's records: fingerprints, and LMCache's keys.

A record that is equal on all tensor-parallel ranks has one name on all of them, so that shared
stores get it once.
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
# Cached keys: lookup, pin, read and refresh of a prefix need the same ones.
KEPT_KEYS = 1 << 14
# Cached tags of keys, one per group and tags.
KEPT_TAGS = 1 << 10


@dataclass(frozen=True)
class Replicas:
    """Groups whose pages are equal on all tensor-parallel ranks, which have equal objects of this.

    One rank, the owner, writes their records to shared stores, and all read them there. Each rank
    fills the tiers that only it sees: RAM and ``local_disk``.

    Attributes:
        groups: indices of the groups.
        fingerprint: 16 bytes naming model and layout, but not the rank.
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
        """Take a name that all ranks of this engine share, and no other engine has.

        Args:
            epoch: number of the reset, the same on all ranks.
        """
        data = self.salt + epoch.to_bytes(8, "big")
        name = hashlib.blake2b(data, digest_size=len(self.fingerprint))
        return replace(self, fingerprint=name.digest())


class RecordNames:
    """The names that one rank uses now. Any thread may call it.

    Attributes:
        fingerprint: of the records that only this rank has.
        replicas: groups that other ranks also hold; None where there are none.
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
        """Return the rank that writes a record to shared stores."""
        replicas = self.replicas
        if replicas is not None and key.group in replicas.groups:
            return replicas.owner
        return self._metadata.worker_id

    def writers(self) -> dict[bytes, int]:
        """Return the fingerprints of this rank's records, with the rank in their keys."""
        writers = {self.fingerprint: self._metadata.worker_id}
        if self.replicas is not None:
            writers[self.replicas.fingerprint] = self.replicas.owner
        return writers

    def is_written_here(self, key: RecordKey) -> bool:
        """Whether this rank is the writer."""
        return self.writer(key) == self._metadata.worker_id

    def engine_key(self, key: RecordKey) -> CacheEngineKey:
        """Make LMCache's key: model, writer, 64 bits of the block hash, and one or two tags.

        One tag holds group and fingerprint, the other a digest of the request's own tags, which
        may have any name and length. The record's header has the full hash.
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
    """Make the tags of :meth:`RecordNames.engine_key`; all keys of a group share them."""
    made = {f"{TAG}hybrid": f"{label}-{fingerprint.hex()[:16]}"}
    if tags:
        made[f"{TAG}of"] = tags_digest(tags).hex()
    return made
