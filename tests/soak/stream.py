# SPDX-License-Identifier: Apache-2.0
"""The stream of a soak run: prompts, bursts, kills and faults on one engine after the other."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import typer

from tests.e2e.engine import Answer, Engine, EngineDied
from tests.soak import reference
from tests.soak.reference import CHANCE_OF_BURST, ENVIRONMENT, MODES, TOKENS, Reference, rss, sample
from tests.soak.trouble import Disk, Fault, Ram, Redis, Store

SECONDS_BETWEEN_FAULTS = 3.0
CHANCE_TO_FORGET = 0.9
# A verb that takes longer hangs: the engine is aborted and says where its threads are.
HANG_SECONDS = 120
# A batch may change this many times what some batches changed without a connector.
NOISE_FACTOR = 4.0
# And so much in any case: half of what was ever seen without a connector (0.056).
LEAST_NOISE = 0.028
# Growth of the median RSS from the first to the last third of an engine's life, in MB, above
# that of the engine without a connector.
RSS_BOUND = 30.0
# Seconds; memory of an engine that lived shorter is not judged.
SHORTEST_LIFE = 60.0


class Failed(Exception):
    """Something that must never happen did."""


class Soak:
    """One run: its stream, its faults and its figures. All calls come from one thread.

    Attributes:
        counts: totals over all engines.
        injected: faults by name.
        history: the latest asks and faults, to read after a failure.
    """

    def __init__(
        self, models: dict[str, Path], folder: Path, seed: int, references: dict[str, Reference]
    ) -> None:
        self.models, self.folder, self.references = models, folder, references
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.history: deque[str] = deque(maxlen=200)
        self.phases: list[dict] = []
        self.grown: list[dict] = []
        self.worst_in_bursts = 0.0
        self.started = self.said = time.monotonic()
        self.where = ""

    # Phases and engine lives

    def phase(self, number: int, kind: str, mode: str, seconds: float) -> None:
        """Run one store for a while, killing its engine once, and look at what is left."""
        self.where = f"{number + 1} {kind}/{mode}"
        self.reference = self.references[mode]
        lives: list[dict] = []
        with ExitStack() as stack:
            self.store = self._open_store(kind, mode, number, stack)
            deadline = time.monotonic() + seconds
            kill_at = time.monotonic() + seconds * self.rng.uniform(0.2, 0.4)
            with self._life(mode, lives):
                self._stream(min(kill_at, deadline))
                self._kill()
            with self._life(mode, lives):
                self._stream(deadline)
                self._recovers()
                left = self._nothing_left()
        self.phases.append({"store": kind, "mode": mode, "left": left, "lives": lives})
        self._say(self.where, "ended:", json.dumps({"left": left, "lives": lives}), now=True)

    def _open_store(self, kind: str, mode: str, number: int, stack: ExitStack) -> Store:
        # Each phase has a store of its own: modes differ in last bits.
        if kind == "ram":
            return Ram(self.rng, mode)
        if kind == "redis":
            return Redis(self.rng, stack)
        return Disk(self.rng, mode, self.folder / f"records-{number}", ram=kind == "ram+disk")

    @contextlib.contextmanager
    def _life(self, mode: str, lives: list[dict]) -> Iterator[None]:
        """Run an engine from its start to its end; adds its memory figures to ``lives``."""
        options = MODES[mode].options
        with Engine(self.models[mode], self.store.config, env=ENVIRONMENT, **options) as engine:
            self.counts["engine starts"] += 1
            self.engine, self.seen = engine, {}
            self.samples: list[tuple[float, float]] = []
            self.fault: Fault | None = None
            self.held: Fault | None = None
            self.next_fault = time.monotonic() + SECONDS_BETWEEN_FAULTS
            self.store.opened(engine)
            self.store.heal()
            # LMCache's pool is resident once touched: touch all of it now.
            self._verb("fault", name="scrub")
            self.blocks_at_start = engine.counts()["live"]["used_blocks"]
            began = time.monotonic()
            try:
                yield
            except EngineDied as death:
                raise Failed(f"the engine died by itself: {death}") from None
            finally:
                self._take_counts({})
                self.last_log = engine.log
            lives.append(life := reference.memory(self.samples, time.monotonic() - began))
            bound = self.reference.memory.get("growth", 0) + RSS_BOUND
            if life["seconds"] >= SHORTEST_LIFE and life.get("growth", 0) > bound:
                self.grown.append({"where": self.where, "bound": bound, **life})

    def _kill(self) -> None:
        """kill -9 while a request is under way, on disk sometimes within a write."""
        self._end_fault()
        self._note("killed")
        within_write = "disk" in self.store.kind and self.rng.random() < 0.7
        if within_write:
            self._verb("forget_all")
            self._verb("fault", name="die_in_write", after=self.rng.randrange(10))
        killer = threading.Timer(self.rng.uniform(0, 0.5) + within_write * 5, self.engine.kill)
        killer.start()
        with contextlib.suppress(EngineDied):
            while True:
                self._single()
        killer.cancel()
        killer.join()
        code = self.engine.wait()
        if code != -signal.SIGKILL:
            raise Failed(f"the engine ended by itself ({code}): {self.engine.log[-6000:]}")
        self.counts["engine kills"] += 1

    # The stream

    def _stream(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self._progress()
            now = time.monotonic()
            if self.fault is not None and now > self.fault_ends:
                self._end_fault()
            if self.fault is None and now > self.next_fault:
                self._break_something()
            if self.rng.random() < CHANCE_OF_BURST:
                self._burst()
            else:
                self._single()

    def _single(self) -> Answer:
        """One prompt by itself, compared bit for bit."""
        index = self.rng.randrange(len(self.reference.prompts))
        if self.rng.random() < CHANCE_TO_FORGET:
            self._forget()
        return self._ask(index)

    def _ask(self, index: int) -> Answer:
        ids = self.reference.prompts[index]
        (answer,) = self._generate([ids], strike=True)
        before, after = self.seen, self._verb("counts")
        loaded = after["worker"]["loaded_states"] > before["worker"]["loaded_states"]
        failed = after["worker"]["failed_loads"] > before["worker"]["failed_loads"]
        kind = "hit" if loaded else "local" if answer.cached else "miss"
        kind = "failed load" if failed else kind
        self._take_counts(after)
        self.history.append(f"prompt {index}: {kind}, {answer.cached} cached")
        if answer.output != self.reference.answers[index].output:
            self.counts["wrong answers"] += 1
            raise Failed(f"wrong answer to prompt {index} ({len(ids)} tokens): {kind}, {answer}")
        if loaded and not answer.external:
            raise Failed(f"a load that vLLM did not count: {answer}")
        self.counts["asks"] += 1
        self.counts[f"compared: {kind}"] += 1
        if loaded:
            self.counts["hit tokens"] += answer.external
        sample(self.engine, self.samples)
        return answer

    def _burst(self) -> None:
        """Several prompts at once, some of them aborted; compared up to what a batch changes."""
        crowd = range(len(self.reference.crowd))
        indices = self.rng.sample(crowd, self.rng.randint(3, 8))
        gone = self.rng.randint(0, len(indices) // 2)
        prompts = [
            {"prompt_token_ids": self.reference.crowd[i]}
            | ({"abort": self.rng.randrange(12)} if place < gone else {})
            for place, i in enumerate(indices)
        ]
        self.rng.shuffle(order := list(zip(prompts, indices)))
        if self.rng.random() < CHANCE_TO_FORGET:
            self._forget()
        answers = self._generate([prompt for prompt, _ in order], strike=False)
        self.counts["bursts"] += 1
        self.counts["aborted"] += gone
        self.history.append(f"burst of {indices}, {gone} aborted")
        for index, many in zip([i for prompt, i in order if "abort" not in prompt], answers):
            alone = self.reference.crowd_answers[index]
            self.counts["asks"] += 1
            if not self.reference.mode.bursts_compared:
                continue
            apart = reference.difference(many, alone)
            if apart > max(LEAST_NOISE, NOISE_FACTOR * self.reference.noise):
                self.counts["wrong answers"] += 1
                raise Failed(f"burst prompt {index} is {apart} off: {many}, alone {alone}")
            self.worst_in_bursts = max(self.worst_in_bursts, apart)
            self.counts["compared in bursts"] += 1
        self._take_counts(self._verb("counts"))
        self._forget()

    def _generate(self, prompts: list, strike: bool) -> list[Answer]:
        """Ask; a fault that waits for a load strikes between its promise and the load.

        Not where other loads may be under way (``strike``): damage in RAM between a
        record's check and its copy is nothing that a checksum is for.
        """
        if not self.seen:
            self._take_counts(self._verb("counts"))
        reply = self._verb("ask", prompts=prompts, max_tokens=TOKENS, sampling={})
        if reply == "held":
            if strike:
                held, self.held = self.held, None
                if held is not None:
                    self._start(held, " before a load")
            else:
                self._verb("hold")
            reply = self._verb("go")
            while reply == "held":
                self._verb("hold")
                reply = self._verb("go")
        return [Answer(**answer) for answer in reply]

    def _forget(self) -> None:
        """Empty vLLM's own cache; an aborted request may still wait for its load."""
        for _ in range(20):
            if self._verb("forget"):
                return
            self._verb("ask", prompts=[[65, 66, 67]], max_tokens=1, sampling={})
        raise Failed("blocks stay in use with no request under way")

    def _verb(self, verb: str, **arguments):
        """Like ``engine.call``, but abort an engine that takes more than HANG_SECONDS."""
        abort = threading.Timer(
            HANG_SECONDS, os.kill, args=(self.engine.process.pid, signal.SIGABRT)
        )
        abort.start()
        try:
            return self.engine.call(verb, **arguments)
        finally:
            abort.cancel()

    # Faults

    def _break_something(self) -> None:
        self.next_fault = time.monotonic() + self.rng.expovariate(1 / SECONDS_BETWEEN_FAULTS)
        if self.held is not None:
            return
        faults = self.store.faults()
        (fault,) = self.rng.choices(faults, [fault.weight for fault in faults])
        if self.rng.random() < 0.3:
            self.held = fault
            self._verb("hold")
        else:
            if self.rng.random() < 0.5:
                self.engine.settle()
            self._start(fault)

    def _start(self, fault: Fault, when: str = "") -> None:
        try:
            fault.start()
        except (OSError, KeyError) as error:
            self.counts["faults not possible"] += 1
            self.history.append(f"no fault: {fault.name}: {error!r}")
            return
        self._note(fault.name, when)
        if fault.end is not None:
            self.fault, self.fault_ends = fault, time.monotonic() + fault.seconds

    def _end_fault(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            fault.end()
            self.history.append(f"ended: {fault.name}")

    def _note(self, name: str, when: str = "") -> None:
        self.injected[name] += 1
        self.history.append(f"{time.monotonic() - self.started:.1f} s FAULT {name}{when}")

    # The end of a phase

    def _recovers(self) -> None:
        """See that, with all faults ended, a prompt asked twice comes from the store."""
        self._end_fault()
        self.store.heal()
        self.held = None
        deadline = time.monotonic() + 60
        for index in self.rng.sample(range(len(self.reference.prompts)), 5):
            ids = self.reference.prompts[index]
            while True:
                self._forget()
                self._ask(index)
                self.engine.settle()
                self._forget()
                if self._ask(index).external == self.reference.deepest(ids):
                    break
                if time.monotonic() > deadline:
                    raise Failed(f"prompt {index} is not served from a store that works again")
            self.counts["recovered"] += 1

    def _nothing_left(self) -> dict:
        """See that nothing is pinned, claimed, held, unaccounted for or in use."""
        self.engine.settle()
        counts = self._verb("counts")
        live = dict(counts["live"])
        live["used_blocks"] -= self.blocks_at_start
        if any(live.values()):
            raise Failed(f"left over with nothing under way: {live}")
        return {**live, "pool": counts["pool"]}

    # Figures

    def _take_counts(self, after: dict) -> None:
        """Add what an engine counted since the last time."""
        for side, name in (
            ("worker", "failed_loads"),
            ("worker", "rejected_records"),
            ("worker", "skipped_saves"),
            ("scheduler", "lookups"),
        ):
            if self.seen and after:
                self.counts[name] += after[side][name] - self.seen[side][name]
        if self.seen and after:
            self.counts["failed_writes"] += after["failed_writes"] - self.seen["failed_writes"]
        self.seen = after

    def _progress(self) -> None:
        if time.monotonic() - self.said >= 20:
            counts = self.counts
            self._say(
                f"{self.where}: {counts['asks']} asks, {counts['compared: hit']} hits, "
                f"{counts['compared: miss']} misses, {self.injected.total()} faults, "
                f"{counts['failed_loads']} failed loads, {rss(self.engine):.0f} MB"
            )

    def _say(self, *words: str, now: bool = False) -> None:
        self.said = time.monotonic()
        minutes = (self.said - self.started) / 60
        typer.echo(" ".join([f"[{minutes:5.1f} min]", *words]))
