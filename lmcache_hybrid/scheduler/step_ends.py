# SPDX-License-Identifier: Apache-2.0
"""Chooses where a request's steps end, so that states (or windows) can be stored there.

A state exists only where a step ended. vLLM ends one at the prompt's last boundary, beside some
drafters a block before, and at ``Request.shared_prefix_boundary``, where the prompt leaves what
earlier prompts share: it stops there, keeps the state and offers it. We set that attribute to the
next boundary wanted, and again whenever one is reached.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

from lmcache_hybrid.config.drafts import drops_block, hash_look_ahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Drafter:
    """How a drafter moves the ends of prefill steps.

    Attributes:
        drops_block: vLLM gives up the last block of its own hits (EAGLE, MTP), and ends a step
            one block earlier so that there is a state.
        runway: known tokens that vLLM keeps behind the end of a step: as many as there are MTP
            modules. A step that leaves fewer is shortened, down to no token.
        look_ahead: tokens behind a boundary that vLLM's hash there covers, so that it need not
            give up a block. The hash exists once they are known.
        forgets: vLLM's V1 runner forgets how many drafts it accepted of a request that a step
            leaves out, and goes on from the state before them.
    """

    drops_block: bool = False
    runway: int = 0
    look_ahead: int = 0
    forgets: bool = False

    @classmethod
    def of(cls, config: "VllmConfig") -> "Drafter":
        """Read the engine's drafter; without one nothing changes."""
        return cls(
            drops_block(config),
            config.num_prefill_lookahead_tokens,
            hash_look_ahead(config),
            bool(config.speculative_config) and not config.use_v2_model_runner,
        )

    def longest_without_state(self, unit: int) -> int:
        """Return the tokens of the longest prompt that leaves no state; ``unit`` is N, or U."""
        return 2 * unit - 1 if self.drops_block else unit + self._behind - 1

    def deepest(self, num_tokens: int, unit: int) -> int:
        """Return the last multiple of ``unit`` that a prompt of ``num_tokens`` may start from."""
        return max(0, num_tokens - self._behind) // unit * unit

    @property
    def computes_again(self) -> bool:
        """Whether vLLM may compute the last tokens of a step again in the next one."""
        return self.runway > 1

    @property
    def _behind(self) -> int:
        """Known tokens that must follow a boundary where a request starts.

        The last token is always computed: a state that has seen it is too deep.
        """
        return max(1, self.look_ahead)


@dataclass
class StepEnds:
    """Boundaries of one request whose states are wanted, in tokens.

    Attributes:
        block_size: N.
        interval: T, a multiple of N; a state every T tokens of a prefill. 0 for none.
        decode: whether boundaries in generated tokens are wanted.
        offered: whether vLLM itself ends a step at the last boundary and hands off its state.
        junction: where the request leaves a prefix that others computed, 0 for nowhere.
        meetings: boundaries whose state other requests wait for.
        drafter: the engine's.
        kept: where the request asks to keep a part of its prompt, 0 for nowhere.
        chunk_ends: whether the ends of the prefill's steps are wanted where they are boundaries.
        known: tokens at the start.
        last: the last boundary that a request may start from, and that is not barred.
        stop: where vLLM itself ends the last but one step of the prefill.
        end: the deepest boundary up to ``stop`` that is not barred; vLLM ends a step there only
            if both are equal.
        barred: boundaries that no request may start from.
        state_tokens: tokens of a state's block, at whose multiples vLLM itself ends steps; divides
            N, which it is where 0.
    """

    block_size: int
    interval: int
    decode: bool
    offered: bool = True
    junction: int = 0
    meetings: set[int] = field(default_factory=set)
    drafter: Drafter = Drafter()
    kept: int = 0
    chunk_ends: bool = False
    known: int = 0
    last: int = 0
    stop: int = 0
    end: int = 0
    barred: Set[int] = frozenset()
    state_tokens: int = 0

    def begin(self, num_tokens: int) -> None:
        """Start over for a request of ``num_tokens`` tokens. Keeps its settings only."""
        size, self.known, self.junction = self.block_size, num_tokens, 0
        self.meetings.clear()
        step = self.offered and self.state_tokens or size
        self.last = self.up_to(self.drafter.deepest(num_tokens, size))
        drops = self.offered and self.drafter.drops_block
        self.stop = (
            get_mamba_prefill_checkpoint_position(num_tokens, step, True)
            if drops
            else self.drafter.deepest(num_tokens, step)
        )
        self.end = self.up_to(self.stop // size * size)

    def lasting(self, boundary: int) -> bool:
        """Whether later requests will want it: where prompts part, at the prefill's end or past it.

        An interval checkpoint does not count: no prompt may ever branch there.
        """
        return boundary in (self.junction, self.kept, *self.meetings) or boundary >= self.end

    def ends_at(self, boundary: int) -> bool:
        """Whether a step of the prefill will end there."""
        known = (self.junction, self.kept, self.end, *self.meetings)
        wanted = boundary in known or bool(self.interval) and boundary % self.interval == 0
        return wanted and self._can_end(boundary)

    def wants_end(self, computed: int) -> bool:
        """Whether the state is wanted where a step of the prefill ends at ``computed`` tokens.

        Not at the last boundary, where vLLM itself ends a step.
        """
        return self.chunk_ends and not self.drafter.computes_again and computed < self.end

    def after(self, computed: int) -> int:
        """Return the next boundary past ``computed`` tokens where a state is wanted, 0 for none."""
        wanted = []
        if computed < self.junction <= self.last:
            wanted.append(self.junction)
        if computed < self.kept <= self.last:
            wanted.append(self.kept)
        wanted += (meeting for meeting in self.meetings if computed < meeting <= self.last)
        if self.interval and (checkpoint := self._next(computed, self.interval)) <= self.last:
            wanted.append(checkpoint)
        if computed < self.end and not (self.offered and self.end == self.stop):
            wanted.append(self.end)
        if self.decode:
            wanted.append(self._next(max(computed, self.last), self.block_size))
        return min((each for each in wanted if self._can_end(each)), default=0)

    def _can_end(self, boundary: int) -> bool:
        """Whether a request may start there, and vLLM would end a step for its state.

        Without states no step needs to end there.
        """
        if boundary in self.barred:
            return False
        return not (self.offered and 0 < self.known - boundary < self.drafter.runway)

    def up_to(self, boundary: int) -> int:
        """Return the deepest whole boundary up to ``boundary`` that is not barred."""
        while boundary and boundary in self.barred:
            boundary -= self.block_size
        return boundary

    def _next(self, tokens: int, step: int) -> int:
        boundary = (tokens // step + 1) * step
        while boundary in self.barred:
            boundary += step
        return boundary
