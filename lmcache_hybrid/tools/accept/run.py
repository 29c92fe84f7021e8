# SPDX-License-Identifier: Apache-2.0
"""Asks the engines in order, and collects their answers.

First engine: every case from vLLM's own cache, twice (the second time measures the noise), then
from the nearest tier, with vLLM's cache reset before each prompt. Second engine, if a tier
survives a restart: the last prompt of each case from each such tier.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lmcache_hybrid.tools.accept.compare import (
    MARGIN,
    Answer,
    Check,
    Outcome,
    check,
    difference,
    noise_of,
)
from lmcache_hybrid.tools.accept.engine import Engine
from lmcache_hybrid.tools.accept.prompts import (
    Case,
    Ids,
    chunk_of,
    length_of,
    limits_of,
    other_prefix,
    plan_prompts,
)
from lmcache_hybrid.tools.accept.result import Result, Told

RESTART = "after a restart"
SAVING = "while saving"
# How often to ask again if noise may explain a difference.
AGAIN = 3


class Run:
    """Asks one engine, then its successor, and collects a :class:`Result`. One thread.

    Attributes:
        result: so far; set once :meth:`first` has begun.
    """

    result: Result

    def __init__(self, say: Callable[[str], None], longest: int = 0, quick: bool = False) -> None:
        """
        Args:
            say: shows progress.
            longest: max tokens of a prompt; 0 for a default.
            quick: two short cases only.
        """
        self._say, self._longest, self._quick = say, longest, quick
        # No prompts of others are hit, and none of these by others.
        self._salt = f"accept-{secrets.token_hex(8)}"

    def ask_engines(self, start: Callable[[], Engine]) -> Result:
        """Ask a first engine, and a second one if a tier survives a restart.

        Args:
            start: makes an engine that is not up yet.

        Raises:
            EngineError: an engine did not start, or ended.
        """
        self._say("First engine: starting")
        started = time.monotonic()
        with start() as engine:
            up = time.monotonic()
            result = self.first(engine)
            self._say("First engine: stopping")
        result.seconds |= {
            "first start": up - started,
            "first engine": time.monotonic() - started,
        }
        if result.problems or not any(tier["survives"] for tier in result.facts["tiers"]):
            return result
        self._say("Second engine: starting")
        started = time.monotonic()
        with start() as engine:
            self.second(engine)
            self._say("Second engine: stopping")
        result.seconds["second engine"] = time.monotonic() - started
        return result

    def first(self, engine: Engine) -> Result:
        """Ask one engine all that does not need a restart."""
        facts = dict(engine.facts)
        ordinary = facts.pop("ordinary")
        limits = limits_of(facts, self._longest)
        plan = plan_prompts(limits, ordinary, self._quick)
        self._engine, self.result = engine, Result(limits, plan, facts)
        if self._problems():
            return self.result
        # A first request includes work that is not prefill: kernels are chosen and compiled.
        for length in {limits.block + 1, *(len(c.steps[-1]) for c in plan.cases)}:
            self._ask(other_prefix((0,) * length, length, ordinary), "warm")
        engine.use(())  # nothing may be loaded, whatever is stored
        self._own(ordinary)
        engine.use(None)
        self._restored(facts["tiers"][0])
        self._say("Copies between device and host")
        engine.forget()
        self.result.copies = engine.copies()
        if any(rank["wrong"] for rank in self.result.copies):
            self.result.problems.append(
                "Blocks copied to the host and back are not the same bytes."
            )
        return self.result

    def second(self, engine: Engine) -> None:
        """Ask a restarted engine for the surviving records, tier by tier."""
        self._engine, result = engine, self.result
        engine.use(())
        for told in result.told:
            if told.case.kind != "repeat":
                continue
            engine.forget()
            for step, prompt in enumerate(told.prompts):
                answer = self._ask(prompt, "second", result.save_own)
                result.restart_pairs.append((told.own[step], answer))
        for tier in (tier for tier in result.facts["tiers"] if tier["survives"]):
            where = f"{tier['title']} {RESTART}"
            engine.use([tier["name"]])
            with self._counted(tier["name"], where):
                for told in self._each_told(where):
                    place = f"{where}, one by one" if told.batch else where
                    for step, prompt in told.last:
                        engine.forget()
                        answer = self._ask(prompt)
                        self._compare(told, step, place, answer)
                        self._time(told, where, answer)
                    self._confirm(told, where, [tier["name"]])
        engine.use(None)

    def _problems(self) -> list[str]:
        """Add problems that make asking pointless to the result, and return all."""
        result = self.result
        problems, facts, limits = result.problems, result.facts, result.limits
        problems += [
            f"{name} is configured, but LMCache did not open it (see the engine's log)."
            for name in facts["missing_tiers"]
        ]
        if not facts["tiers"]:
            problems.append("LMCache has no tier to load from; configure one.")
        shortest, name = (limits.unit, "U") if limits.unit else (limits.block, "N")
        if all(length_of(case) <= shortest for case in result.plan.cases):
            problems.append(
                f"No prompt longer than {name} = {shortest} fits in {limits.longest} tokens, so "
                "nothing can hit; raise --max-model-len, the KV cache or max_local_cpu_size."
            )
        return problems

    # The first engine

    def _own(self, ordinary: Sequence[int]) -> None:
        """Ask vLLM's own cache, twice, and for other prefixes; nothing is loaded."""
        engine, result = self._engine, self.result
        cases, save = result.plan.cases, result.save_own
        for number, case in enumerate(cases, 1):
            self._say(f"vLLM's own cache: {case.name} ({number} of {len(cases)})")
            told = Told(case)
            result.told.append(told)
            engine.forget()
            for step in _steps(case):
                prompt = step if case.kind != "chat" else _next_turn(told, step)
                told.prompts.append(prompt)
                told.own.append(self._ask(prompt, "own", save))
            if case.kind == "batch":
                told.batch = (engine.ask(case.steps, f"{self._salt}-own", save), [])
            engine.forget()
            told.again += [self._ask(prompt, "again", save) for prompt in told.prompts]
            for name, answers in (("own", told.own), ("again", told.again)):
                if any(answer.external for answer in answers):
                    result.problems.append(f"{case.name}: the connector loaded in {name!r}.")
                self._time(told, "cold", answers[0])
                self._time(told, "own", answers[-1])
            boundary = told.own[-1].cached
            if boundary:
                other = other_prefix(told.prompts[-1], boundary, ordinary)
                told.control = self._ask(other, "other")

    def _restored(self, tier: dict[str, Any]) -> None:
        """Ask the nearest tier, with vLLM's cache reset before each prompt."""
        where = tier["title"]
        with self._counted(tier["name"], where):
            for told in self._each_told(where):
                if told.case.kind == "batch":
                    self._batch(told, where)
                    self._confirm(told, where, None)
                    continue
                for step, prompt in enumerate(told.prompts):
                    self._engine.settle()
                    self._engine.forget()
                    told.restored.append(self._ask(prompt, save=True))
                    place = where if step else f"{where}, {SAVING}"
                    self._compare(told, step, place, told.restored[step])
                self._time(told, "cold, saving", told.restored[0])
                self._time(told, where, told.restored[-1])
                self._confirm(told, where, None)
                if told.case.name == self.result.loser:
                    self._lose(told)

    def _batch(self, told: Told, where: str) -> None:
        """Load prompts concurrently; then ask for them one at a time."""
        engine, result = self._engine, self.result
        engine.forget()
        for index, prompt in enumerate(told.case.steps):
            told.restored.append(self._ask(prompt, save=True))
            self._compare(told, 2 * index, f"{where}, {SAVING}", told.restored[index])
        engine.settle()
        engine.forget()
        answers = engine.ask(told.case.steps, self._salt, save=False)
        assert told.batch is not None
        told.batch = (told.batch[0], answers)
        loaded = sum(answer.cached for answer in answers)
        if loaded != answers[0].external:
            result.problems.append(
                f"batch: {answers[0].external} tokens were loaded, and {loaded} not computed."
            )
        # In a batch matrix products have other shapes, and round differently.
        noise = result.noise
        slack = max(
            2 * noise_of(zip(told.own[1::2], told.batch[0], strict=True)),
            min(noise.wrong, noise.least) / MARGIN,
        )
        for index, answer in enumerate(answers):
            step, prompt = 2 * index + 1, told.case.steps[index]
            alike = {"external": answer.cached, "slack": slack}
            self._compare(told, step, f"{where}, at once", answer, **alike)
            # The loaded blocks are vLLM's own now; compare them exactly.
            alone = self._ask(prompt)
            external = min(alone.cached, answer.cached)
            self._compare(told, step, f"{where}, one by one", alone, external=external)

    def _lose(self, told: Told) -> None:
        """Run positive controls: does this test see one lost block of each group?"""
        own, restored = told.own[-1], told.restored[-1]
        expected = own if own.cached == restored.cached else restored
        for group, kind in self.result.facts["group_kinds"]:
            self._engine.forget()
            self._engine.lose(group)
            answer = self._ask(told.prompts[-1])
            self._engine.lose(None)
            loaded = answer.external == answer.cached == expected.cached
            change = difference(expected, answer) if loaded else 0.0
            self.result.lost[f"{kind} of group {group}"] = change
        self._engine.forget()  # vLLM's own cache holds the zeroed blocks

    # Outliers

    def _confirm(self, told: Told, where: str, tiers: Sequence[str] | None) -> None:
        """Ask again for differing answers on an engine with noise: one may be an outlier."""
        result = self.result
        for index, made in enumerate(result.checks):
            tier, _, how = made.where.partition(", ")
            if (made.case, tier) != (told.case.name, where) or how == "at once":
                continue
            if result.noise.limit(made) and result.noise.judge(made) is Outcome.DIFFERS:
                others = [self._again(told, made, tiers, number) for number in range(AGAIN)]
                result.checks[index] = replace(made, others=tuple(others))

    def _again(self, told: Told, made: Check, tiers: Sequence[str] | None, number: int) -> float:
        """Make one comparison once more, both sides. Returns the difference."""
        engine, result, step = self._engine, self.result, made.step
        saving = made.where.endswith(SAVING)
        prompt = told.prompts[step]
        before = [prompt] if told.batch else told.prompts[:step]
        engine.use(())
        engine.forget()
        for ids in (*(() if saving else before), prompt):
            own = self._ask(ids, "more", result.save_own)
        engine.use(tiers)
        engine.forget()
        answer = self._ask(prompt, f"saving-{number}" if saving else "", saving)
        pairs = result.restart_pairs if made.restarted else result.own_pairs
        pairs.append((told.own[step], own))
        return difference(own, answer) if own.cached == answer.cached else math.inf

    # Asking

    def _ask(self, prompt: Ids, salt: str = "", save: bool = False) -> Answer:
        """Ask one prompt.

        Args:
            salt: "" for the prompts that are stored and restored; others are kept apart.
            save: whether the connector may store it.
        """
        (answer,) = self._engine.ask([prompt], f"{self._salt}-{salt}" if salt else self._salt, save)
        return answer

    def _each_told(self, where: str) -> Iterator[Told]:
        for number, told in enumerate(self.result.told, 1):
            self._say(f"{where}: {told.case.name} ({number} of {len(self.result.told)})")
            yield told

    def _compare(self, told: Told, step: int, where: str, answer: Answer, **fields: Any) -> None:
        """Add a check of ``answer`` against vLLM's own; ``fields`` override those of the check."""
        made = check(told.case.name, step, where, len(told.prompts[step]), told.own[step], answer)
        shows = told.shows if made.boundary else math.inf
        facts, restarted = self.result.facts, RESTART in where
        made = replace(made, drops=facts["eagle_drop"], chunk=chunk_of(facts), restarted=restarted)
        made = replace(made, shows=shows, **fields)
        self.result.checks.append(made)
        if not fields:  # asked alone
            self.result.draft_pairs.append((told.own[step], answer))

    def _time(self, told: Told, where: str, answer: Answer) -> None:
        """Note the time of a prompt asked twice; those of other cases share parts."""
        if told.case.kind == "repeat":
            times = self.result.first_token.setdefault(told.case.name, {})
            times.setdefault(where, []).append(answer.first_token_seconds)

    @contextmanager
    def _counted(self, tier: str, where: str) -> Iterator[None]:
        """Add the increases of counters to the result; all reads must be of this tier."""
        engine, result = self._engine, self.result
        self._flush_counts()
        metrics, reads = engine.metrics(), engine.reads()
        started = time.monotonic()
        yield
        result.seconds[where] = time.monotonic() - started
        self._flush_counts()
        result.metrics[where] = _increase(metrics, engine.metrics())
        read = _increase(reads, engine.reads())
        if read.keys() - {tier}:
            result.problems.append(
                f"{where}: records came from {sorted(read)}, not from {tier} only."
            )

    def _flush_counts(self) -> None:
        """Make a step, with which counts are sent."""
        self._engine.settle()
        self._ask((1, 2, 3), "flush")


def _steps(case: Case) -> list[Ids]:
    """List the prompts in order; the last one repeats an earlier one."""
    if case.kind == "batch":
        return [prompt for prompt in case.steps for _ in range(2)]
    return [*case.steps, ()] if case.kind == "chat" else list(case.steps)


def _next_turn(told: Told, tail: Ids) -> Ids:
    """Append ``tail`` to the conversation so far; without a tail repeat the last turn."""
    if not told.prompts or not tail:
        return told.prompts[-1] if told.prompts else tail
    return (*told.prompts[-1], *told.own[-1].tokens, *tail)


def _increase(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changes = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: change for name, change in changes.items() if change}
