# SPDX-License-Identifier: Apache-2.0
"""Collects the engines' answers, and derives the verdict."""

import math
from dataclasses import dataclass, field
from typing import Any

from lmcache_hybrid.tools.accept.compare import (
    BAD,
    GOOD,
    Answer,
    Check,
    Noise,
    Outcome,
    Verdict,
    difference,
    noise_of,
)
from lmcache_hybrid.tools.accept.drafts import Drafts, drafts_of
from lmcache_hybrid.tools.accept.prompts import Case, Ids, Limits, Plan


@dataclass
class Told:
    """The first engine's answers to one case; grows while it is asked.

    Attributes:
        prompts: as they were asked; those of a chat contain answers.
        own: with vLLM's own cache only, per prompt.
        again: the same once more.
        restored: with vLLM's cache reset before each prompt.
        batch: of a batch, from vLLM's own cache and from the tier, all prompts at once.
        control: the answer to the last prompt with another prefix; None if nothing hits.
    """

    case: Case
    prompts: list[Ids] = field(default_factory=list)
    own: list[Answer] = field(default_factory=list)
    again: list[Answer] = field(default_factory=list)
    restored: list[Answer] = field(default_factory=list)
    batch: tuple[list[Answer], list[Answer]] | None = None
    control: Answer | None = None

    @property
    def after(self) -> int:
        """Tokens of the last prompt after its hit."""
        return len(self.prompts[-1]) - self.own[-1].cached

    @property
    def shows(self) -> float:
        """Change of the last answer by another prefix; infinite if nothing hits."""
        return math.inf if self.control is None else difference(self.own[-1], self.control)

    @property
    def last(self) -> list[tuple[int, Ids]]:
        """(step, prompt) to ask a restarted engine."""
        steps = range(1, len(self.prompts), 2) if self.batch else [len(self.prompts) - 1]
        return [(step, self.prompts[step]) for step in steps]


@dataclass
class Result:
    """All that is reported; grows while engines are asked. One thread.

    Attributes:
        facts: of the first engine, without token ids.
        own_pairs: more answers of the first engine to the same question, beside ``Told.again``.
        draft_pairs: answers of vLLM's own cache and of a tier to a prompt that was asked alone.
        restart_pairs: answers of both engines to the same question.
        metrics: increases of this package's counters while restored prompts were asked,
            by tier.
        copies: per rank, see ``AcceptExtension.accept_copies``.
        lost: positive controls: change by one lost block, by group.
        first_token: seconds, by case name and source of the prefix.
        problems: other faults than wrong answers, a sentence each.
        seconds: of each part of the run.
    """

    limits: Limits
    plan: Plan
    facts: dict[str, Any]
    told: list[Told] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    own_pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    draft_pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    restart_pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    copies: list[dict[str, Any]] = field(default_factory=list)
    lost: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def save_own(self) -> bool:
        """Whether to store prompts that are not loaded, because saves can split a prefill.

        Saves at chunk ends split none.
        """
        return bool(self.facts["checkpoint_tokens"] or self.facts["save_decode"])

    @property
    def _own_twice(self) -> list[tuple[Answer, Answer]]:
        pairs = [pair for each in self.told for pair in zip(each.own, each.again, strict=False)]
        return pairs + self.own_pairs

    @property
    def drafts(self) -> Drafts | None:
        """Drafts of prompts that hit; None without a drafter."""
        return drafts_of(self.draft_pairs, self._own_twice)

    @property
    def noise(self) -> Noise:
        # Many tokens after the prefix would hide its effect.
        controls = [each for each in self.told if each.control is not None]
        fewest = min((each.after for each in controls), default=0)
        wrong = min((each.shows for each in controls if each.after == fewest), default=0.0)
        return Noise(noise_of(self._own_twice), noise_of(self.restart_pairs), wrong, self.lost)

    @property
    def loser(self) -> str | None:
        """Name of the case to ask again with a block lost; None if nothing hits."""
        hits = [
            each.case.name
            for each in self.told
            if each.case.kind == "repeat" and each.own[-1].cached
        ]
        return "2N+1" if "2N+1" in hits else next(iter(hits), None)

    @property
    def all_problems(self) -> list[str]:
        """Problems found while engines were asked, and that of drafts."""
        drafts = self.drafts
        return self.problems + ([drafts.problem] if drafts and drafts.problem else [])

    @property
    def doubts(self) -> list[str]:
        """Why equal answers would prove nothing, one sentence each; empty if they prove it."""
        noise = self.noise
        doubts: list[str] = []
        if not math.isfinite(noise.allowed):
            doubts.append(
                "vLLM's own answers to a prompt differ beyond measure, or their log-probabilities "
                "are no numbers."
            )
        if not noise.shows(noise.wrong):
            doubts.append("Another prefix changes too little to be told from noise on this engine.")
        hidden = [name for name, change in noise.lost.items() if not noise.shows(change)]
        if hidden or not noise.lost:
            lost = " or ".join(hidden) or "block"
            doubts.append(f"A lost {lost} does not show in these answers.")
        hits: dict[str, bool] = {}
        for each in self.checks:
            tier = each.where.partition(",")[0]
            compared = each.external and each.boundary and noise.judge(each) in GOOD
            hits[tier] = hits.get(tier, False) or bool(compared)
        for tier in [tier for tier, found in hits.items() if not found] if hits else ["any tier"]:
            doubts.append(f"No hit from {tier} could be compared.")
        once = sum(noise.judge(each) is Outcome.ONCE for each in self.checks)
        if once:
            doubts.append(f"{once} answers differed by more than noise, but not when asked again.")
        return doubts

    @property
    def verdict(self) -> Verdict:
        """The overall verdict from all comparisons and problems."""
        judge = self.noise.judge
        if self.all_problems or any(judge(each) in BAD for each in self.checks):
            return Verdict.FAIL
        return Verdict.UNDECIDED if self.doubts else Verdict.PASS
