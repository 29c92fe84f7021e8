# SPDX-License-Identifier: Apache-2.0
"""The order in which engines are asked, and what is made of their answers.

First engine: every case from vLLM's own cache, twice (the second time tells the noise),
then from the nearest tier, with vLLM's cache emptied before each prompt. Second engine, if
a tier survives a restart: the last prompt of each case from each such tier.
"""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lmcache_hybrid.tools.accept.compare import (
    MARGIN,
    Answer,
    Check,
    Outcome,
    check,
    difference,
    noise_of,
)
from lmcache_hybrid.tools.accept.prompts import (
    Case,
    Ids,
    length_of,
    limits_of,
    other_prefix,
    plan_prompts,
)
from lmcache_hybrid.tools.accept.result import Result, Told

RESTART = "after a restart"
SAVING = "while saving"
# A difference that noise may have made is asked for so many times more.
AGAIN = 3


class Asked(Protocol):
    """What is needed of an :class:`lmcache_hybrid.tools.accept.engine.Engine`."""

    facts: dict[str, Any]

    def ask(self, prompts: Sequence[Sequence[int]], salt: str, save: bool) -> list[Answer]: ...
    def forget(self) -> None: ...
    def settle(self) -> None: ...
    def use(self, tiers: Sequence[str] | None) -> None: ...
    def lose(self, group: int | None) -> None: ...
    def reads(self) -> dict[str, int]: ...
    def copies(self) -> list[dict[str, Any]]: ...
    def metrics(self) -> dict[str, float]: ...


