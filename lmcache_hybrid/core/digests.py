# SPDX-License-Identifier: Apache-2.0
"""Digests of stored bytes: plain ones detect damage, keyed ones also foreign writes.

Anybody can compute a plain digest (xxh3). A keyed one (BLAKE3) needs a key that only the engines
have, so it also detects bytes that another program wrote to the store.
"""

import hmac
from typing import TYPE_CHECKING, Protocol, TypeAlias

import xxhash
from blake3 import blake3

if TYPE_CHECKING:
    import numpy as np

Chunk: TypeAlias = "bytes | memoryview | np.ndarray"

DIGEST_BYTES = 16
# Key id and digest of the header, in bytes; zeros in a record without a key.
KEY_ID_BYTES = 8
SEAL_BYTES = KEY_ID_BYTES + 32
UNSEALED = bytes(SEAL_BYTES)


class Digester(Protocol):
    """Digests of one kind. Immutable; any thread may call it.

    Attributes:
        key_id: KEY_ID_BYTES that tell keys apart without revealing them; empty without a key.
    """

    key_id: bytes

    def name(self, fingerprint: bytes) -> bytes:
        """Make the fingerprint for engines with this key, so that records of two keys never mix."""

    def chunk(self, data: Chunk) -> bytes:
        """Digest a chunk of the payload: DIGEST_BYTES. Releases the GIL."""

    def digests(self, data: bytes) -> bytes:
        """Digest the digests of a payload's chunks: DIGEST_BYTES."""

    def seal(self, header: bytes) -> bytes:
        """Seal a header: SEAL_BYTES; UNSEALED without a key."""

    def opens(self, header: bytes, seal: bytes) -> bool:
        """Whether ``seal`` belongs to this header; always True without a key."""


class PlainDigester:
    """Detects damage; seals nothing."""

    key_id = b""

    def name(self, fingerprint: bytes) -> bytes:
        return fingerprint

    def chunk(self, data: Chunk) -> bytes:
        # Its stubs accept an array as a buffer only from Python 3.12 on.
        return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]

    def digests(self, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data)

    def seal(self, header: bytes) -> bytes:
        return UNSEALED

    def opens(self, header: bytes, seal: bytes) -> bool:
        return True


class KeyedDigester:
    """Detects damage, and bytes written without the key. Never shows the key."""

    def __init__(self, secret: bytes) -> None:
        """Derive one key per purpose from ``secret``, so that no digest passes for another."""
        self.key_id = _derive("key id", secret)[:KEY_ID_BYTES]
        self._chunks = _derive("chunk of a payload", secret)
        self._digests = _derive("digests of a payload", secret)
        self._headers = _derive("header", secret)

    def name(self, fingerprint: bytes) -> bytes:
        return blake3(self.key_id + fingerprint).digest(length=len(fingerprint))

    def chunk(self, data: Chunk) -> bytes:
        hasher = blake3(data, key=self._chunks)  # type: ignore[arg-type]  # as above
        return hasher.digest(length=DIGEST_BYTES)

    def digests(self, data: bytes) -> bytes:
        return blake3(data, key=self._digests).digest(length=DIGEST_BYTES)

    def seal(self, header: bytes) -> bytes:
        return self.key_id + blake3(header, key=self._headers).digest()

    def opens(self, header: bytes, seal: bytes) -> bool:
        return hmac.compare_digest(self.seal(header), seal)


PLAIN = PlainDigester()


def _derive(purpose: str, secret: bytes) -> bytes:
    return blake3(secret, derive_key_context=f"lmcache-hybrid 2026 {purpose}").digest()
