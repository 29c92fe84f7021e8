# SPDX-License-Identifier: Apache-2.0
"""Keys of records."""

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
        boundary: in tokens, a multiple of U. Inside a block the page is partly filled, and a
            record of its own: the whole block's has another hash and boundary.
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
    """16 bytes that stand for ``tags`` in a header."""
    # Clients choose them, so not a hash that can be made to collide.
    return hashlib.blake2b(repr(tags).encode(), digest_size=16).digest()


def wide_hash(block_hash: bytes) -> bytes:
    """32 bytes that stand for a block hash in a header: itself where it is a SHA-256."""
    # "32s" would cut a longer hash and pad a shorter one without a word.
    return block_hash if len(block_hash) == 32 else xxhash.xxh3_128_digest(block_hash) * 2
