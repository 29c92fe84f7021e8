# SPDX-License-Identifier: Apache-2.0
"""Blocks of prompts as bytes, which anybody may have written.

An entry counts if vLLM's own hash function makes the block's hash of what it says, so nobody can
put tokens under another block's hash.
"""

import contextlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, BinaryIO

import msgspec
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens

from lmcache_hybrid.core.digests import DIGEST_BYTES, Digester
from lmcache_hybrid.core.keys import wide_hash
from lmcache_hybrid.protocol.blocks import Block

VERSION = 1
# In front of an entry: its bytes, and their digest.
_HEAD = struct.Struct(f"<I{DIGEST_BYTES}s")
MAX_ENTRY_BYTES = 1 << 20
# What a block's hash may cover beside tokens, by vLLM's tag. Not adapters: only a request shows
# whether the one of that name is still the same.
_EXTRA_KEYS: dict[str, tuple[type, ...]] = {"mm": (str, int), "cache_salt": (str,)}


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See :class:`Block`. ``tokens`` has four bytes for each, in this machine's order."""

    block_hash: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
    parent_hash: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)] | None
    tokens: bytes
    extra_keys: tuple[tuple[str | int, ...], ...] | None


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Entry).decode


class PromptEntries:
    """Writes and reads entries of one layout. Immutable; any thread may call it.

    Attributes:
        header: what a file of such entries begins with.
    """

    def __init__(
        self, block_size: int, hash_block_size: int, hash_algorithm: str, digester: Digester
    ) -> None:
        """Make a layout.

        Args:
            block_size, hash_block_size: tokens of a block, and of what vLLM hashes at once.
            hash_algorithm: vLLM's ``prefix_caching_hash_algo``.
            digester: of the entries.
        """
        self._size, self._unit, self._digester = block_size, hash_block_size, digester
        self._hash = get_hash_fn_by_name(hash_algorithm)
        self.header = (
            f"lmcache-hybrid prompts {VERSION}, blocks of {block_size} tokens, "
            f"{hash_algorithm} of {hash_block_size}\n"
        ).encode()

    def entry(self, block: Block) -> bytes:
        """A block as bytes; none for one that only a request can describe."""
        try:
            # Bytes: to write one number after the other would take the GIL from the scheduler.
            extra_keys, tokens = _checked(block.extra_keys), array("i", block.tokens).tobytes()
            payload = _encode(_Entry(block.block_hash, block.parent_hash, tokens, extra_keys))
        except (ValueError, OverflowError):  # of a salt that is no UTF-8, too
            return b""
        if len(payload) > MAX_ENTRY_BYTES:
            return b""
        return _HEAD.pack(len(payload), self._digester.chunk(payload)) + payload

    def read(
        self, data: BinaryIO, wanted: AbstractSet[bytes], stop: Callable[[], bool]
    ) -> list[Block]:
        """The blocks that ``data`` describes, in its order, each once.

        Args:
            data: behind the header.
            wanted: ``wide_hash`` of theirs; others are left out.
            stop: asked before each entry: somebody may have made a file without an end.
        """
        found: dict[bytes, Block] = {}
        for entry in self._entries(data, stop):
            if wide_hash(entry.block_hash) in wanted and entry.block_hash not in found:
                block = self._block(entry)
                if block is not None:
                    found[block.block_hash] = block
        return list(found.values())

    def _entries(self, data: BinaryIO, stop: Callable[[], bool]) -> Iterator[_Entry]:
        """Those with the right digest: an engine that was killed may have cut off the last."""
        while not stop() and len(head := data.read(_HEAD.size)) == _HEAD.size:
            length, digest = _HEAD.unpack(head)
            if not 0 < length <= MAX_ENTRY_BYTES:  # 0 in a hole
                return
            payload = data.read(length)
            if self._digester.chunk(payload) == digest:
                with contextlib.suppress(msgspec.DecodeError):
                    yield _decode(payload)

    def _block(self, entry: _Entry) -> Block | None:
        """What an entry says; None where vLLM would hash that differently."""
        tokens, block_hash = array("i"), entry.parent_hash
        if len(entry.tokens) % tokens.itemsize:
            return None
        tokens.frombytes(entry.tokens)
        if not 0 < len(tokens) <= self._size or len(tokens) % self._unit:
            return None
        try:
            extra_keys = hashed = _checked(entry.extra_keys)
        except ValueError:
            return None
        for at in range(0, len(tokens), self._unit):
            parent = None if block_hash is None else BlockHash(block_hash)
            part = tuple(tokens[at : at + self._unit])
            block_hash = hash_block_tokens(self._hash, parent, part, hashed)
            hashed = None  # a salt counts once; blocks with media in several parts are left out
        if block_hash != entry.block_hash:
            return None
        return Block(block_hash, entry.parent_hash, tokens, None, None, extra_keys)


def _checked(extra_keys: tuple[Any, ...] | None) -> tuple[tuple[str | int, ...], ...] | None:
    """Copy a block's extra keys. Raises ValueError for any but media and salts."""
    if extra_keys is None:
        return None
    copied = []
    for tag, *rest in extra_keys:
        if _EXTRA_KEYS.get(tag) != tuple(map(type, rest)):
            raise ValueError(f"extra keys of {tag!r} are not kept")
        # vLLM's tags are one object each, and its pickles show that.
        copied.append((sys.intern(tag), *rest))
    return tuple(copied)
