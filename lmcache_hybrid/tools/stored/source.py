# SPDX-License-Identifier: Apache-2.0
"""A store as ``inspect``, ``verify`` and ``purge`` see it, and how to open one."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from lmcache_hybrid.storage.key_names import StoredKey


@dataclass(frozen=True, slots=True)
class Entry:
    """One record, or what is left of one.

    Attributes:
        key: what its name claims.
        where: file path or Redis key, as text that the source understands.
        size: bytes of the record, 0 where it is missing.
        taken: bytes that it takes in the store.
        age: seconds since it was written (files) or last used (Redis); None if unknown.
        head: its first HEADER_BYTES, less where it is shorter.
        wrapper: LMCache's own header in front of it or beside it; None for ``local_disk``,
            which has none.
        missing: why it cannot be whole, for what a writer has begun and not ended; else None.
    """

    key: StoredKey
    where: str
    size: int
    taken: int
    age: float | None
    head: bytes
    wrapper: bytes | None
    missing: str | None = None


class Source(Protocol):
    """Records of one folder or server.

    Attributes:
        name: for people, without a password.
        notes: sentences that a reader of the figures must know.
        foreign: files or values that are not ours, counted by ``entries``.
    """

    name: str
    notes: list[str]
    foreign: int

    def entries(self) -> Iterator[Entry]:
        """Every record once, headers read.

        Raises:
            StoreError: the store cannot be read at all.
        """

    def open(self, entry: Entry) -> AbstractContextManager[BinaryIO]:
        """The record's bytes as they are now, all of one writing.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be read, as may any read of it.
            StoreError: the store is away.
        """

    def delete(self, wheres: Iterable[str]) -> int:
        """Remove records, named by their :attr:`Entry.where`; returns how many were there.

        Never touches anything else.
        """

    def close(self) -> None:
        """Give back connections."""
