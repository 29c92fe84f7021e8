# SPDX-License-Identifier: Apache-2.0
"""The interface of a store for ``inspect``, ``verify`` and ``purge``, and its entries."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from lmcache_hybrid.storage.key_names import StoredKey

# Max bytes of names to keep in memory.
IN_MEMORY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One record, maybe incomplete.

    Attributes:
        key: parsed from its name.
        where: file path or Redis key, as text that the store understands.
        size: bytes of the record, 0 if missing.
        taken: bytes that it takes in the store.
        age: seconds since it was written (files) or last used (Redis); None if unknown.
        head: its first HEADER_BYTES, or less if it is shorter.
        wrapper: LMCache's own header in front of it; None if it has none.
        missing: why it is incomplete, if a writer did not finish; else None.
        in_place: whether it grows while it is written, so a short one may not be damaged.
    """

    key: StoredKey
    where: str
    size: int
    taken: int
    age: float | None
    head: bytes
    wrapper: bytes | None
    missing: str | None = None
    in_place: bool = False


class RecordStore(Protocol):
    """The records of one folder or server, seen from outside an engine. One thread.

    Attributes:
        name: for people, without a password.
        notes: sentences to show with the figures.
        foreign: files or values that are not ours, counted by ``entries``.
    """

    name: str
    notes: list[str]
    foreign: int

    def entries(self) -> Iterator[Entry]:
        """Read the header of every record, each once.

        Raises:
            StoreError: the store cannot be read at all.
        """

    def open(self, entry: Entry) -> AbstractContextManager[BinaryIO]:
        """Open the record's bytes as they are now; all are from one write.

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
        """Close connections."""


class Names:
    """Keeps ``Entry.where`` values: few in memory, many in a temporary file.

    Iterates in the order of adding; add nothing meanwhile. The owner closes it.
    """

    def __init__(self) -> None:
        self._lines = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, where: str) -> None:
        # JSON escapes line ends and invalid UTF-8.
        self._lines.write(json.dumps(where).encode() + b"\n")
        self._count += 1

    def __iter__(self) -> Iterator[str]:
        self._lines.seek(0)
        for line in self._lines:
            yield json.loads(line)

    def close(self) -> None:
        self._lines.close()
