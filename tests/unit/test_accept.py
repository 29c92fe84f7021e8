# SPDX-License-Identifier: Apache-2.0
"""The acceptance test's plan, its judgement and its report.

``tests/e2e/test_accept.py`` runs it on real engines. The engine here is made up, because
noise, misses and prompts that do not fit cannot be had from a small model on a CPU.
"""

import dataclasses
import io
import json
import math
import os
import random
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lmcache_hybrid.accept import prompts, worker
from lmcache_hybrid.accept.child import Child, check_ranks, engine_arguments
from lmcache_hybrid.accept.compare import Answer, Noise, Outcome, Verdict, check, difference
from lmcache_hybrid.accept.engine import Engine as AcceptEngine
from lmcache_hybrid.accept.engine import EngineError, cause_in, redacted, sentence_in, tail
from lmcache_hybrid.accept.prompts import Limits, length_of, limits_of, plan_prompts
from lmcache_hybrid.accept.report import as_json, print_verdict
from lmcache_hybrid.accept.result import Result
from lmcache_hybrid.accept.run import Run
from lmcache_hybrid.accept.tiers import missing_of, refusals, tiers_of
from lmcache_hybrid.config import Options
from lmcache_hybrid.errors import ConfigError

ORDINARY = range(32, 127)
RAM = {"name": "LocalCPUBackend", "title": "RAM", "survives": False}
REDIS = {"name": "RemoteBackend", "title": "redis://", "survives": True}
FACTS = {
    "block_size": 16,
    "num_blocks": 4000,
    "groups": {"attention": 1, "window": 0, "state": 3},
    "group_kinds": [(1, "state"), (2, "state"), (3, "state"), (0, "attention")],
    "block_bytes": 1000,
    "state_bytes": 3000,
    "pool_bytes": 1 << 30,
    "max_model_len": 512,
    "device_type": "cuda",
    "device": "NVIDIA H100",
    "cuda": "13.0",
    "capability": "9.0",
    "layout": {"attention": ["(2, 16, 128) (2048, 128, 1) torch.bfloat16"], "state": []},
    "attention_backends": ["FlashAttentionBackend"],
    "tiers": [RAM, REDIS],
    "missing_tiers": [],
    "architecture": "Qwen3NextForCausalLM",
    "dtype": "bfloat16",
    "runner": "V2",
    "enforce_eager": False,
    "ranks": 1,
    "checkpoint_tokens": 0,
    "eagle_drop": False,
    "save_decode": False,
    "versions": {"vllm": "0.32.0"},
}


