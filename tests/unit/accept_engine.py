# SPDX-License-Identifier: Apache-2.0
"""An engine made up for the acceptance test: noise, misses and faults to order."""

import io
import random
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from lmcache_hybrid.tools.accept.compare import Answer
from lmcache_hybrid.tools.accept.report import print_verdict
from lmcache_hybrid.tools.accept.result import Result
from lmcache_hybrid.tools.accept.run import Run

ORDINARY = range(32, 127)
RAM = {"name": "LocalCPUBackend", "title": "RAM", "survives": False}
REDIS = {"name": "RemoteBackend", "title": "redis://", "survives": True}
FACTS = {
    "block_size": 16,
    "chunk_unit": 16,
    "unit": 0,
    "num_blocks": 4000,
    "groups": {"attention": 1, "window": 0, "state": 3},
    "group_kinds": [(1, "state"), (2, "state"), (3, "state"), (0, "attention")],
    "paged_blocks": 1,
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
    "chunk_budget": 0,
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
        drafts: drafted tokens of each answer; how many are accepted depends on the prompt, and
            with ``jitter`` on chance.
        spoilt_drafts: whether none is accepted behind what a tier brought.
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
        drafts: int = 0,
        spoilt_drafts: bool = False,
        **facts,
    ) -> None:
        self._blind, self._drafts, self._spoilt_drafts = blind, drafts, spoilt_drafts
        self._lost: int | None = None
        self._spoilt: set = set()
        self.facts = {**FACTS, **facts, "ordinary": list(ORDINARY)}
        self._tiers, self._jitter, self._wrong, self._lose = held, jitter, wrong, lose
        self._local: set = set()
        self._used = list(held)
        self._reads: Counter = Counter()
        self._random = random.Random(1)
        self.counted = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *raised: object) -> None: ...

    def ask(self, asked: Sequence[Sequence[int]], salt: str, save: bool) -> list[Answer]:
        assert not (save and self._lost is not None), "what is lost would be stored"
        found = [self._find(tuple(ids), salt) for ids in asked]
        external = sum(brought for _, brought in found)
        for ids in asked:
            kept, stored = self._ends(tuple(ids), salt)
            self._local |= {(salt, tuple(ids[:end])) for end in kept}
            for held in self._tiers.values() if save else ():
                held |= {(salt, tuple(ids[:end])) for end in stored}
        return [
            self._answer(tuple(ids), salt, cached, brought, external)
            for ids, (cached, brought) in zip(asked, found)
        ]

    def _ends(self, ids: tuple, salt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Boundaries of a prompt that vLLM's cache keeps, and those that the tiers do."""
        every = range(self.facts["block_size"], len(ids) + 1, self.facts["block_size"])
        return every, every

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
        accepted = hash(ids) % (self._drafts // 2 + 1) + self._drafts // 2
        if self._jitter:
            accepted -= self._random.randrange(self._drafts // 8 + 1)
        if self._spoilt_drafts and brought:
            accepted = 0
        steps = [{"7": best, "8": best - 1}]
        return Answer([7], steps, cached, external, 0.01, self._drafts, accepted)

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
    engines = iter((options, {**options, **(second or {})}))

    def start() -> Engine:
        if "LocalCPUBackend" in tiers:
            tiers["LocalCPUBackend"] = set()
        return Engine(tiers, **next(engines))

    return Run(lambda text: None, quick=quick).ask_engines(start)


def shown(result: Result) -> list[str]:
    out = io.StringIO()
    print_verdict(Console(file=out, width=100), result)
    return out.getvalue().splitlines()
