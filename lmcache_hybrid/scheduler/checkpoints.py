# SPDX-License-Identifier: Apache-2.0
"""Boundaries whose states (or windows) shall be stored, besides those vLLM offers anyway.

A state exists only where a step ended. vLLM ends one at a prompt's last boundary
and at one place more: ``Request.shared_prefix_boundary``, where it found a
prompt to branch off from earlier ones. It stops there, keeps the state and offers
it. What is wanted here uses that one attribute, moved on each time it was reached.
"""

from dataclasses import dataclass


@dataclass
class Checkpoints:
    """Where one request's states are wanted, in tokens.

    Attributes:
        block_size: N.
        interval: T, a multiple of N; a state every T tokens of a prefill. 0 for none.
        decode: whether boundaries reached while decoding count.
        offered: whether vLLM offers the last boundary by itself, as it does for states.
        junction: where the request leaves what other requests computed, 0 for nowhere.
        end: the last boundary before the last known token; vLLM stops there by itself.
    """

    block_size: int
    interval: int
    decode: bool
    offered: bool = True
    junction: int = 0
    end: int = 0

    def begin(self, num_tokens: int) -> None:
        """The request is (re)admitted with so many tokens. Mutates ``end`` and ``junction``."""
        self.end = (num_tokens - 1) // self.block_size * self.block_size
        self.junction = 0

    def lasting(self, boundary: int) -> bool:
        """Whether it is known to be of use: a junction, the last boundary, or past that one.

        A checkpoint is there for a branch that may never come.
        """
        return boundary == self.junction or boundary >= self.end

    def after(self, computed: int) -> int:
        """The next boundary past ``computed`` tokens where a state is wanted, 0 for none."""
        wanted = []
        if computed < self.junction <= self.end:
            wanted.append(self.junction)
        if self.interval and (checkpoint := _next(computed, self.interval)) <= self.end:
            wanted.append(checkpoint)
        if not self.offered and computed < self.end:
            wanted.append(self.end)
        if self.decode:
            wanted.append(_next(max(computed, self.end), self.block_size))
        return min(wanted, default=0)


def _next(tokens: int, step: int) -> int:
    return (tokens // step + 1) * step
