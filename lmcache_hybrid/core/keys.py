# SPDX-License-Identifier: Apache-2.0
"""Record keys."""

import hashlib
from typing import NamedTuple

import xxhash

ATTENTION, STATE = 0, 1


class RecordKey(NamedTuple):
    """Names one record. The store adds model, rank and layout.

    Attributes:
        kind: ATTENTION (pages of one block, from its start up to ``boundary``) or STATE (states
            at ``boundary``).
        group: KV cache group index.
        block_hash: vLLM's block hash of all tokens up to ``boundary``. It covers
            tokens, multimodal items, LoRA name and cache salt; 32 bytes for SHA-256.
        boundary: in tokens, a multiple of U. A partly filled page is a record of its own: the
            whole block's has another hash and boundary.
        tags: further (name, value) pairs that keep requests apart, such as a LoRA adapter's.
    """

    kind: int
    group: int
    block_hash: bytes
    boundary: int
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """Kind and group as they appear in store keys: ``a3``, ``s0``."""
        return f"{'as'[self.kind]}{self.group}"

    @property
    def kind_name(self) -> str:
        return ("attention", "state")[self.kind]


def tags_digest(tags: tuple[tuple[str, str], ...]) -> bytes:
    """Digest ``tags`` to 16 bytes, for a header."""
    # Clients choose them, so use a hash without known collisions.
    return hashlib.blake2b(repr(tags).encode(), digest_size=16).digest()


def wide_hash(block_hash: bytes) -> bytes:
    """Fit a block hash into 32 bytes, for a header; a SHA-256 stays as it is."""
    # "32s" would silently cut a longer hash and pad a shorter one.
    return block_hash if len(block_hash) == 32 else xxhash.xxh3_128_digest(block_hash) * 2
