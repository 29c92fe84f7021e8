# SPDX-License-Identifier: Apache-2.0
"""What KV cache events say of a block, and what keeps that over a restart."""

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Block:
    """What events say of a block, in every group.

    Attributes:
        block_hash, parent_hash: vLLM's.
        tokens: of this block only; fewer than N where it ends inside a block.
        extra_keys: what its hash covers beside the tokens, as vLLM hashes it.
    """

    block_hash: bytes
    parent_hash: bytes | None
    tokens: array
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class KnownBlocks(Protocol):
    """Keeps over a restart what blocks are, and nothing of whether they are stored.

    Used by the scheduler's thread only; no call waits for a disk, save :meth:`close`.
    """

    @property
    def recalling(self) -> bool:
        """Whether :meth:`recalled` has more to return, now or later."""

    def recall(self, held: AbstractSet[bytes]) -> None:
        """Begin to read blocks of before the start; once, before anything is written.

        Args:
            held: :func:`lmcache_hybrid.core.keys.wide_hash` of those that are wanted.
        """

    def recalled(self) -> Sequence[Block]:
        """Return the next ones that were read, each behind its parent; none for none yet."""

    def add(self, blocks: Sequence[Block]) -> None:
        """Keep blocks, each behind its parent."""

    def is_due(self, known: int) -> bool:
        """Whether to call :meth:`rewrite`.

        Args:
            known: blocks that would be kept.
        """

    def rewrite(self, blocks: Sequence[tuple[int, Block]]) -> None:
        """Keep these blocks, by depth, and none that were added before."""

    def erase(self) -> None:
        """Keep nothing of what was added so far, whatever fails later."""

    def close(self) -> None:
        """Write what was added. Idempotent."""