class Engine:
    """Caches as vLLM does, at every boundary; answers depend on all tokens.

    Args:
        blind: groups whose loss changes nothing.
        held: (salt, tokens) in each tier, by its name.
        jitter: by how much answers to one question differ.
        wrong: tokens before it are not what a restored prompt stands on.
        lose: names of tiers that find nothing.
        facts: as the engine says; with ``eagle_drop`` its own hits end a block earlier.
    """

    def __init__(
        self,
        held: dict[str, set],
        jitter: float = 0,
        wrong: int = 0,
        lose: str = "",
        blind: Sequence[int] = (),
        **facts,
    ) -> None:
        self._blind = blind
        self._lost: int | None = None
        self._spoilt: set = set()
        self.facts = {**FACTS, **facts, "ordinary": list(ORDINARY)}
        self._tiers, self._jitter, self._wrong, self._lose = held, jitter, wrong, lose
        self._local: set = set()
        self._used = list(held)
        self._reads: Counter = Counter()
        self._random = random.Random(1)
        self.counted = 0

    def ask(self, asked: Sequence[Sequence[int]], salt: str, save: bool) -> list[Answer]:
        assert not (save and self._lost is not None), "what is lost would be stored"
        found = [self._find(tuple(ids), salt) for ids in asked]
        external = sum(brought for _, brought in found)
        size = self.facts["block_size"]
        for ids in asked:
            keys = {(salt, tuple(ids[:end])) for end in range(size, len(ids) + 1, size)}
            self._local |= keys
            for held in self._tiers.values() if save else ():
                held |= keys
        return [
            self._answer(tuple(ids), salt, cached, brought, external)
            for ids, (cached, brought) in zip(asked, found)
        ]

    def _find(self, ids: tuple, salt: str) -> tuple[int, int]:
        """(tokens cached, of these external)."""
        size, local = self.facts["block_size"], 0
        for end in range((len(ids) - 1) // size * size, 0, -size):
            if not local and (salt, ids[:end]) in self._local:
                local = end - size * self.facts["eagle_drop"]
            if local >= end:
                return local, 0
            for name in self._used:
                if name != self._lose and (salt, ids[:end]) in self._tiers[name]:
                    self._reads[name] += 1
                    return end, end - local
        return local, 0

    def _answer(self, ids: tuple, salt: str, cached: int, brought: int, external: int) -> Answer:
        seen: object = ids[min(self._wrong, brought) :]
        if self._lost not in (None, *self._blind) and brought:
            self._spoilt.add((salt, ids[:cached]))
        if (salt, ids[:cached]) in self._spoilt:
            seen = (-12345, seen)  # hashes of strings are other ones in each process
        best = -(hash(seen) % 1000) / 1000 - 1 + self._jitter * self._random.random()
        return Answer([7], [{"7": best, "8": best - 1}], cached, external, 0.01)

    def forget(self) -> None:
        self._local.clear()
        self._spoilt.clear()

    def lose(self, group: int | None) -> None:
        self._lost = group

    def settle(self) -> None: ...

    def use(self, tiers: Sequence[str] | None) -> None:
        self._used = list(self._tiers if tiers is None else tiers)

    def reads(self) -> dict[str, int]:
        return dict(self._reads)

    def copies(self) -> list[dict]:
        seconds = {"gather": 2.0, "scatter": 1.0, "to_host": 0.5, "to_device": 0.5}
        return [{"bytes": 10**9, "wrong": 0, "pinned": True, **seconds}]

    def metrics(self) -> dict[str, float]:
        self.counted += 1
        names = ("loaded_bytes", "load_seconds_sum", "saved_bytes", "save_seconds_sum")
        return dict.fromkeys((*names, "save_seconds_count"), self.counted)


def run(second: dict | None = None, quick: bool = False, **options) -> Result:
    """A run on one engine and, where a tier survives, on a second one with its content."""
    tiers = {tier["name"]: set() for tier in options.get("tiers", FACTS["tiers"])}
    asking = Run(lambda text: None, quick=quick)
    result = asking.first(Engine(tiers, **options))
    if "LocalCPUBackend" in tiers:
        tiers["LocalCPUBackend"] = set()
    if not result.problems and any(t["survives"] for t in result.facts["tiers"]):
        asking.second(Engine(tiers, **{**options, **(second or {})}), result)
    return result


# Prompts


@pytest.mark.parametrize("size", [16, 400, 784, 8304])
def test_prompts_are_around_multiples_of_n_and_share_nothing(size: int) -> None:
    plan = plan_prompts(Limits(size, 20 * size, 100 * size), ORDINARY)
    assert not plan.left_out
    lengths = {case.name: [len(step) for step in case.steps] for case in plan.cases}
    assert lengths["N"] == [size] * 2 and lengths["N+1"] == [size + 1] * 2
    assert lengths["2N-1"] == [2 * size - 1] * 2 and lengths["2N"] == [2 * size] * 2
    assert lengths["2N+1"] == [2 * size + 1] * 2 and len(lengths["batch"]) == 4
    assert lengths["longest"] == [20 * size - prompts.ANSWER_TOKENS] * 2
    by_name = {case.name: case.steps for case in plan.cases}
    first, longer, again = by_name["extended"]
    assert longer[: len(first)] == first and again == longer
    # The longer one starts inside the second block and ends in the third: another boundary.
    assert (len(first) - 1) // size == 1 and (len(longer) - 1) // size == 2
    trunk, one, other, _ = by_name["branch"]
    assert one[: 2 * size] == other[: 2 * size] == trunk[: 2 * size]
    assert one[: 3 * size] != other[: 3 * size] and len(one) > 3 * size
    starts = [step[:size] for case in plan.cases for step in set(case.steps)]
    assert len(set(starts)) == len(starts) - 2 * 1 - 1  # of branch and extended
    assert plan == plan_prompts(Limits(size, 20 * size, 100 * size), ORDINARY)


@pytest.mark.parametrize("size", [16, 400, 784, 8304])
@pytest.mark.parametrize("blocks", [0.5, 1, 1.5, 2, 2.5, 3.5, 4, 8])
def test_prompts_fit_in_a_small_context(size: int, blocks: float) -> None:
    limits = Limits(size, int(size * blocks) + 1, int(size * blocks) + 1)
    plan = plan_prompts(limits, ORDINARY)
    for case in plan.cases:
        assert length_of(case) + prompts.ANSWER_TOKENS <= limits.longest
    names = {case.name for case in plan.cases} | set(plan.left_out)
    assert names >= {"N", "N+1", "2N-1", "2N", "2N+1", "extended", "branch", "chat", "batch"}
    assert bool(plan.cases) == (limits.longest >= size + prompts.ANSWER_TOKENS)


def test_limits_are_context_cache_pool_and_wish() -> None:
    assert limits_of(FACTS) == Limits(16, 512, (4000 // 2 - 12) * 16)
    assert limits_of(FACTS, longest=500).longest == 500
    assert limits_of(FACTS, longest=10).longest == 4 * 16
    small_cache = {**FACTS, "num_blocks": 60}
    assert limits_of(small_cache) == Limits(16, 18 * 16, 18 * 16)
    small_pool = {**FACTS, "pool_bytes": 50_000}
    assert limits_of(small_pool).longest == 16 * 16
    assert limits_of({**FACTS, "max_model_len": 99_999, "num_blocks": 40_000}).longest == 16_384
    assert limits_of({**FACTS, "device_type": "cpu", "max_model_len": 99_999}).longest == 4096
    # Four blocks at least, however long they are.
    assert limits_of({**FACTS, "block_size": 8304, "max_model_len": 99_999}).longest == 4 * 8304


def test_checkpoints_take_room_too() -> None:
    # The pool holds half of 50 kB, less three boundaries' states, in blocks of 1 kB.
    small = {**FACTS, "pool_bytes": 50_000}
    assert limits_of(small).together == 16 * 16
    # A state of 3 kB with each block, or with every second one.
    assert limits_of({**small, "checkpoint_tokens": 16}).together == 4 * 16
    assert limits_of({**small, "checkpoint_tokens": 32}).together == 6 * 16
    cache = {**FACTS, "num_blocks": 104, "checkpoint_tokens": 16}
    assert limits_of(cache).together == 10 * 16


def test_another_prefix_leaves_the_rest_alone() -> None:
    ids = tuple(random.Random(0).choices(ORDINARY, k=100))
    other = prompts.other_prefix(ids, 64, ORDINARY)
    assert other[64:] == ids[64:] and other[:64] != ids[:64] and len(other) == 100


# Judgement


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
    assert result.noise.own == result.noise.restart == 0 < result.noise.wrong


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


def test_without_noise_the_least_difference_fails() -> None:
    result = run()
    odd = dataclasses.replace(result.checks[0], same=False, difference=1e-7)
    result.checks[0] = odd
    assert result.verdict is Verdict.FAIL


def test_noise_is_measured_and_allowed() -> None:
    noise = Noise(1e-3, 0, 0.5, {"state of group 1": 0.5})
    own = Answer([1], [{"1": -1.0}], 16, 0, 0)
    near = Answer([1], [{"1": -1.0015}], 16, 16, 0)
    made = check("N", 1, "RAM", 17, own, near, 16)
    assert made.outcome(noise.allowed) is Outcome.NOISE
    assert made.outcome(0) is Outcome.DIFFERS


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


def test_noise_of_a_restart_excuses_nothing_before_it() -> None:
    noise = Noise(0, 0.01, 0.5, {"state of group 1": 0.5})
    own, near = (Answer([1], [{"1": value}], 16, 0, 0) for value in (-1.0, -1.001))
    made = check("N", 1, "RAM", 17, own, near, 16)
    assert noise.judge(made) is Outcome.DIFFERS
    assert noise.judge(dataclasses.replace(made, restarted=True)) is Outcome.NOISE
    result = run()
    assert {each.where for each in result.checks if each.restarted} == {
        "redis:// after a restart",
        "redis:// after a restart, one by one",
    }


def test_a_case_whose_suffix_washes_the_prefix_out_decides_nothing() -> None:
    noise = Noise(0.01, 0, 0.5, {"state of group 1": 0.5})
    own, near = (Answer([1], [{"1": value}], 16, 0, 0) for value in (-1.0, -1.001))
    made = check("2N", 1, "RAM", 32, own, near, 16)
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


def test_every_group_is_lost_once_and_seen() -> None:
    result = run()
    assert result.verdict is Verdict.PASS and len(result.lost) == 4
    assert all(change > 0 for change in result.lost.values())
    assert "A lost block changes them by " in "\n".join(shown(result))


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


def test_the_last_block_of_a_lost_group_is_zeroed_until_it_ends() -> None:
    class Worker:
        def __init__(self) -> None:
            self._plan = SimpleNamespace(
                states=(1, 3), attention=(0,), windows=(SimpleNamespace(group=2),)
            )
            self.content = {
                (group, block): torch.ones(4) for group in range(4) for block in range(9)
            }
            self._pages = {
                group: SimpleNamespace(
                    block_bytes=16,
                    pieces=lambda block, data, group=group: [
                        (self.content[group, block].view(torch.uint8), data)
                    ],
                )
                for group in range(4)
            }

        def _restore(self, load, claim, after) -> int:
            return 7

    load = SimpleNamespace(state_blocks=(1, 2), attention_blocks=((3, 4),), window_blocks=((5, 6),))
    for group, block in ((1, 1), (3, 2), (0, 4), (2, 6)):
        lossy = Worker()
        worker.lose(lossy, group)
        assert lossy._restore(load, None, None) == 7
        zeroed = {where for where, content in lossy.content.items() if not content.any()}
        assert zeroed == {(group, block)}
        worker.lose(lossy, None)
        lossy.content[group, block].fill_(1)
        lossy._restore(load, None, None)
        assert lossy.content[group, block].all()


def test_answers_that_do_not_depend_on_the_prefix_decide_nothing() -> None:
    result = run()
    for told in result.told:
        told.control = told.control and told.own[-1]
    assert result.verdict is Verdict.UNDECIDED


def test_a_tier_that_forgets_is_a_miss() -> None:
    result = run(second={"lose": "RemoteBackend"})
    missed = {each.where for each in result.checks if each.outcome(0) is Outcome.MISSED}
    assert result.verdict is Verdict.FAIL and missed
    assert all(where.startswith("redis:// after a restart") for where in missed)


def test_another_tier_that_answers_is_a_problem() -> None:
    result = run(lose="LocalCPUBackend")
    assert result.verdict is Verdict.FAIL
    assert "records came from ['RemoteBackend'], not from LocalCPUBackend only" in str(
        result.problems
    )


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


def test_a_store_that_was_not_opened_is_a_problem() -> None:
    result = run(missing_tiers=["RemoteBackend"])
    assert result.verdict is Verdict.FAIL and "RemoteBackend is configured" in result.problems[0]


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


# Report


def shown(result: Result) -> list[str]:
    out = io.StringIO()
    print_verdict(Console(file=out, width=100), result)
    return out.getvalue().splitlines()


def test_one_screen() -> None:
    lines = shown(run())
    assert len(lines) <= 40 and all(len(line) <= 100 for line in lines)
    text = "\n".join(lines)
    assert "V2 model runner" in text and "NVIDIA H100 (CUDA 13.0)" in text and "N = 16" in text
    assert "Save: copies 0.50 GB/s, 25% of one plain copy (2.00 GB/s)" in text
    assert lines[-1].startswith("PASS")


def test_prompts_that_differ_are_named() -> None:
    lines = shown(run(wrong=16, tiers=[RAM]))
    assert any("2N+1" in line and "differs by" in line for line in lines)
    last = " ".join(lines[-4:])
    assert "FAIL, wrong answers: " in last and "N+1 (RAM)" in last and "missed" not in last
    assert "no wrong" not in last


@pytest.mark.parametrize(
    "options, title",
    [
        ({"second": {"lose": "RemoteBackend"}}, "FAIL, no wrong answer, missed hits: "),
        ({"lose": "LocalCPUBackend"}, "FAIL, no wrong answer, a problem above: "),
        ({"missing_tiers": ["RemoteBackend"]}, "FAIL, a problem above: nothing was compared"),
    ],
)
def test_what_is_no_wrong_answer_is_told_apart(options: dict, title: str) -> None:
    result = run(**options)
    assert result.verdict is Verdict.FAIL
    assert title in " ".join(" ".join(shown(result)).split())


def test_prompts_that_do_not_fit_are_named() -> None:
    result = run(max_model_len=40, tiers=[RAM])
    names = result.plan.left_out
    lines = shown(result)
    assert result.verdict is Verdict.PASS and "2N+1" in names
    text = " ".join(" ".join(lines).split())
    assert f"too long for context, KV cache or LMCache's pool: {', '.join(names)} PASS" in text
    assert f"; {len(names)} prompts not asked. " in lines[-1]
    assert not [line for line in shown(run()) if "ot asked" in line]


def test_the_report_is_plain_json_of_digests() -> None:
    result = run(wrong=16)
    result.checks[0] = dataclasses.replace(result.checks[0], difference=math.inf)
    report = as_json(result)
    text = json.dumps(report, allow_nan=False)
    assert report["verdict"] == "FAIL" and report["checks"][0]["difference"] is None
    assert "ordinary" not in report["facts"]
    prompt = result.told[0].prompts[0]
    assert ", ".join(map(str, prompt[:4])) not in text
    assert {"differs"} <= {each["outcome"] for each in report["checks"]}


def test_stores_are_named_without_host_user_password_or_path() -> None:
    config = SimpleNamespace(
        local_cpu=True,
        local_disk="/home/me/disk",
        remote_url="redis://me:secret@store.example:6379",
        retrieve_locations=None,
        store_location=None,
    )
    backends = {"LocalCPUBackend": None, "RemoteBackend": None}
    store = SimpleNamespace(
        _engine=SimpleNamespace(config=config), manager=SimpleNamespace(storage_backends=backends)
    )
    tiers, missing = tiers_of(store), missing_of(store)
    assert [(tier["title"], tier["survives"]) for tier in tiers] == [
        ("RAM", False),
        ("redis://", True),
    ]
    assert missing == ["LocalDiskBackend"]
    told = json.dumps([tiers, missing, as_json(run(tiers=tiers, missing_tiers=missing))])
    assert not [word for word in ("me:", "secret", "example", "/home") if word in told]


@pytest.mark.parametrize("state_bytes", [1 << 20, 1 << 30])
def test_blocks_of_every_group_are_copied_and_compared(state_bytes: int) -> None:
    sizes = {0: 8 << 20, 1: state_bytes, 2: 8 << 20, 3: 1 << 20}
    pages = {
        group: SimpleNamespace(block_bytes=size, num_blocks=100) for group, size in sizes.items()
    }
    plan = SimpleNamespace(
        attention=(0, 2), states=(1,), windows=(SimpleNamespace(group=3),), block_size=16
    )
    store = SimpleNamespace(reserve=lambda size: SimpleNamespace(release=lambda: None))
    items, targets = worker._items(SimpleNamespace(_plan=plan, _pages=pages, _store=store))
    copied = Counter(item.key.group for item in items)
    assert copied.keys() == {0, 1, 2, 3} and copied[1] == 1
    assert abs(copied[0] - copied[2]) <= 1 and abs(copied[0] - copied[3]) <= 1
    blocks = [item.block for item in items] + targets
    assert len(set(blocks)) == len(blocks) and 0 < min(blocks) <= max(blocks) < 100


def options(**given) -> Options:
    made = Options(None, True, None, min_retrieve_tokens=0, max_tokens_per_load=0)
    return dataclasses.replace(made, **given)


def store_of(**given) -> SimpleNamespace:
    """A store with RAM above a local disk."""
    settings = {"local_cpu": True, "local_disk": "d", "remote_url": None, **given}
    config = {"retrieve_locations": None, "store_location": None, **settings}
    backends = {"LocalCPUBackend": None, "LocalDiskBackend": None}
    return SimpleNamespace(
        _engine=SimpleNamespace(config=SimpleNamespace(**config)),
        manager=SimpleNamespace(storage_backends=backends),
    )


@pytest.mark.parametrize(
    "given, settings, says",
    [
        ({"save": False}, {}, "LMCACHE_FORCE_SKIP_SAVE is set"),
        ({"max_tokens_per_load": 64}, {}, "lmcache.max_tokens_per_load=64 lets a load bring less"),
        ({"min_retrieve_tokens": 17}, {}, "min_retrieve_tokens=17 leaves hits of one block of 16"),
        (
            {},
            {"store_location": "LocalDiskBackend"},
            "store_location='LocalDiskBackend' is not the nearest backend that is read, "
            "LocalCPUBackend",
        ),
    ],
)
def test_settings_that_leave_hits_out_are_refused(given: dict, settings: dict, says: str) -> None:
    (sentence,) = refusals(options(**given), store_of(**settings), 16)
    assert says in sentence and sentence.endswith(".") and "for this test" in sentence
    ranks = [{"served": True, "refusals": [sentence]}]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_ranks(ranks)


@pytest.mark.parametrize(
    "settings, tiers",
    [
        ({}, ["RAM", "local disk"]),
        ({"local_cpu": False}, ["local disk"]),
        ({"local_cpu": False, "store_location": "LocalDiskBackend"}, ["local disk"]),
        ({"store_location": "LocalCPUBackend"}, ["RAM"]),
        ({"retrieve_locations": ["LocalDiskBackend"]}, ["local disk"]),
    ],
)
def test_tiers_are_those_that_are_written_and_read(settings: dict, tiers: list[str]) -> None:
    store = store_of(**settings)
    assert [tier["title"] for tier in tiers_of(store)] == tiers
    assert refusals(options(min_retrieve_tokens=16), store, 16) == []


@pytest.mark.parametrize("served", [(False, True), (True, False)])
def test_every_rank_must_be_served(served: tuple[bool, bool]) -> None:
    with pytest.raises(ConfigError, match=f"on rank {served.index(False)}"):
        check_ranks([{"served": each, "refusals": []} for each in served])


# Flags and logs


def test_a_command_line_of_vllm_serve_is_taken(tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 7\nport: 8001\n")
    flags = "--api-key secret --host 0.0.0.0 --max-model-len 4k --served-model-name me"
    made = engine_arguments("some/model", [*flags.split(), "--config", str(file)])
    assert (made.model, made.max_model_len, made.max_num_seqs) == ("some/model", 4000, 7)
    assert made.kv_transfer_config.kv_connector == "LMCacheConnectorV1"
    assert made.kv_transfer_config.kv_role == "kv_both" and made.disable_log_stats is False
    assert made.worker_extension_cls.endswith("AcceptExtension")


def test_settings_of_the_connector_are_kept() -> None:
    extra = {"lmcache.hybrid_checkpoint_tokens": 384}
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    text = json.dumps({**transfer, "kv_connector_extra_config": extra})
    made = engine_arguments("m", ["--kv-transfer-config", text, "--disable-log-stats"])
    assert made.kv_transfer_config.kv_connector_extra_config == extra
    assert made.disable_log_stats is False


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--no-such-flag"], "vLLM does not take these flags: unrecognized arguments"),
        (["--max-model-len", "many"], "vLLM does not take these flags: argument --max-model-len"),
        (["--data-parallel-size", "2"], "--data-parallel-size=2 starts copies"),
        (["--worker-extension-cls", "a.B"], "--worker-extension-cls=a.B takes the place"),
        (["--prefix-match-unit", "64"], "--prefix-match-unit=64 lets vLLM hit inside a block"),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer"}',
            ],
            "names LMCacheConnectorV1 with kv_role kv_consumer; test LMCacheConnectorV1",
        ),
    ],
)
def test_flags_that_cannot_be_tested_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_arguments("m", flags)
    assert says in str(error.value)


