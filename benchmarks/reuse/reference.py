# SPDX-License-Identifier: Apache-2.0
"""References: an oracle without limits, and policies for a full store.

These work on the tokens alone. A prompt is its chain: one key per whole block,
which names the block and everything before it. Sizes are in pages, the bytes of
one block's attention; positions are in blocks.
"""

import bisect
import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STATE_PAGES = 3  # a boundary's state against a block's attention, in bytes

Chain = tuple[bytes, ...]


def chain_of(tokens: Sequence[int], block_size: int) -> Chain:
    """Keys of the whole blocks of ``tokens``, each for its block and all before it."""
    digest, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        digest.update(array("q", tokens[start : start + block_size]).tobytes())
        keys.append(digest.digest())
    return tuple(keys)


def limit_of(num_tokens: int, block_size: int) -> int:
    """Deepest boundary that a prompt may start from, in blocks: its last token is computed."""
    return (num_tokens - 1) // block_size


class Oracle:
    """A state at every boundary that was ever computed, and nothing is ever forgotten.

    Generated tokens count as computed, but for the last one, which no step has read.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: set[bytes] = set()

    def ask(self, prompt: list[int], output: Sequence[int]) -> int:
        """Tokens that this prompt could reuse; takes note of prompt and output."""
        chain = chain_of([*prompt, *output[:-1]], self._block_size)
        hit = 0
        while hit < len(chain) and chain[hit] in self._seen:
            hit += 1
        self._seen.update(chain)
        return min(hit, limit_of(len(prompt), self._block_size)) * self._block_size


@dataclass
class _Entry:
    """A boundary with its state, and the pages that lead to it."""

    chain: Chain
    used: int


class LruReference:
    """Least recently used over whole prefixes: a state goes together with its pages.

    An entry is a boundary with a state; it needs all pages before it, which it
    shares with other entries. What goes is the entry that was used longest ago,
    with the pages that no other entry needs: so no page is ever held in vain.
    States are taken at a prompt's last boundary, and where it leaves the pages held.
    Only the entry that is hit counts as used.
    """

    def __init__(self, block_size: int, capacity: float) -> None:
        """``capacity`` in pages."""
        self._block_size, self._capacity = block_size, capacity
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._needed: dict[bytes, int] = {}  # entries that need a page
        self._clock = 0

    @property
    def used(self) -> int:
        return len(self._needed) + STATE_PAGES * len(self._entries)

    def ask(self, prompt: list[int], output: Sequence[int]) -> int:
        """Tokens that this prompt reuses; the prompt is taken up. Outputs are not."""
        self._clock += 1
        chain, end = chain_of(prompt, self._block_size), limit_of(len(prompt), self._block_size)
        hits = [b for b in range(1, end + 1) if chain[b - 1] in self._entries]
        hit = hits[-1] if hits else 0
        for boundary in sorted({hit, *self._boundaries(chain, end)} - {0}):
            self._use(chain[:boundary])
        while self.used > self._capacity and len(self._entries) > 1:
            self._drop(self._victim())
        return hit * self._block_size

    def _boundaries(self, chain: Chain, end: int) -> tuple[int, ...]:
        """Where a prompt leaves states: where it leaves what is held, and at its end."""
        held = next((b for b, key in enumerate(chain) if key not in self._needed), len(chain))
        return min(held, end), end

    def _use(self, chain: Chain) -> None:
        entry = self._entries.get(chain[-1])
        if entry is None:
            entry = self._entries[chain[-1]] = _Entry(chain, self._clock)
            for key in chain:
                self._needed[key] = self._needed.get(key, 0) + 1
        entry.used = self._clock
        self._entries.move_to_end(chain[-1])

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.chain[-1]]
        for key in entry.chain:
            self._needed[key] -= 1
            if not self._needed[key]:
                del self._needed[key]

    def _victim(self) -> _Entry:
        return next(iter(self._entries.values()))


class MarconiReference(LruReference):
    """The same with Marconi's choice of what goes (arXiv 2411.19379).

    The entry with the smallest sum of recency and of the FLOPs that it saves per
    byte it takes, each scaled to 0..1 over all entries. Marconi tunes the weight of
    the second one while it runs; here both weigh the same.
    """

    def _victim(self) -> _Entry:
        entries = list(self._entries.values())
        recency = _scaled([float(entry.used) for entry in entries])
        value = _scaled([self._flops_per_page(entry) for entry in entries])
        # The first of equals: the one used longest ago.
        worst = min(range(len(entries)), key=lambda i: recency[i] + value[i])
        return entries[worst]

    def _flops_per_page(self, entry: _Entry) -> float:
        """FLOPs beyond those that the next shallower entry saves, over the pages it frees."""
        parent = next(
            (b for b in range(len(entry.chain) - 1, 0, -1) if entry.chain[b - 1] in self._entries),
            0,
        )
        size = self._block_size
        saved = _flops(len(entry.chain) * size) - _flops(parent * size)
        return saved / (STATE_PAGES + sum(self._needed[key] == 1 for key in entry.chain))


class Foresight(LruReference):
    """Knows where prompts will branch, and when what came twice will come again. None can.

    The entry whose next use is furthest away goes first (Belady, 1966). Entries that were used once
    are ranked by age: they go after those that never return, and before those that do.
    """

    def __init__(self, block_size: int, capacity: float, prompts: Iterable[list[int]]) -> None:
        """
        Args:
            prompts: those that it will be asked, in that order.
        """
        super().__init__(block_size, capacity)
        # When each block can be reused, by the number of the request.
        self._uses: dict[bytes, list[int]] = {}
        for number, prompt in enumerate(prompts, 1):
            end = limit_of(len(prompt), block_size)
            for key in chain_of(prompt, block_size)[:end]:
                self._uses.setdefault(key, []).append(number)

    def _boundaries(self, chain: Chain, end: int) -> tuple[int, ...]:
        """The deepest one that is asked for again; its end if none is."""
        again = (b for b in range(end, 0, -1) if self._next(chain[b - 1]) < math.inf)
        return (next(again, end),)

    def _next(self, key: bytes) -> float:
        later = bisect.bisect_right(self._uses[key], self._clock)
        return self._uses[key][later] if later < len(self._uses[key]) else math.inf

    def _victim(self) -> _Entry:
        return max(self._entries.values(), key=self._rank)

    def _rank(self, entry: _Entry) -> tuple[int, float]:
        """The highest goes first."""
        key = entry.chain[-1]
        first, *others = self._uses[key]
        if not others or others[0] > self._clock:  # used once so far
            return 1, -first
        again = self._next(key)
        return (2, 0.0) if again == math.inf else (0, again)


def _flops(tokens: int) -> float:
    """Of a prefill by a model like Qwen3.6-27B: weights, then causal attention in 16 layers."""
    return 2 * 27e9 * tokens + 2 * 16 * 24 * 256 * tokens**2


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low or 1.0) for value in values]
