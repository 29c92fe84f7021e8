# SPDX-License-Identifier: Apache-2.0
"""Chooses where a request's steps end, so that states (or windows) can be stored there.

A state exists only where a step ended. vLLM ends one at the prompt's last boundary and at
``Request.shared_prefix_boundary``, where the prompt leaves what earlier prompts share: it
stops there, keeps the state and offers it. We set that attribute to the next boundary wanted,
and again whenever one is reached.
"""

from dataclasses import dataclass


@dataclass
class Checkpoints:
    """Boundaries of one request whose states are wanted, in tokens.

    Attributes:
        block_size: N.
        interval: T, a multiple of N; a state every T tokens of a prefill. 0 for none.
        decode: whether boundaries in generated tokens are wanted.
        offered: whether vLLM offers the last boundary by itself, as it does with states.
        junction: where the request leaves what other requests computed, 0 for nowhere.
        end: the last boundary before the last known token; vLLM ends a step there anyway.
        chunk_ends: whether the ends of the prefill's steps are wanted where they are boundaries.
        runway: known tokens that vLLM keeps behind the end of a step of a prefill, for a drafter
            of several MTP modules. It shortens a step that leaves fewer, to no token at all.
        known: tokens that were known at the start.
    """

    block_size: int
    interval: int
    decode: bool
    offered: bool = True
    junction: int = 0
    end: int = 0
    chunk_ends: bool = False
    runway: int = 0
    known: int = 0

    def begin(self, num_tokens: int) -> None:
        """Start over for a request of ``num_tokens`` tokens. Keeps its settings only."""
        self.known = num_tokens
        self.end = (num_tokens - 1) // self.block_size * self.block_size
        self.junction = 0

    def lasting(self, boundary: int) -> bool:
        """Whether later requests will want it: a junction, the last boundary, or past that one.

        A checkpoint waits for a branch that may never come.
        """
        return boundary == self.junction or boundary >= self.end

    def wants_end(self, computed: int) -> bool:
        """Whether the state is wanted where a step of the prefill ends at ``computed`` tokens.

        Not at the last boundary, where vLLM ends a step by itself. With a runway vLLM may compute
        the last tokens of a step once more, in the next one.
        """
        return self.chunk_ends and not self.runway and computed < self.end

    def after(self, computed: int) -> int:
        """Return the next boundary past ``computed`` tokens where a state is wanted, 0 for none."""
        wanted = []
        if computed < self.junction <= self.end:
            wanted.append(self.junction)
        if self.interval and (checkpoint := _next(computed, self.interval)) <= self.end:
            wanted.append(checkpoint)
        if not self.offered and computed < self.end:
            wanted.append(self.end)
        if self.decode:
            wanted.append(_next(max(computed, self.end), self.block_size))
        return min((each for each in wanted if self._can_end(each)), default=0)

    def _can_end(self, boundary: int) -> bool:
        """Whether vLLM would end a step there."""
        return not 0 < self.known - boundary < self.runway


def _next(tokens: int, step: int) -> int:
    return (tokens // step + 1) * step
