# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.peers.measure: the arms of one environment, run by its interpreter.

``python -m benchmarks.peers`` runs this; each arm is kept in the file as soon as it is measured.
"""

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.figures import origin, read, versions, write
from benchmarks.peers.arms import ARMS, BASE
from benchmarks.peers.probe import (
    LATER,
    LONG,
    REPEATS,
    Reference,
    answers_of,
    ask,
    damaged,
    first_token,
    from_store,
    later,
    prompts,
    reference,
)
from benchmarks.peers.servers import Peer, processes
from benchmarks.progress import shown
from benchmarks.serve import client, report
from benchmarks.serve.client import Workload
from benchmarks.serve.cold import OUTPUT, PREFIX, STATES, SUFFIX

# One server that engines and vLLM's client are forked from.
processes.FORKS.set_forkserver_preload(
    [
        "vllm.entrypoints.llm",
        "vllm.model_executor.model_loader",
        "vllm.v1.worker.cpu_worker",
        "vllm.benchmarks.serve",
    ]
)
LIMIT = 2_048
AT_ONCE = 4
PREFIXES, EACH = 12, 6
COUNTS = ("prompt_tokens", "vllm_hit_tokens", "external_hit_tokens", "preemptions")
Figures = dict[str, Any]


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")],
    arms: Annotated[str, typer.Option(help="Which, separated by commas.")],
    parts: Annotated[str, typer.Option(help="probe, speed, store.")] = "probe,speed,store",
    rounds: Annotated[int, typer.Option(min=1, help="Of the serve workload.")] = 5,
    command: Annotated[str, typer.Option(help="That the file is to name.")] = "",
) -> None:
    """Measure arms of the environment that this runs in."""
    from benchmarks.performance.model import make_model

    asked = [name for name in arms.split(",") if name != BASE]
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary, shown() as progress:
        folder = Path(temporary)
        model = make_model(folder, "qwen3_next")
        plan = _Plan(model.folder, model.block_size, model.states, folder, out, progress, command)
        if "probe" in parts:
            plan.probe(asked)
        if "speed" in parts:
            plan.speed(asked, rounds)
        if "store" in parts:
            plan.store([name for name in asked if ARMS[name].store and ARMS[name].timed])


@dataclass(frozen=True)
class _Plan:
    """
    Attributes:
        size: N, tokens of a block.
        states: groups with states.
    """

    model: Path
    size: int
    states: int
    folder: Path
    out: Path
    progress: Progress
    command: str

    @property
    def limits(self) -> tuple[int, int]:
        """Tokens of a step: one that computes most prompts at once, and less than two blocks."""
        return LIMIT, 2 * self.size - 1

    def _peer(self, name: str, kind: str) -> Peer:
        return Peer(name, ARMS[name], self.model, self.size, self.folder / kind)

    def _texts(self, limit: int) -> list[list[int]]:
        return prompts(self.size, f"right {limit}")

    def _long(self, name: str, count: int, more: int = 1) -> list[list[int]]:
        rng = random.Random(name)
        length = (LONG if more == 1 else 3) * self.size + more
        return [[rng.randrange(32, 127) for _ in range(length)] for _ in range(count)]

    def probe(self, names: Sequence[str]) -> None:
        task = self.progress.add_task("vLLM alone: the reference", total=len(names) + 1)
        right: dict[int, Reference] = {}
        broken = self._long("broken", 3, 17)
        base: Figures = {}
        for limit in self.limits:
            with self._peer(BASE, f"reference-{limit}") as peer:
                peer.start(limit)
                peer.wait()
                ask(peer.engine, [40, 41])
                texts = self._texts(limit)
                right[limit] = reference(peer.engine, texts, self.size)
                steps = "large_steps" if limit == LIMIT else "small_steps"
                base[steps] = answers_of(peer, texts, right[limit], self.size)
                if limit != LIMIT:
                    spoiled = reference(peer.engine, broken, self.size)
        self._keep(BASE, "probe", base)
        self.progress.advance(task)
        for name in names:
            self.progress.update(task, description=f"{ARMS[name].title}: prompts")
            with self._peer(name, "probe") as peer:
                self._keep(name, "probe", self._probe_one(peer, right, broken, spoiled))
            self.progress.advance(task)

    def _probe_one(
        self,
        peer: Peer,
        right: dict[int, Reference],
        broken: Sequence[list[int]],
        spoiled: Reference,
    ) -> Figures:
        """All that one arm answers; what ends it early is kept in the figures as "failed"."""
        found: Figures = {}
        kept = self._long("kept", LATER)
        large, small = self.limits
        try:
            self._started(peer, large)
            found["large_steps"] = answers_of(peer, self._texts(large), right[large], self.size)
            for prompt in (*kept, *broken):
                ask(peer.engine, prompt, 1)
            peer.engine.forget()
            found["stored_bytes"] = peer.stored_bytes()
            peer.stop(server=False)
            if peer.arm.server is not None:
                self._started(peer, small)
                found["engine_restart"] = later(peer.engine, kept[:2])
                peer.stop()
            self._started(peer, small)
            found["restart"] = {**later(peer.engine, kept), "server_says": peer.failure()}
            if peer.arm.store:
                found["damaged"] = damaged(peer, broken, spoiled, self.size)
            found["small_steps"] = answers_of(peer, self._texts(small), right[small], self.size)
        except Exception as error:  # the other arms go on
            found["failed"] = peer.why(error)
        return found

    def _started(
        self, peer: Peer, limit: int, blocks: int | None = None, forked: bool = True
    ) -> None:
        peer.start(limit, blocks, forked)
        peer.wait()
        ask(peer.engine, [40, 41])

    def speed(self, names: Sequence[str], rounds: int) -> None:
        """First tokens, and the serve workload: new prefixes in each round, all arms in turn."""
        pages = -(-(PREFIX + SUFFIX + OUTPUT) // self.size)
        small = AT_ONCE * (pages + STATES * self.states) + 1
        task = self.progress.add_task("starting engines", total=None)
        with ExitStack() as stack:
            peers: dict[str, Peer] = {}
            tokens: dict[str, Figures] = {}
            for name in (BASE, *(each for each in names if ARMS[each].timed)):
                peer = stack.enter_context(self._peer(name, "speed"))
                try:
                    self._started(peer, LIMIT, None if name == BASE else small, forked=False)
                    self._round(peer, Workload(1, 2, PREFIX, SUFFIX, OUTPUT))
                    first = first_token(peer, self._long("first", 1)[0])
                except Exception as error:  # the other arms go on
                    self._keep(name, "speed", {"failed": peer.why(error)})
                    peer.stop()
                else:
                    peers[name], tokens[name] = peer, first
            runs: dict[str, Figures] = {name: {} for name in peers}
            self.progress.update(task, total=len(peers) * rounds)
            for number in range(rounds):
                workload = Workload(PREFIXES, EACH, PREFIX, SUFFIX, OUTPUT, number + 1)
                for name in random.Random(number).sample(list(peers), len(peers)):
                    self.progress.update(task, description=f"{ARMS[name].title}: 4 at once")
                    try:
                        values = self._round(peers[name], workload)
                    except Exception as error:  # the other arms go on
                        self._keep(name, "speed", {"failed": peers[name].why(error), **runs[name]})
                        peers.pop(name).stop()
                        continue
                    for figure, value in values.items():
                        runs[name].setdefault(figure, []).append(value)
                    self.progress.advance(task)
                    self._keep(
                        name,
                        "speed",
                        {
                            **runs[name],
                            "first_token": tokens[name],
                            "rounds": number + 1,
                            "workload": asdict(workload),
                            "blocks": None if name == BASE else small,
                        },
                    )

    def store(self, names: Sequence[str]) -> None:
        """First tokens of what only files or Redis have: all processes were started anew."""
        task = self.progress.add_task("starting engines", total=len(names))
        asked = self._long("from the store", REPEATS + 1)
        for name in names:
            self.progress.update(task, description=f"{ARMS[name].title}: hits after a restart")
            with self._peer(name, "store") as peer:
                try:
                    self._started(peer, LIMIT, forked=False)
                    for prompt in asked:
                        ask(peer.engine, prompt, 1)
                    peer.engine.forget()
                    peer.stop()
                    self._started(peer, LIMIT, forked=False)
                    self._keep(name, "store", from_store(peer.engine, asked))
                except Exception as error:  # the other arms go on
                    self._keep(name, "store", {"failed": peer.why(error)})
            self.progress.advance(task)

    def _round(self, peer: Peer, workload: Workload) -> dict[str, float]:
        engine = peer.engine
        engine.forget(0.5)
        before = engine.counts()
        answer = client.ask(engine.url, self.model, workload, AT_ONCE, self.folder)
        after = engine.counts()
        values = {name: after[name] - before[name] for name in COUNTS}
        return values | {name: answer[name] for name in report.FIGURES}

    def _keep(self, name: str, part: str, figures: Figures) -> None:
        """Write a part of one arm into the file; the vLLM of each environment has a row."""
        known = read(self.out) if self.out.exists() else {"arms": {}}
        known["model"] = {"family": "qwen3_next", "block_size": self.size, "limits": self.limits}
        known["command"] = self.command
        release = versions()["lmcache"]
        row = known["arms"].setdefault(name if name != BASE else f"{BASE} {release}", {})
        row |= {"title": ARMS[name].title, "lmcache": release}
        row[part] = {
            **origin(),
            **figures,
        }
        write(self.out, known)


if __name__ == "__main__":
    typer.run(main)
