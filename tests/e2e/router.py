# SPDX-License-Identifier: Apache-2.0
"""Engines that publish their events, and prompts whose hits are foreseen from these."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import Engine
from subscriber import ATTENTION, Subscriber

OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
SIZE = 384


def free_ports() -> tuple[int, int]:
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@contextmanager
def publishing(ports: tuple[int, int], model: Path, config: dict, **options) -> Iterator[Engine]:
    """An engine that publishes its events."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    env = {**OWN_PROCESS, **options.pop("env", {})}
    config = {"enable_kv_events": True, **config}
    with Engine(model, config, env=env, kv_events_config=events, **options) as engine:
        yield engine


class Asks:
    """Prompts of several conversations, cut and continued; what was foreseen of each."""

    def __init__(self, router: Subscriber, seed: int, trunks: int = 6) -> None:
        self.router, self.rng = router, random.Random(seed)
        self.trunks = [self.ids(4 * SIZE + 20) for _ in range(trunks)]
        self.outcomes: list[tuple[int, int, int]] = []

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 90) for _ in range(count)]

    def prompt(self) -> list[int]:
        """A trunk, cut anywhere, sometimes with another end."""
        trunk = self.rng.choice(self.trunks)
        cut = self.rng.choice((len(trunk), 2 * SIZE + 7, 3 * SIZE + 1))
        more = self.ids(SIZE + 9) if self.rng.random() < 0.3 else []
        return trunk[:cut] + more

    def ask(
        self, engine: Engine, prompt: list[int] | None = None, quiet: float = 0.3
    ) -> tuple[int, int]:
        """(tokens that the events promise, tokens that hit).

        Args:
            quiet: seconds without an event before the promise is looked at.
        """
        prompt = prompt or self.prompt()
        engine.forget()
        index = self.router.settled(quiet)
        foreseen, pages = index.deepest(prompt), index.deepest(prompt, ATTENTION)
        hit = engine.ask(prompt, 2).external
        self.outcomes.append((foreseen, hit, pages))
        return foreseen, hit

    @property
    def wrong(self) -> list[tuple[int, int, int]]:
        return [each for each in self.outcomes if each[0] != each[1]]

    @property
    def hits(self) -> int:
        return sum(hit > 0 for _, hit, _ in self.outcomes)
