# SPDX-License-Identifier: Apache-2.0
"""Lookup messages: the scheduler's request to the ranks, and their result.

A hit at B needs the attention pages of [0, B), the last pages before B of window groups, and the
state at B, of every group and rank.
"""

import math
from collections.abc import Iterator

import msgspec

from lmcache_hybrid.identity.adapters import Adapter
from lmcache_hybrid.protocol.prefix import Prefix


class LookupRequest(msgspec.Struct, frozen=True, array_like=True):
    """A lookup that the scheduler sends to every rank.

    Attributes:
        request_id: whose claim the result replaces.
        prefix: of the prompt.
        limit: deepest boundary allowed, in blocks.
        floor: blocks that vLLM holds; nothing at or below them is claimed.
        deadline: ``time.monotonic`` by which a rank must end this round, before the scheduler
            stops waiting. Set on the rank, by its own clock.
        again: whether this is a further round of the same lookup.
        number: of the lookup, higher than any before; a release names it.
        limit_tail: tokens allowed past ``limit``; less than N.
        barred: boundaries, in tokens, that are not allowed.
        states_at: boundaries, in blocks, that the request computes whatever is found; the result
            says which of their states are stored.
        claims: whether a rank claims what it finds.
    """

    request_id: str
    prefix: Prefix
    limit: int
    floor: int
    deadline: float = math.inf
    again: bool = False
    number: int = 0
    limit_tail: int = 0
    barred: tuple[int, ...] = ()
    states_at: tuple[int, ...] = ()
    claims: bool = True

    @property
    def only_releases(self) -> bool:
        """Whether it asks for nothing, and only releases the claim."""
        return self.limit <= 0 and self.limit_tail <= 0 and not self.states_at

    def release(self) -> "LookupRequest":
        """Return what only releases its claim."""
        return msgspec.structs.replace(self, limit=0, limit_tail=0, states_at=())


class LookupResult(msgspec.Struct, frozen=True, array_like=True):
    """A lookup's result on one rank, in blocks.

    Attributes:
        boundary: whole blocks before the deepest boundary that can be restored.
        attention: leading blocks whose attention pages exist.
        sources: (backend, how many) of the blocks from the request's floor to the boundary, a
            partly filled one included, by their pages of the first attention group.
        available: False where a rank gave no answer, which is a miss.
        adapter: with the content that the ranks know of it; filled in after
            :func:`.agreement.agree`, None where they do not know.
        tail: tokens from ``boundary`` to the deepest boundary, where it lies inside a block.
        states: those of the request's ``states_at`` whose states and window pages exist.
    """

    boundary: int
    attention: int
    sources: tuple[tuple[str, int], ...] = ()
    available: bool = True
    adapter: Adapter | None = None
    tail: int = 0
    states: tuple[int, ...] = ()

    @property
    def end(self) -> tuple[int, int]:
        """The deepest boundary, as blocks and tokens past them; (0, 0) for a miss."""
        return self.boundary, self.tail

    @property
    def hit(self) -> bool:
        """Whether anything can be restored."""
        return self.end > (0, 0)

    def tokens(self, block_size: int) -> int:
        """The deepest boundary in tokens."""
        return self.boundary * block_size + self.tail

    @property
    def source(self) -> str:
        """The backend of the last block."""
        return self.sources[-1][0] if self.sources else "unknown"

    def last(self, blocks: int) -> Iterator[tuple[str, int]]:
        """(backend, how many) of the last ``blocks`` before ``boundary``, deepest first."""
        for source, run in reversed(self.sources):
            if blocks <= 0:
                return
            yield source, min(run, blocks)
            blocks -= run


MISS = LookupResult(0, 0)
UNAVAILABLE = LookupResult(0, 0, available=False)
