# SPDX-License-Identifier: Apache-2.0
"""A prompt's blocks, as the store knows them."""

from collections.abc import Mapping

import msgspec

from lmcache_hybrid.identity.adapters import Adapter


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one prompt.

    Attributes:
        hashes: vLLM's block hash at the end of each block of N tokens.
        tags: (name, value) pairs that keep requests apart beyond the hashes.
        adapter: the LoRA adapter; its tag is among ``tags`` once the ranks named its content.
        inner: vLLM's block hash at boundaries inside a block, by tokens; only those that the
            receiver needs.
    """

    hashes: tuple[bytes, ...]
    tags: tuple[tuple[str, str], ...] = ()
    adapter: Adapter | None = None
    inner: dict[int, bytes] = {}

    @property
    def identified(self) -> bool:
        """Whether record keys are known: with an adapter, once the ranks named its content."""
        return self.adapter is None or bool(self.adapter.contents)

    def up_to(self, boundary: int) -> "Prefix":
        """Cut it to its first ``boundary`` blocks."""
        return msgspec.structs.replace(self, hashes=self.hashes[:boundary], inner={})

    def with_inner(self, inner: Mapping[int, bytes]) -> "Prefix":
        """Name boundaries inside a block, in place of those named before."""
        return msgspec.structs.replace(self, inner=dict(inner))

    def computed_with(self, contents: tuple[bytes, ...]) -> "Prefix | None":
        """Add the adapter's content; None where a rank does not know it, or it has changed.

        Args:
            contents: of each rank, see :class:`lmcache_hybrid.identity.adapters.Adapter`.
        """
        if self.adapter is None or not contents or not all(contents):
            return None
        if self.identified:
            return self if self.adapter.contents == contents else None
        adapter = Adapter(self.adapter.lora, contents)
        return Prefix(self.hashes, (*self.tags, adapter.tag), adapter, self.inner)