def test_the_cause_is_found_in_a_log() -> None:
    log = (
        "(EngineCore pid=1) ERROR lmcache_hybrid.errors.ConfigError: chunk_size=100 is wrong; "
        "remove it.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert sentence_in(log) == "chunk_size=100 is wrong; remove it."
    late = "ValueError: no\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    assert cause_in(late) == "OutOfMemoryError: CUDA out of memory."
    assert cause_in("all is well") is sentence_in(late) is None


def test_no_password_of_a_store_is_shown(tmp_path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO remote_url: 'redis://me:se/c@ret@store:6379/0', fs://host:0/tmp/x\n")
    assert tail(log) == "INFO remote_url: 'redis://...@store:6379/0', fs://host:0/tmp/x"
    assert redacted("no://url here, but a@b") == "no://url here, but a@b"


def test_an_engine_that_was_killed_is_noticed_though_its_workers_hold_the_pipe(tmp_path) -> None:
    read, write = os.pipe()
    timed_out = threading.Timer(30, os.close, [write])
    driven = AcceptEngine.__new__(AcceptEngine)
    driven._log, driven._written, driven._replies = tmp_path / "log", 0, os.fdopen(read)
    driven._log.write_text("")
    with subprocess.Popen(["sleep", "60"]) as process:
        driven._process = SimpleNamespace(stdin=io.StringIO(), poll=process.poll, wait=process.wait)
        process.kill()
        timed_out.start()
        with pytest.raises(EngineError, match="exit code -9"):
            driven.call("start")
    assert timed_out.is_alive()
    timed_out.cancel()
    driven._replies.close()
    os.close(write)


def test_without_a_tokenizer_ids_come_from_the_middle_of_the_vocabulary() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            architectures=["A"],
            dtype="torch.bfloat16",
            quantization=None,
            max_model_len=1,
            enforce_eager=True,
            get_vocab_size=lambda: 1000,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=1, max_num_seqs=1, async_scheduling=True
        ),
        speculative_config=SimpleNamespace(method="mtp", use_eagle_block_drop=lambda: True),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda key, default: default),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        use_v2_model_runner=True,
    )
    child = Child()
    # As --skip-tokenizer-init leaves an engine: get_tokenizer() would raise.
    child._engine = SimpleNamespace(vllm_config=config, tokenizer=None)
    facts = child._facts()
    assert facts["ordinary"] == list(range(250, 500)) and facts["eagle_drop"] is True
