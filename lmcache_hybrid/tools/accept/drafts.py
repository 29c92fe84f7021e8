# SPDX-License-Identifier: Apache-2.0
"""Compares draft acceptance behind restored prefixes with that behind vLLM's own hits.

The target model decides every token, so a drafter with wrongly restored pages changes no answer.
It only guesses badly: acceptance falls.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmcache_hybrid.tools.accept.compare import Answer

# On an engine whose drafts vary by themselves, acceptance below this share of vLLM's own is a
# fault, once both sides have ENOUGH drafts to rule out chance.
LEAST_SHARE = 0.5
ENOUGH = 64


@dataclass(frozen=True)
class Drafts:
    """Totals over prompts that hit in vLLM's own cache and in the store.

    Attributes:
        own: (drafted, accepted) behind vLLM's own hits.
        restored: the same behind the store's.
        differ: prompts with equal answers but different drafts, on an engine whose own drafts
            are always the same.
    """

    own: tuple[int, int]
    restored: tuple[int, int]
    differ: int

    @property
    def problem(self) -> str:
        """One sentence; "" if acceptance is that of vLLM's own hits."""
        text = f"{self.text}: what the drafter needs was not restored."
        if self.differ:
            return text
        own, restored = map(_rate, (self.own, self.restored))
        enough = min(self.own[0], self.restored[0]) >= ENOUGH
        return text if enough and restored < LEAST_SHARE * own else ""

    @property
    def text(self) -> str:
        (drafted, accepted), (again, accepted_again) = self.own, self.restored
        return (
            f"Drafts accepted: {accepted} of {drafted} behind vLLM's own hits, "
            f"{accepted_again} of {again} behind LMCache's"
        )


def drafts_of(
    pairs: Sequence[tuple[Answer, Answer]], own_pairs: Iterable[tuple[Answer, Answer]]
) -> Drafts | None:
    """Add up drafts of (vLLM's own, restored) answers to the same prompts, asked alone.

    Args:
        own_pairs: two answers of vLLM's own cache to the same prompt.

    Returns:
        None if nothing was drafted.
    """
    hits = [(own, other) for own, other in pairs if own.cached and other.external]
    steady = all(one.drafts == other.drafts for one, other in own_pairs)
    alike = [(o, r) for o, r in hits if o.same(r) and o.cached == r.cached]
    made = Drafts(
        _total(own for own, _ in hits),
        _total(restored for _, restored in hits),
        sum(own.drafts != restored.drafts for own, restored in alike) if steady else 0,
    )
    return made if made.own[0] or made.restored[0] else None


def _total(answers: Iterable[Answer]) -> tuple[int, int]:
    drafts = [answer.drafts for answer in answers]
    return sum(drafted for drafted, _ in drafts), sum(accepted for _, accepted in drafts)


def _rate(drafts: tuple[int, int]) -> float:
    drafted, accepted = drafts
    return accepted / drafted if drafted else 0.0
