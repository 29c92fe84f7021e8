# SPDX-License-Identifier: Apache-2.0
"""Compares answers: log-probabilities, noise, and what a wrong prefix would change."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

# A restored answer may differ by this many times the measured noise.
NOISE_FACTOR = 2.0
# A fault shows only if it changes answers by at least this many times the tolerance.
MARGIN = 5.0


@dataclass(frozen=True)
class Answer:
    """One finished request.

    Attributes:
        tokens: generated token ids, greedy.
        logprobs: of each step, {token id: log-probability} of the best few.
        cached: prompt tokens that were not computed, local and external.
        external: of these, what the connector brought; of a batch for all together.
        first_token_seconds: from arrival to the first token.
        drafted, accepted: speculative tokens; of a batch for all together.
    """

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int
    external: int
    first_token_seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def drafts(self) -> tuple[int, int]:
        return self.drafted, self.accepted

    def same(self, other: "Answer") -> bool:
        return self.tokens == other.tokens and self.logprobs == other.logprobs


class Outcome(StrEnum):
    """How one restored answer compares with vLLM's own."""

    EQUAL = "equal"
    NOISE = "within noise"
    DIFFERS = "differs"
    MISSED = "missed"
    BOUNDARY = "other boundary"
    UNCOMPARED = "not compared"
    ONCE = "differed once"


BAD = (Outcome.DIFFERS, Outcome.BOUNDARY, Outcome.MISSED)
GOOD = (Outcome.NOISE, Outcome.EQUAL)


class Verdict(StrEnum):
    """What all comparisons amount to."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "NOT DECIDABLE"


@dataclass(frozen=True)
class Check:
    """A restored prompt against vLLM's own hit at the same boundary.

    Attributes:
        case: name of the prompt.
        step: which of the case's prompts, from 0.
        where: the tier, and whether over a restart.
        tokens: of the prompt.
        boundary: where vLLM's own hit ended.
        cached, external: of the restored prompt.
        difference: of log-probabilities, see :func:`difference`.
        same: whether tokens and log-probabilities are equal to the last bit.
        slack: difference that is allowed in any case: prompts in a batch round differently
            from prompts asked alone.
        restarted: whether another engine answered than the one it is compared with.
        shows: how much another prefix changes this answer; infinite where none was tried.
        others: differences of further attempts, made because the first may be an outlier.
        drops: whether vLLM drops the last block of its own hits for a drafter; the store's
            hit is then deeper, which is no fault but cannot be compared.
        chunk: the store holds a state every so many tokens of a prompt, where a step of its
            prefill ended, and vLLM's own cache does not keep it; 0 for none. A hit there is
            compared with the answer to the cold prompt, whose steps ended there as well.
    """

    case: str
    step: int
    where: str
    tokens: int
    boundary: int
    cached: int
    external: int
    difference: float
    same: bool
    slack: float = 0.0
    restarted: bool = False
    shows: float = math.inf
    others: tuple[float, ...] = ()
    drops: bool = False
    chunk: int = 0

    def outcome(self, allowed: float) -> Outcome:
        """Judge the comparison.

        Args:
            allowed: difference of log-probabilities that noise explains.
        """
        if min(self.cached, self.external) < self.boundary:
            return Outcome.MISSED
        if self.cached > self.boundary:
            if self.drops:
                return Outcome.UNCOMPARED
            if self.boundary or not self.chunk or self.cached % self.chunk:
                return Outcome.BOUNDARY
        if self.same:
            return Outcome.EQUAL
        if MARGIN * allowed > self.shows and self.difference <= allowed:
            return Outcome.UNCOMPARED
        limit = max(allowed, self.slack)
        if self.others and max(self.others) <= limit < self.difference:
            return Outcome.ONCE
        return Outcome.NOISE if self.difference <= limit else Outcome.DIFFERS


@dataclass(frozen=True)
class Noise:
    """How much answers to the same prompt differ, and how much faults change them.

    Attributes:
        own: largest difference between two answers of vLLM's own cache, or two cold ones.
        restart: the same between two engines.
        wrong: least change that another prefix made, among the cases with the fewest tokens
            after it; 0 where nothing was compared.
        lost: change that one lost block made to an answer, by what the block held.
    """

    own: float
    restart: float
    wrong: float
    lost: Mapping[str, float]

    @property
    def allowed(self) -> float:
        return NOISE_FACTOR * max(self.own, self.restart)

    def limit(self, check: Check) -> float:
        """Largest difference that noise explains here; a restart adds its own noise."""
        return self.allowed if check.restarted else NOISE_FACTOR * self.own

    def judge(self, check: Check) -> Outcome:
        return check.outcome(self.limit(check))

    @property
    def least(self) -> float:
        """Change made by the least visible loss; 0 where none was tried."""
        return min(self.lost.values(), default=0.0)

    @property
    def decidable(self) -> bool:
        """Whether a wrong prefix and every lost block can be told from noise."""
        return self.shows(self.wrong) and self.shows(self.least)

    def shows(self, change: float) -> bool:
        """Whether a fault that changes answers by this much can be told from noise."""
        return change > 0 and MARGIN * self.allowed <= change


def check(case: str, step: int, where: str, tokens: int, own: Answer, restored: Answer) -> Check:
    """Compare a restored prompt with vLLM's own hit."""
    return Check(
        case,
        step,
        where,
        tokens,
        own.cached,
        restored.cached,
        restored.external,
        difference(own, restored),
        own.same(restored),
    )


def difference(one: Answer, other: Answer) -> float:
    """Largest difference of log-probabilities, up to the first step with different tokens.

    A token that only one answer lists counts with the least that it must have changed by.
    Infinite where the answers have different lengths.
    """
    if len(one.logprobs) != len(other.logprobs) or not one.logprobs:
        return math.inf
    largest = 0.0
    for mine, theirs, my_token, their_token in zip(
        one.logprobs, other.logprobs, one.tokens, other.tokens, strict=True
    ):
        for token in mine.keys() | theirs.keys():
            a = mine.get(token, min(mine.values()))
            b = theirs.get(token, min(theirs.values()))
            largest = max(largest, abs(a - b) if math.isfinite(a - b) else math.inf)
        if my_token != their_token:
            break
    return largest


def noise_of(pairs: Iterable[tuple[Answer, Answer]]) -> float:
    """Largest difference within pairs of answers that should be the same."""
    return max((0.0 if a.same(b) else difference(a, b) for a, b in pairs), default=0.0)
