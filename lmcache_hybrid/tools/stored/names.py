# SPDX-License-Identifier: Apache-2.0
"""Names of records that are to be deleted, however many."""

import json
import tempfile
from collections.abc import Iterator

IN_MEMORY_BYTES = 1 << 20


class Names:
    """Keeps ``Entry.where`` values: in memory while they are few, in a temporary file beyond.

    Iterating gives them in the order in which they were added; add nothing meanwhile.
    """

    def __init__(self) -> None:
        self._lines = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, where: str) -> None:
        # JSON escapes line ends, and what is no UTF-8.
        self._lines.write(json.dumps(where).encode() + b"\n")
        self._count += 1

    def __iter__(self) -> Iterator[str]:
        self._lines.seek(0)
        for line in self._lines:
            yield json.loads(line)

    def close(self) -> None:
        self._lines.close()
