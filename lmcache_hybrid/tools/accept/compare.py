# SPDX-License-Identifier: Apache-2.0
"""Compares answers: log-probabilities, noise, and the effect of a wrong prefix."""

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
        external: of these, those that the connector loaded; of a batch for all together.
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
        """Whether both are equal to the last bit; what is no number equals nothing."""
        numbers = (value for step in self.logprobs for value in step.values())
        equal = self.tokens == other.tokens and self.logprobs == other.logprobs
        return equal and all(map(math.isfinite, numbers))


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
    """The overall result of all comparisons."""

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
        slack: difference that is always allowed: prompts in a batch round differently from
            prompts asked alone.
        restarted: whether another engine gave the answer it is compared with.
        shows: how much another prefix changes this answer; infinite if none was tried.
        others: differences of further attempts, made because the first may be an outlier.
        drops: whether vLLM drops the last block of its own hits for a drafter; the store's
            hit is then deeper, which is not a fault but cannot be compared.
        chunk: tokens between two states of chunk ends, which the store holds and vLLM's own
            cache does not; 0 for none. A hit there is compared with the answer to the cold
            prompt, whose steps also ended there.
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
        wrong: least change by another prefix, among the cases with the fewest tokens after
            it; 0 if nothing was compared.
        lost: change of an answer by one lost block, by the block's content.
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
        """Change by the least visible loss; 0 if none was tried."""
        return min(self.lost.values(), default=0.0)

    @property
    def decidable(self) -> bool:
        """Whether a wrong prefix and every lost block stand out from noise."""
        return self.shows(self.wrong) and self.shows(self.least)

    def shows(self, change: float) -> bool:
        """Whether a fault that changes answers by this much stands out from noise."""
        return change > 0 and math.isfinite(self.allowed) and MARGIN * self.allowed <= change


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
    """Return the largest difference of log-probabilities, up to the first different token.

    A token that only one answer lists counts with its least possible change. Infinite if the
    answers have different lengths.
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
    """Return the largest difference within pairs of answers that should be the same."""
    return max((0.0 if a.same(b) else difference(a, b) for a, b in pairs), default=0.0)