class Run:
    """Asks engines and collects a :class:`Result`."""

    def __init__(self, say: Callable[[str], None], longest: int = 0, quick: bool = False) -> None:
        """
        Args:
            say: is told what is being done.
            longest: most tokens of a prompt; 0 for a default.
            quick: two short cases only.
        """
        self._say, self._longest, self._quick = say, longest, quick
        # Nobody else's prompts are hit, and nobody ever hits these.
        self._salt = f"accept-{secrets.token_hex(8)}"

    def first(self, engine: Asked) -> Result:
        """Everything that one engine can tell."""
        facts = dict(engine.facts)
        ordinary = facts.pop("ordinary")
        limits = limits_of(facts, self._longest)
        result = Result(limits, plan_prompts(limits, ordinary, self._quick), facts)
        tiers = facts["tiers"]
        result.problems += [
            f"{name} is configured, but LMCache did not open it (see the engine's log)."
            for name in facts["missing_tiers"]
        ]
        if not tiers:
            result.problems.append("LMCache has no tier to load from; configure one.")
        if all(length_of(case) <= limits.block for case in result.plan.cases):
            result.problems.append(
                f"No prompt longer than N = {limits.block} fits in {limits.longest} tokens, so "
                "nothing can hit; raise --max-model-len, the KV cache or max_local_cpu_size."
            )
        if result.problems:
            return result
        # A first request pays for work that is not prefill: kernels are chosen and compiled.
        for length in {limits.block + 1, *(len(c.steps[-1]) for c in result.plan.cases)}:
            warm = other_prefix((0,) * length, length, ordinary)
            engine.ask([warm], f"{self._salt}-warm", save=False)
        engine.use(())  # nothing may be loaded, whatever is stored
        self._own(engine, result, ordinary)
        engine.use(None)
        self._restored(engine, result, tiers[0])
        self._say("Copies between device and host")
        engine.forget()
        result.copies = engine.copies()
        if any(rank["wrong"] for rank in result.copies):
            result.problems.append("Blocks copied to the host and back are not the same bytes.")
        return result

    def second(self, engine: Asked, result: Result) -> None:
        """What survives a restart, tier by tier. Mutates ``result``."""
        engine.use(())
        for told in result.told:
            if told.case.kind != "repeat":
                continue
            engine.forget()
            for step, prompt in enumerate(told.prompts):
                (answer,) = engine.ask([prompt], f"{self._salt}-second", result.save_own)
                result.restart_pairs.append((told.own[step], answer))
        for tier in (tier for tier in result.facts["tiers"] if tier["survives"]):
            where = f"{tier['title']} {RESTART}"
            engine.use([tier["name"]])
            with self._counted(engine, result, tier["name"], where):
                for number, told in enumerate(result.told, 1):
                    self._say(f"{where}: {told.case.name} ({number} of {len(result.told)})")
                    place = f"{where}, one by one" if told.batch else where
                    for step, prompt, own in told.last:
                        engine.forget()
                        (answer,) = engine.ask([prompt], self._salt, save=False)
                        result.checks.append(_check(result, told, step, place, own, answer))
                        self._time(result, told, where, answer)
                    self._confirm(engine, result, told, where, [tier["name"]])
        engine.use(None)

    # The first engine

    def _own(self, engine: Asked, result: Result, ordinary: Sequence[int]) -> None:
        """vLLM's own cache, twice, and other prefixes; nothing is loaded."""
        cases, save = result.plan.cases, result.save_own
        for number, case in enumerate(cases, 1):
            self._say(f"vLLM's own cache: {case.name} ({number} of {len(cases)})")
            told = Told(case)
            result.told.append(told)
            own, again = f"{self._salt}-own", f"{self._salt}-again"
            engine.forget()
            for step in _steps(case):
                prompt = step if case.kind != "chat" else _next_turn(told, step)
                told.prompts.append(prompt)
                told.own += engine.ask([prompt], own, save)
            if case.kind == "batch":
                told.batch = (engine.ask(case.steps, own, save), [])
            engine.forget()
            for prompt in told.prompts:
                told.again += engine.ask([prompt], again, save)
            for name, answers in (("own", told.own), ("again", told.again)):
                if any(answer.external for answer in answers):
                    result.problems.append(f"{case.name}: the connector loaded in {name!r}.")
            boundary = told.own[-1].cached
            if boundary:
                other = other_prefix(told.prompts[-1], boundary, ordinary)
                (told.control,) = engine.ask([other], f"{self._salt}-other", save=False)
            for answers in (told.own, told.again):
                self._time(result, told, "cold", answers[0])
                self._time(result, told, "own", answers[-1])

    def _restored(self, engine: Asked, result: Result, tier: dict[str, Any]) -> None:
        """The nearest tier, with vLLM's cache emptied before each prompt."""
        where = tier["title"]
        with self._counted(engine, result, tier["name"], where):
            for number, told in enumerate(result.told, 1):
                self._say(f"{where}: {told.case.name} ({number} of {len(result.told)})")
                if told.case.kind == "batch":
                    self._batch(engine, result, told, where)
                    self._confirm(engine, result, told, where, None)
                    continue
                for step, prompt in enumerate(told.prompts):
                    engine.settle()
                    engine.forget()
                    told.restored += engine.ask([prompt], self._salt, save=True)
                    place = where if step else f"{where}, {SAVING}"
                    own, answer = told.own[step], told.restored[step]
                    result.checks.append(_check(result, told, step, place, own, answer))
                self._time(result, told, "cold, saving", told.restored[0])
                self._time(result, told, where, told.restored[-1])
                self._confirm(engine, result, told, where, None)
                if told.case.name == result.loser:
                    self._lose(engine, result, told)

    def _confirm(
        self,
        engine: Asked,
        result: Result,
        told: Told,
        where: str,
        tiers: Sequence[str] | None,
    ) -> None:
        """Ask again what differs on an engine with noise: one answer may be an outlier."""
        for index, made in enumerate(result.checks):
            tier, _, how = made.where.partition(", ")
            if (made.case, tier) != (told.case.name, where) or how == "at once":
                continue
            if result.noise.limit(made) and result.noise.judge(made) is Outcome.DIFFERS:
                others = [self._again(engine, result, told, made, tiers, n) for n in range(AGAIN)]
                result.checks[index] = replace(made, others=tuple(others))

    def _again(
        self,
        engine: Asked,
        result: Result,
        told: Told,
        made: Check,
        tiers: Sequence[str] | None,
        number: int,
    ) -> float:
        """One comparison once more, both sides. Returns the difference."""
        step, saving = made.step, made.where.endswith(SAVING)
        prompt = told.prompts[step]
        before = [prompt] if told.batch else told.prompts[:step]
        engine.use(())
        engine.forget()
        for ids in (*(() if saving else before), prompt):
            (own,) = engine.ask([ids], f"{self._salt}-more", result.save_own)
        engine.use(tiers)
        engine.forget()
        salt = f"{self._salt}-saving-{number}" if saving else self._salt
        (answer,) = engine.ask([prompt], salt, save=saving)
        pairs = result.restart_pairs if made.restarted else result.own_pairs
        pairs.append((told.own[step], own))
        return difference(own, answer) if own.cached == answer.cached else math.inf

    def _lose(self, engine: Asked, result: Result, told: Told) -> None:
        """Positive controls: does this test see one lost block of each group?"""
        own, restored = told.own[-1], told.restored[-1]
        expected = own if own.cached == restored.cached else restored
        for group, kind in result.facts["group_kinds"]:
            engine.forget()
            engine.lose(group)
            (answer,) = engine.ask([told.prompts[-1]], self._salt, save=False)
            engine.lose(None)
            loaded = answer.external == answer.cached == expected.cached
            change = difference(expected, answer) if loaded else 0.0
            result.lost[f"{kind} of group {group}"] = change
        engine.forget()  # vLLM's own cache holds what was lost

    def _batch(self, engine: Asked, result: Result, told: Told, where: str) -> None:
        """Loads side by side; then what they restored, one prompt at a time."""
        engine.forget()
        for index, prompt in enumerate(told.case.steps):
            told.restored += engine.ask([prompt], self._salt, save=True)
            cold, saved = told.own[2 * index], told.restored[index]
            result.checks.append(_check(result, told, 2 * index, f"{where}, {SAVING}", cold, saved))
        engine.settle()
        engine.forget()
        answers = engine.ask(told.case.steps, self._salt, save=False)
        assert told.batch is not None
        told.batch = (told.batch[0], answers)
        own = told.own[1::2]
        loaded = sum(answer.cached for answer in answers)
        if loaded != answers[0].external:
            result.problems.append(
                f"batch: {answers[0].external} tokens were loaded, and {loaded} not computed."
            )
        # In a batch matrix products have other shapes, and round otherwise.
        noise = result.noise
        slack = max(
            2 * noise_of(zip(own, told.batch[0], strict=True)),
            min(noise.wrong, noise.least) / MARGIN,
        )
        for index, (mine, answer) in enumerate(zip(own, answers, strict=True)):
            made = _check(result, told, 2 * index + 1, f"{where}, at once", mine, answer)
            result.checks.append(replace(made, external=answer.cached, slack=slack))
            # The blocks that were loaded are vLLM's own now, to be compared exactly.
            (alone,) = engine.ask([told.case.steps[index]], self._salt, save=False)
            made = _check(result, told, 2 * index + 1, f"{where}, one by one", mine, alone)
            result.checks.append(replace(made, external=min(alone.cached, answer.cached)))

    def _counted(self, engine: Asked, result: Result, tier: str, where: str) -> "_Counted":
        return _Counted(self, engine, result, tier, where)

    def _time(self, result: Result, told: Told, where: str, answer: Answer) -> None:
        """Only of prompts asked twice: those of other cases share parts."""
        if told.case.kind == "repeat":
            times = result.first_token.setdefault(told.case.name, {})
            times.setdefault(where, []).append(answer.first_token_seconds)

    def flush_counts(self, engine: Asked) -> None:
        """Counts travel with the next step."""
        engine.settle()
        engine.ask([(1, 2, 3)], f"{self._salt}-flush", save=False)


