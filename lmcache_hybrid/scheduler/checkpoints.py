# SPDX-License-Identifier: Apache-2.0
"""Chooses where a request's steps end, so that states (or windows) can be stored there.

A state exists only where a step ended. vLLM ends one at the prompt's last boundary and at
``Request.shared_prefix_boundary``, where the prompt leaves what earlier prompts share: it
stops there, keeps the state and offers it. We set that attribute to the next boundary wanted,
and again whenever one is reached.
"""

from collections.abc import Callable
from dataclasses import dataclass


def _none(tokens: int) -> bool:
    return False


@dataclass
class Checkpoints:
    """Boundaries of one request whose states are wanted, in tokens.

    Attributes:
        block_size: N.
        interval: T, a multiple of N; a state every T tokens of a prefill. 0 for none.
        decode: whether boundaries in generated tokens are wanted.
        offered: whether vLLM ends a step at the last boundary and offers it by itself, as it does
            with states.
        junction: where the request leaves what other requests computed, 0 for nowhere.
        end: the last boundary before the last known token that is not barred.
        runway: known tokens that vLLM keeps behind the end of a step of a prefill, for a drafter
            of several MTP modules. It shortens a step that leaves fewer, to no token at all.
        known: tokens that were known at the start.
        is_barred: whether no request may start from a boundary, given in tokens.
    """

    block_size: int
    interval: int
    decode: bool
    offered: bool = True
    junction: int = 0
    end: int = 0
    runway: int = 0
    known: int = 0
    is_barred: Callable[[int], bool] = _none

    def begin(self, num_tokens: int) -> None:
        """Start over for a request of ``num_tokens`` tokens. Keeps its settings only."""
        self.known = num_tokens
        self.end = (num_tokens - 1) // self.block_size * self.block_size
        while self.end and self.is_barred(self.end):
            self.end -= self.block_size
        self.junction = 0

    def lasting(self, boundary: int) -> bool:
        """Whether later requests will want it: a junction, the last boundary, or past that one.

        A checkpoint waits for a branch that may never come.
        """
        return boundary == self.junction or boundary >= self.end

    def after(self, computed: int) -> int:
        """Return the next boundary past ``computed`` tokens where a state is wanted, 0 for none."""
        wanted = []
        if computed < self.junction <= self.end:
            wanted.append(self.junction)
        if self.interval and (checkpoint := self._next(computed, self.interval)) <= self.end:
            wanted.append(checkpoint)
        last = (self.known - 1) // self.block_size * self.block_size
        if computed < self.end and not (self.offered and self.end == last):
            wanted.append(self.end)
        if self.decode:
            wanted.append(self._next(max(computed, self.end), self.block_size))
        return min((each for each in wanted if self._can_end(each)), default=0)

    def _can_end(self, boundary: int) -> bool:
        """Whether vLLM would end a step there, from which a request may start."""
        return not (0 < self.known - boundary < self.runway or self.is_barred(boundary))

    def _next(self, tokens: int, step: int) -> int:
        boundary = (tokens // step + 1) * step
        while self.is_barred(boundary):
            boundary += step
        return boundary
