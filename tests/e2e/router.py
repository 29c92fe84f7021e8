# SPDX-License-Identifier: Apache-2.0
"""Engines that publish their events, and prompts whose hits are foreseen from these."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_hybrid.storage.record_format import record_bytes
from tests.e2e.blocks import block_size, described
from tests.e2e.engine import Engine
from tests.e2e.subscriber import ATTENTION, Subscriber

# Blocks of a whole conversation.
BLOCKS = 4
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def room_for(model: Path, conversations: int) -> float:
    """Gigabytes that so many conversations take, each with the states of one boundary."""
    found = described(model)
    states = len(found.states) * record_bytes(found.state_bytes // len(found.states))
    return conversations * (BLOCKS * record_bytes(found.attention_bytes) + states) / 1024**3


@contextmanager
def publishing(ports: list[int], model: Path, config: dict, **options) -> Iterator[Engine]:
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
    """Prompts of several conversations, cut and continued; what was foreseen of each.

    Attributes:
        size: tokens per block.
    """

    def __init__(self, router: Subscriber, model: Path, seed: int, trunks: int = 6) -> None:
        self.router, self.rng = router, random.Random(seed)
        self.size = block_size(model)
        self.trunks = [self.ids(BLOCKS * self.size + 20) for _ in range(trunks)]
        self.outcomes: list[tuple[int, int, int]] = []

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 90) for _ in range(count)]

    def prompt(self) -> list[int]:
        """A trunk, cut anywhere, sometimes with another end."""
        trunk = self.rng.choice(self.trunks)
        cut = self.rng.choice((len(trunk), 2 * self.size + 7, 3 * self.size + 1))
        more = self.ids(self.size + 9) if self.rng.random() < 0.3 else []
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