class _Counted:
    """Context: counters' increases go to the result, and every read was of one tier."""

    def __init__(self, run: Run, engine: Asked, result: Result, tier: str, where: str) -> None:
        self._run, self._engine, self._result = run, engine, result
        self._tier, self._where = tier, where

    def __enter__(self) -> None:
        self._run.flush_counts(self._engine)
        self._metrics, self._reads = self._engine.metrics(), self._engine.reads()
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            return
        self._result.seconds[self._where] = time.monotonic() - self._started
        self._run.flush_counts(self._engine)
        self._result.metrics[self._where] = _increase(self._metrics, self._engine.metrics())
        reads = _increase(self._reads, self._engine.reads())
        if reads.keys() - {self._tier}:
            self._result.problems.append(
                f"{self._where}: records came from {sorted(reads)}, not from {self._tier} only."
            )


def _steps(case: Case) -> list[Ids]:
    """What is asked in this order; the last prompt has been asked before."""
    if case.kind == "batch":
        return [prompt for prompt in case.steps for _ in range(2)]
    return [*case.steps, ()] if case.kind == "chat" else list(case.steps)


def _next_turn(told: Told, tail: Ids) -> Ids:
    """The conversation so far and ``tail``; without a tail the last turn again."""
    if not told.prompts or not tail:
        return told.prompts[-1] if told.prompts else tail
    return (*told.prompts[-1], *told.own[-1].tokens, *tail)


def _check(result: Result, told: Told, step: int, where: str, own: Answer, answer: Answer) -> Check:
    tokens = len(told.prompts[step])
    made = check(told.case.name, step, where, tokens, own, answer, answer.external)
    shows = told.shows if made.boundary else math.inf
    drops, restarted = result.facts["eagle_drop"], RESTART in where
    return replace(made, drops=drops, restarted=restarted, shows=shows)


def _increase(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changes = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: change for name, change in changes.items() if change}
