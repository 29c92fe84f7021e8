# SPDX-License-Identifier: Apache-2.0
"""What the toy model's pages and answers must be."""

from collections.abc import Sequence

import numpy as np

VOCABULARY = 50
NEVER_RIGHT = -7


class Truth:
    """What a prompt and its greedy continuation are, and the hash after each token.

    Args:
        owner: whatever else decides the bytes (LoRA adapter, cache salt).
        room: most tokens, prompt and output together.
    """

    def __init__(self, prompt: Sequence[int], owner: str, room: int) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self._hashes = np.zeros(room + 2, np.int64)
        self._hashes[0] = _digest(owner)
        self._hashed = 0
        self.hashes(len(prompt))

    def hashes(self, count: int) -> np.ndarray:
        """int64 [count]: the hash after each of the first ``count`` tokens."""
        while self._hashed < count:
            last = int(self._hashes[self._hashed])
            if self._hashed == len(self.tokens):
                self.tokens.append(last % VOCABULARY)
            self._hashes[self._hashed + 1] = hash((last, self.tokens[self._hashed]))
            self._hashed += 1
        return self._hashes[1 : count + 1]

    def hash_at(self, count: int) -> np.int64:
        """The hash after ``count`` tokens."""
        self.hashes(count)
        return self._hashes[count]

    def token(self, index: int) -> int:
        self.hashes(index + 1)
        return self.tokens[index]

    def drafts(self, start: int, count: int) -> list[int]:
        """What a drafter says of the tokens from ``start`` on: the first few are right."""
        right = int(self.hash_at(start)) % (count + 1)
        return [self.token(start + i) if i < right else NEVER_RIGHT for i in range(count)]


def _digest(text: str) -> int:
    # Not hash(): a string's is another one in every process.
    return int.from_bytes(text.encode()[:7].ljust(7, b"."), "big")
