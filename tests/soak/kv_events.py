# SPDX-License-Identifier: Apache-2.0
"""How often a router foresees an engine's hits from its events alone: ``--help`` lists options.

    python -m tests.soak.kv_events --out events.json

RAM and disk are too small for the prompts, so both evict all the time. The engine is restarted
on the same disk, every other time after a ``kill -9``. Every tenth ask waits until no event has
come for a second, all others for 50 ms. See ``make soak-events``.
"""

import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from vllm.distributed.kv_events import BlockRemoved

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Engine
from tests.e2e.router import Asks, publishing, room_for
from tests.e2e.subscriber import Subscriber
from tests.ports import free_ports
from tests.soak.reference import header

SETTLED, HURRIED = 1.0, 0.05  # seconds without an event
SETTLED_EVERY = 10
# What ``LocalDisk.restore`` logs.
FOUND = re.compile(r"local_disk \S+: (\d+) records")
# Of all asks; hits on what lies on disk at a start, and no prompt has named since, are none.
MOST_SURPRISES = 0.01


@dataclass
class Life:
    """An engine from its start to its end, and what was foreseen of it.

    Attributes:
        hits: asks that hit.
        too_much, too_little: asks of which more or less was foreseen than hit.
        not_named: of ``too_little``, those whose hit no earlier prompt of this life had named.
        settled, settled_too_much: the same of the asks that waited until events had ended.
        on_disk: records that the engine found there when it started.
        withdrawn: records by medium.
        wrong: of each wrong ask its number, the tokens foreseen and the tokens that hit.
    """

    asks: int = 0
    right: int = 0
    hits: int = 0
    too_much: int = 0
    too_little: int = 0
    not_named: int = 0
    settled: int = 0
    settled_too_much: int = 0
    on_disk: int = 0
    withdrawn: dict[str, int] = field(default_factory=dict)
    wrong: list[tuple[int, int, int]] = field(default_factory=list)
    killed: bool = False
    seconds: int = 0


class Soak:
    """Asks one engine after the other. All calls come from one thread."""

    def __init__(self, model: Path, folder: Path, seed: int, trunks: int) -> None:
        self.model, self.ports = model, free_ports(2)
        self.config = {
            "local_cpu": True,
            "max_local_cpu_size": room_for(model, trunks // 3),
            "local_disk": str(folder / "records"),
            "max_local_disk_size": room_for(model, trunks * 2 // 3),
        }
        self.router = Subscriber(*self.ports)
        self.stream = Asks(self.router, model, seed, trunks)
        self.lives: list[Life] = []
        self.began = self.said = time.monotonic()

    def live(self, asks: int, kill: bool) -> Life:
        """Start an engine, ask it, and end it."""
        life, began = Life(killed=kill), time.monotonic()
        self.lives.append(life)
        named: set[tuple[int, ...]] = set()
        # A core that tests beside it leave alone.
        env = {"VLLM_CPU_OMP_THREADS_BIND": str((os.cpu_count() or 1) - 1)}
        with publishing(self.ports, self.model, self.config, env=env) as engine:
            life.on_disk = sum(map(int, FOUND.findall(engine.log)))
            for _ in range(asks):
                self._ask(engine, life, named)
                if time.monotonic() - self.said > 20:
                    self.say(life)
            seen = self.router.settled().seen
            if kill:
                engine.kill()
        removed: Counter[str] = Counter()
        for event in seen:
            if isinstance(event, BlockRemoved) and event.medium != "GPU":
                removed[event.medium] += len(event.block_hashes)
        life.withdrawn, life.seconds = dict(removed), round(time.monotonic() - began)
        self.say(life)
        return life

    def say(self, life: Life) -> None:
        self.said = time.monotonic()
        done = sum(each.asks for each in self.lives)
        minutes = (self.said - self.began) / 60
        typer.echo(f"[{minutes:5.1f} min] {done} asks; this engine: {json.dumps(asdict(life))}")

    def figures(self) -> dict:
        """What was found until now."""
        totals: Counter[str] = Counter()
        for life in self.lives:
            figures = asdict(life)
            totals.update({name: n for name, n in figures.items() if type(n) is int})
            totals.update({f"withdrawn: {medium}": n for medium, n in life.withdrawn.items()})
        return {
            "block_size": self.stream.size,
            "wall_minutes": round((time.monotonic() - self.began) / 60, 1),
            "counts": dict(totals),
            "lives": [asdict(life) for life in self.lives],
            "failure": failure(totals),
        }

    def _ask(self, engine: Engine, life: Life, named: set[tuple[int, ...]]) -> None:
        settled = life.asks % SETTLED_EVERY == 0
        prompt, size = self.stream.prompt(), self.stream.size
        foreseen, hit = self.stream.ask(engine, prompt, quiet=SETTLED if settled else HURRIED)
        life.asks += 1
        life.right += foreseen == hit
        life.hits += hit > 0
        life.too_much += foreseen > hit
        life.too_little += foreseen < hit
        life.not_named += foreseen < hit and tuple(prompt[:hit]) not in named
        life.settled += settled
        life.settled_too_much += settled and foreseen > hit
        if foreseen != hit:
            life.wrong.append((life.asks, foreseen, hit))
        named.update(tuple(prompt[:end]) for end in range(size, len(prompt), size))


def failure(totals: Mapping[str, int]) -> str | None:
    """Why the run failed; None where it did not."""
    if totals["settled_too_much"]:
        return f"{totals['settled_too_much']} settled asks were promised too much"
    surprises = totals["asks"] - totals["right"] - totals["not_named"]
    if surprises > MOST_SURPRISES * totals["asks"]:
        return f"{surprises} of {totals['asks']} asks were not foreseen, though a prompt named them"
    return None


def main(
    asks: Annotated[int, typer.Option(help="Prompts, over all engines.")] = 1000,
    restarts: Annotated[int, typer.Option(help="Of the engine, on one disk.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    trunks: Annotated[int, typer.Option(help="Conversations; a third fits into RAM.")] = 12,
    family: Annotated[str, typer.Option(help="A tiny model.")] = "lfm2",
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("events.json"),
) -> None:
    """Predict each hit of an engine from its events, over evictions and restarts.

    Ends with 1 if a settled ask was promised too much, or over 1 % were not foreseen, though an
    earlier prompt of the same engine had named what they hit.
    """
    found = {
        **header("kv_events"),
        "seed": seed,
        "conversations": trunks,
        "family": family,
    }
    with tempfile.TemporaryDirectory(prefix="soak-events-") as folder:
        soak = Soak(make_model(family, Path(folder, "model")), Path(folder), seed, trunks)
        for at in range(restarts + 1):
            share = asks * (at + 1) // (restarts + 1) - asks * at // (restarts + 1)
            soak.live(share, kill=at % 2 == 0 and at < restarts)
            found |= soak.figures()
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=1) + "\n")
        soak.router.close()
    typer.echo(json.dumps(found["counts"]))
    if found["failure"]:
        typer.echo(f"FAILED, seed {seed}: {found['failure']}")
        raise typer.Exit(1)


if __name__ == "__main__":  # the engine's process imports this file
    typer.run(main)
