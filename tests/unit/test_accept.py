# SPDX-License-Identifier: Apache-2.0
"""What the acceptance test concludes.

``tests/e2e/test_accept.py`` runs it on real engines. The engine here is made up, because
noise, misses and prompts that do not fit cannot be had from a small model on a CPU.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from lmcache_hybrid.tools.accept import prompts
from lmcache_hybrid.tools.accept.compare import (
    BAD,
    Answer,
    Check,
    Noise,
    Outcome,
    Verdict,
    check,
    difference,
)
from lmcache_hybrid.tools.accept.drafts import drafts_of
from lmcache_hybrid.tools.accept.report import as_json
from lmcache_hybrid.tools.accept.result import Result
from lmcache_hybrid.tools.accept.run import Run

from .accept_engine import RAM, Engine, run, shown


def test_a_good_engine_passes() -> None:
    result = run()
    assert result.verdict is Verdict.PASS and not result.problems
    assert {each.where for each in result.checks} == {
        "RAM",
        "RAM, while saving",
        "RAM, at once",
        "RAM, one by one",
        "redis:// after a restart",
        "redis:// after a restart, one by one",
    }
    assert all(each.outcome(0) is Outcome.EQUAL for each in result.checks)
    assert all(each.restarted == ("restart" in each.where) for each in result.checks)
    assert result.noise.own == result.noise.restart == 0 < result.noise.wrong
    assert len(result.lost) == 4 and all(change > 0 for change in result.lost.values())
    assert "A lost block changes them by " in "\n".join(shown(result))


def test_answers_that_are_no_numbers_prove_nothing() -> None:
    """JSON gives one object for all of them, which equals itself."""

    class Broken(Engine):
        def ask(self, *args, **kwargs):
            return [
                dataclasses.replace(
                    each, logprobs=[dict.fromkeys(step, math.nan) for step in each.logprobs]
                )
                for each in super().ask(*args, **kwargs)
            ]

    result = Run(lambda text: None).first(Broken({"LocalCPUBackend": set()}, tiers=[RAM]))
    assert result.verdict is not Verdict.PASS
    assert any("are no numbers" in doubt for doubt in result.doubts)


@pytest.mark.parametrize("jitter", [0, 1e-3])
def test_a_wrong_prefix_fails_with_and_without_noise(jitter: float) -> None:
    result = run(wrong=16, jitter=jitter)
    assert result.verdict is Verdict.FAIL
    assert any(each.outcome(result.noise.allowed) is Outcome.DIFFERS for each in result.checks)


def test_a_fault_of_saving_is_no_noise_and_excuses_nothing() -> None:
    class Saving(Engine):
        """What is saved or loaded is answered a little otherwise; nothing else is."""

        def ask(self, asked: Sequence[Sequence[int]], salt: str, save: bool) -> list[Answer]:
            answers = super().ask(asked, salt, save)
            if not save and not answers[0].external:
                return answers
            return [
                dataclasses.replace(
                    each, logprobs=[{k: v - 1e-4 for k, v in s.items()} for s in each.logprobs]
                )
                for each in answers
            ]

    result = Run(lambda text: None).first(Saving({"LocalCPUBackend": set()}, tiers=[RAM]))
    assert result.noise.own == 0 and result.verdict is Verdict.FAIL
    wrong = {each.where for each in result.checks if each.outcome(0) is Outcome.DIFFERS}
    assert wrong >= {"RAM", "RAM, while saving"}
    assert "new, while saving" in "\n".join(shown(result))


class Outlier(Engine):
    """Noise, and restored answers that are off by 0.5.

    Args:
        first: the restored answer that is off.
        many: and so many in all.
    """

    def __init__(self, *arguments, first: int, many: int, **options) -> None:
        super().__init__(*arguments, jitter=1e-4, **options)
        self._count, self._off = 0, range(first, first + many)

    def _answer(self, ids: tuple, salt: str, cached: int, brought: int, external: int) -> Answer:
        made = super()._answer(ids, salt, cached, brought, external)
        if self._lost is not None or not brought:
            return made
        self._count += 1
        off = [{token: value - 0.5 for token, value in made.logprobs[0].items()}]
        return dataclasses.replace(made, logprobs=off) if self._count in self._off else made


@pytest.mark.parametrize("many, verdict", [(0, "PASS"), (1, "NOT DECIDABLE"), (4, "FAIL")])
def test_an_outlier_that_does_not_come_back_is_no_fault_and_no_pass(
    many: int, verdict: str
) -> None:
    engine = Outlier({"LocalCPUBackend": set()}, tiers=[RAM], first=1, many=many)
    result = Run(lambda text: None).first(engine)
    assert result.verdict.value == verdict and not result.problems
    asked_again = [each for each in result.checks if each.others]
    assert [(each.case, each.where) for each in asked_again] == [("N+1", "RAM")] * bool(many)
    assert all(len(each.others) == 3 for each in asked_again)
    assert any("not when asked again" in line for line in shown(result)) == (many == 1)


def test_an_outlier_after_a_restart_is_asked_again_there() -> None:
    tiers: dict[str, set] = {"LocalCPUBackend": set(), "RemoteBackend": set()}
    asking = Run(lambda text: None)
    result = asking.first(Engine(tiers, jitter=1e-4))
    tiers["LocalCPUBackend"] = set()
    asking.second(Outlier(tiers, first=1, many=1))
    (again,) = [each for each in result.checks if each.others]
    assert (again.case, again.where) == ("N+1", "redis:// after a restart")
    assert result.noise.judge(again) is Outcome.ONCE and not result.own_pairs
    assert result.verdict is Verdict.UNDECIDED and not result.problems


@pytest.mark.parametrize("many, outcome", [(1, Outcome.ONCE), (9, Outcome.DIFFERS)])
def test_an_outlier_while_saving_is_asked_again(many: int, outcome: Outcome) -> None:
    class Saving(Engine):
        saved = 0

        def ask(self, asked: Sequence[Sequence[int]], salt: str, save: bool) -> list[Answer]:
            answers = super().ask(asked, salt, save)
            self.saved += save and not answers[0].cached
            if not save or answers[0].cached or self.saved > many:
                return answers
            return [dataclasses.replace(each, logprobs=[{"7": -9.0}]) for each in answers]

    result = Run(lambda text: None).first(
        Saving({"LocalCPUBackend": set()}, tiers=[RAM], jitter=1e-4)
    )
    first = result.checks[0]
    assert (first.where, len(first.others)) == ("RAM, while saving", 3)
    assert result.noise.judge(first) is outcome


def test_noise_of_a_restart_excuses_nothing_before_it() -> None:
    noise = Noise(0, 0.01, 0.5, {"state of group 1": 0.5})
    own, near = (Answer([1], [{"1": value}], 16, 16, 0) for value in (-1.0, -1.015))
    made = check("N", 1, "RAM", 17, own, near)
    assert noise.judge(made) is Outcome.DIFFERS
    assert noise.judge(dataclasses.replace(made, restarted=True)) is Outcome.NOISE


def test_a_case_whose_suffix_washes_the_prefix_out_decides_nothing() -> None:
    noise = Noise(0.01, 0, 0.5, {"state of group 1": 0.5})
    own, near = (Answer([1], [{"1": value}], 16, 16, 0) for value in (-1.0, -1.001))
    made = check("2N", 1, "RAM", 32, own, near)
    assert noise.judge(made) is Outcome.NOISE
    assert noise.judge(dataclasses.replace(made, shows=0.05)) is Outcome.UNCOMPARED
    # Elsewhere the cases with the fewest tokens after the hit tell what is visible.
    result = run(tiers=[RAM])
    washed = next(told for told in result.told if told.case.name == "2N")
    washed.control = washed.own[-1]
    assert result.noise.wrong > 0 and result.verdict is Verdict.PASS
    short = next(told for told in result.told if told.case.name == "N+1")
    short.control = short.own[-1]
    assert result.noise.wrong == 0 and result.verdict is Verdict.UNDECIDED


def test_noise_as_large_as_a_wrong_prefix_is_not_decidable() -> None:
    result = run(jitter=5.0)
    assert result.noise.own > 1 and not result.noise.decidable
    assert result.verdict in (Verdict.UNDECIDED, Verdict.FAIL)
    result.checks = [dataclasses.replace(each, difference=0.0) for each in result.checks]
    assert result.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("group, name", [(2, "state of group 2"), (0, "attention of group 0")])
def test_a_loss_that_changes_nothing_leaves_nothing_proved(group: int, name: str) -> None:
    result = run(blind=[group])
    assert result.lost[name] == 0 and result.verdict is Verdict.UNDECIDED
    assert f"A lost {name} does not show in these answers." in shown(result)
    # A loss that noise could explain is not seen, either.
    result.lost[name] = 1e-4
    assert result.verdict is Verdict.PASS
    one, other = result.told[0].own[0], result.told[0].again[0]
    near = [{token: value - 3e-5 for token, value in step.items()} for step in other.logprobs]
    result.told[0].again[0] = dataclasses.replace(one, logprobs=near)
    assert result.verdict is Verdict.UNDECIDED


class Sparse(Engine):
    """vLLM's cache keeps last boundaries and junctions; the tiers chunk ends as well."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._asked: set = set()

    def forget(self) -> None:
        super().forget()
        self._asked = set()

    def _ends(self, ids: tuple, salt: str) -> tuple[Sequence[int], Sequence[int]]:
        every, size = super()._ends(ids, salt)[0], self.facts["block_size"]
        shared = [end for end in every if (salt, ids[:end]) in self._asked]
        self._asked |= {(salt, ids[:end]) for end in every}
        kept = [(len(ids) - 1) // size * size, *shared[-1:]]
        return kept, [*kept, *range(2 * size, len(ids), 2 * size)]


def told_of_branches(**options) -> tuple[Result, Check]:
    """Of an engine alone, and the check of its first branch."""
    asking = Run(lambda text: None)
    result = asking.first(Sparse({"LocalCPUBackend": set()}, tiers=[RAM], **options))
    return result, next(c for c in result.checks if (c.case, c.step) == ("branch", 1))


def test_a_first_branch_that_hits_where_a_chunk_ended_is_compared_with_the_cold_prompt() -> None:
    result, branch = told_of_branches(chunk_budget=47)
    assert (branch.boundary, branch.cached, branch.external) == (0, 32, 32)
    assert result.verdict is Verdict.PASS and branch.outcome(0) is Outcome.EQUAL
    result, branch = told_of_branches(chunk_budget=47, wrong=16)
    assert result.verdict is Verdict.FAIL and branch.outcome(0) is Outcome.DIFFERS


@pytest.mark.parametrize("budget", [0, 48])
def test_a_hit_where_no_chunk_ended_is_a_fault(budget: int) -> None:
    result, branch = told_of_branches(chunk_budget=budget)
    assert result.verdict is Verdict.FAIL and branch.outcome(0) is Outcome.BOUNDARY


def test_a_hit_deeper_than_vllms_own_is_a_fault_where_chunks_end_too() -> None:
    result, branch = told_of_branches(chunk_budget=32)
    deeper = dataclasses.replace(branch, boundary=16)
    assert deeper.outcome(0) is Outcome.BOUNDARY
    assert dataclasses.replace(deeper, drops=True).outcome(0) is Outcome.UNCOMPARED


@pytest.mark.parametrize("checkpoint", [0, 32])
def test_a_drafter_drops_vllms_last_block_and_that_is_no_fault(checkpoint: int) -> None:
    result = run(eagle_drop=True, checkpoint_tokens=checkpoint)
    assert not result.problems  # nothing was loaded for vLLM's own answers
    outcomes = Counter(each.outcome(0) for each in result.checks)
    assert outcomes.keys() == {Outcome.EQUAL, Outcome.UNCOMPARED}
    # Every hit of the store is one block deeper, so none could be compared.
    assert result.verdict is Verdict.UNDECIDED
    assert "No hit from RAM could be compared." in shown(result)
    assert f"; {outcomes[Outcome.UNCOMPARED]} not compared" in " ".join(shown(result))
    # Without a drafter it would be a fault.
    deeper = dataclasses.replace(result.checks[1], drops=False, cached=99, external=99)
    assert deeper.outcome(0) is Outcome.BOUNDARY


def test_drafts_are_accepted_as_behind_vllms_own_hits() -> None:
    result = run(drafts=16)
    assert result.verdict is Verdict.PASS and result.drafts is not None
    assert result.drafts.own == result.drafts.restored and result.drafts.own[1] > 0
    assert f"{result.drafts.text}." in shown(result)
    assert as_json(result)["drafts"]["differ"] == 0
    assert run().drafts is None


@pytest.mark.parametrize("options", [{}, {"jitter": 1e-4}, {"eagle_drop": True}])
def test_a_drafter_that_was_not_restored_fails_though_answers_are_equal(options: dict) -> None:
    result = run(drafts=16, spoilt_drafts=True, **options)
    assert not [each for each in result.checks if result.noise.judge(each) in BAD]
    assert result.drafts is not None and result.drafts.own[1] > result.drafts.restored[1] == 0
    assert result.verdict is Verdict.FAIL
    assert as_json(result)["problems"] == [result.drafts.problem]
    assert "what the drafter needs was not restored" in " ".join(" ".join(shown(result)).split())


def test_one_draft_less_fails_only_where_drafts_do_not_vary() -> None:
    own = Answer([1], [{"1": -1.0}], 16, 0, 0, 8, 5)
    restored = dataclasses.replace(own, external=16, accepted=4)
    varied = dataclasses.replace(own, accepted=6)
    assert drafts_of([(own, restored)], [(own, own)]).problem
    assert not drafts_of([(own, restored)], [(own, varied)]).problem
    # Few drafts on a varying engine decide nothing, many do.
    none = dataclasses.replace(restored, accepted=0)
    assert not drafts_of([(own, none)] * 7, [(own, varied)]).problem
    assert drafts_of([(own, none)] * 8, [(own, varied)]).problem


def test_every_tier_must_have_brought_a_hit_that_is_compared() -> None:
    result = run()
    where = "redis:// after a restart"
    result.checks = [
        dataclasses.replace(each, cached=each.cached + 16, drops=True)
        if each.where.startswith(where)
        else each
        for each in result.checks
    ]
    assert result.doubts == [f"No hit from {where} could be compared."]
    assert result.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("tokens", [16, 16 + prompts.ANSWER_TOKENS])
def test_a_context_of_one_block_is_a_problem(tokens: int) -> None:
    result = run(max_model_len=tokens)
    assert result.verdict is Verdict.FAIL
    assert result.problems[0].startswith(f"No prompt longer than N = 16 fits in {tokens} tokens")
    assert shown(result)[-1].startswith("FAIL, a problem above: nothing was compared; ")


def test_a_cold_engine_that_loads_would_be_no_reference() -> None:
    class Leaky(Engine):
        def _find(self, ids: tuple, salt: str) -> tuple[int, int]:
            found = super()._find(ids, salt)
            return found if "own" not in salt or len(ids) != 32 else (16, 16)

    result = Run(lambda text: None).first(Leaky({"LocalCPUBackend": set()}, tiers=[RAM]))
    assert "2N: the connector loaded in 'own'." in result.problems


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ([{"1": -1.0, "2": -2.0}], [{"1": -1.0, "2": -2.5}], 0.5),
        # What is not among the best has changed by this at least.
        ([{"1": -1.0, "2": -2.0}], [{"1": -1.0, "3": -3.0}], 1.0),
        ([{"1": -1.0}], [], math.inf),
        ([{"1": math.nan}], [{"1": -1.0}], math.inf),
    ],
)
def test_difference(one: list, other: list, expected: float) -> None:
    first, second = (Answer([1] * len(steps), steps, 0, 0, 0) for steps in (one, other))
    assert difference(first, second) == expected


def test_difference_ends_with_the_first_other_token() -> None:
    first = Answer([1, 1], [{"1": -1.0}, {"1": -1.0}], 0, 0, 0)
    second = Answer([2, 1], [{"1": -1.1}, {"1": -9.0}], 0, 0, 0)
    assert difference(first, second) == pytest.approx(0.1)
